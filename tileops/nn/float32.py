"""Parts of a module that stay in float32 whatever `.to()` makes of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

# asked once, since torch.compile cannot trace the question in every version of torch
_AUTOCAST = {kind for kind in ("cpu", "cuda", "xpu") if torch.amp.is_autocast_available(kind)}


class Float32Linear(nn.Linear):
    """A linear layer that stays in float32."""

    def __init__(self, *sizes: int, bias: bool, device: Any, dtype: Any) -> None:
        super().__init__(*sizes, bias=bias, device=device, dtype=torch.float32)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product in float32, under autocast too."""
        kind = input.device.type
        if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return super().forward(input.float())
        return super().forward(input.float())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return super()._apply(keep_dtype(fn), recurse)


def keep_dtype(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what does to a tensor as ``fn`` does, its dtype apart."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        moved = fn(x)
        return moved if moved.dtype == x.dtype else x.to(moved.device)

    return apply
