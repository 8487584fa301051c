"""What every op shares: calling it runs ``forward``, and its repr shows its settings."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tileops import compilation, repeat, targets
from tileops.repetition import Repetition

_SEEN, _UNLIKE = object(), object()
"""Of a signature: that one call had it, and that its calls cannot be repeated."""

_MOST_SIGNATURES = 256
"""That an op remembers, in 8 KB each, before it starts anew."""


class Op:
    """Base of the ops. A subclass keeps each constructor argument as an attribute of that name."""

    target: str | None
    __slots__ = ("_calls",)  # no attribute: copies of an op start without

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op on one call's tensors."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``, or what it has launched for tensors like these: see `tileops.repeat`."""
        if torch.compiler.is_compiling() or not repeat.is_plain():
            return self.forward(*args, **kwargs)
        if compilation.collected_arch() is not None:  # such a call launches nothing
            return self.forward(*args, **kwargs)
        tensors = (*args, *kwargs.values())
        signature = repeat.signature(tensors)
        if signature is None:
            return self.forward(*args, **kwargs)
        key = (signature, *kwargs, targets.version, type(self).forward, *self.__dict__.values())
        try:
            calls = self._calls
        except AttributeError:
            calls = self._calls = {}
        try:
            known = calls.get(key)
        except TypeError:  # a setting that a user's class has added, without a hash
            return self.forward(*args, **kwargs)
        if isinstance(known, Repetition):
            if known.serves(tensors):
                return known(tensors)
        elif known is not _UNLIKE and self._may_repeat(tensors):
            if known is _SEEN:
                result, repetition = repeat.record(lambda: self.forward(*args, **kwargs), tensors)
                own = type(self).forward, *self.__dict__.values()
                if key[-len(own) :] == own:  # no thread has set one
                    calls[key] = repetition or _UNLIKE
                return result
            if len(calls) >= _MOST_SIGNATURES:
                calls.clear()
            calls[key] = _SEEN
        return self.forward(*args, **kwargs)

    def _may_repeat(self, tensors: tuple[torch.Tensor | None, ...]) -> bool:
        """Return whether nothing but kernels of a target that allows it has a part in a call."""
        types = type(self), *map(type, self.__dict__.values())
        if any(cls.__module__.split(".")[0] not in _KNOWN for cls in types):
            return False  # a user's code may do anything
        # of a wrapper, the module is that of what it wraps
        if not getattr(self.forward, "__globals__", {}).get("__name__", "").startswith("tileops."):
            return False
        device = next((x.device for x in tensors if x is not None), None)
        return device is not None and targets.repeats(self.target, device)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({settings})"


_KNOWN = "builtins", "torch", "tileops"
