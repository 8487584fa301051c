"""What every op shares: calling it runs ``forward``, and its repr shows its settings."""

from __future__ import annotations

import inspect
from typing import Any


class Op:
    """Base of the ops. A subclass keeps each constructor argument as an attribute of that name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op on one call's tensors."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``."""
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({settings})"
