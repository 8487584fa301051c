"""What a call allocates, views and launches, written down so that it can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.new_empty, _aten.empty, _aten.empty_like}


class Repetition:
    """What a call allocates, views and launches, for tensors of its signature.

    Values have numbers: first the arguments, then all others. A step is a function, what picks its
    arguments from the values, and the number that its result gets.
    """

    def __init__(
        self,
        steps: list[tuple[Callable[..., Any], Callable[[list[Any]], Any], int]],
        values: list[Any],
        result: Callable[[list[Any]], Any],
        apart: list[tuple[int, int, int, int]],
        device: int | None,
    ) -> None:
        self._steps = steps
        self._values = values
        self._result = result
        self._apart = apart
        self._device = device

    def serves(self, tensors: Sequence[Any]) -> bool:
        """Return whether the addresses and the current device are as they must be."""
        for written, read, low, high in self._apart:
            if low < tensors[read].data_ptr() - tensors[written].data_ptr() < high:
                return False  # they may share memory: the op says what is wrong
        return self._device is None or self._device == torch.cuda.current_device()

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """Repeat the call with other tensors."""
        values = [*tensors, *self._values]
        for function, pick, place in self._steps:
            values[place] = function(*pick(values))
        return self._result(values)


class Recorder(TorchDispatchMode):
    """Writes down what a call with the given tensors does."""

    def __init__(self, tensors: Sequence[object]) -> None:
        super().__init__()
        self._values: list[Any] = list(tensors)
        self._num_arguments = len(tensors)
        self._owners = [i for i, x in enumerate(tensors) if x is not None]
        self._views: dict[tuple[object, ...], int] = {}
        self._steps: list[tuple[Callable[..., Any], tuple[int, ...], int]] = []
        self._apart: list[tuple[int, int, int, int]] = []
        # one tensor in two places: which of them a kernel gets cannot be told
        self._faithful = len({id(tensors[i]) for i in self._owners}) == len(self._owners)

    def _see(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS:
            self._allocated(result)
        elif func.overloadpacket is _aten.full:  # made of nothing but constants
            self._owners.append(self._add(result))
            made = partial(func, *args, **(kwargs or {}))
            self._steps.append((made, (), self._owners[-1]))
        elif func.namespace != "tileops" and not func.is_view:
            self._faithful = False
        return result

    def launching(self, kernel: Any) -> Callable[..., None]:
        """Return ``kernel`` as a function that writes down its launches."""

        def launch(*args: object) -> None:
            kernel(*args)
            self._step(kernel.torch_function, args)

        return launch

    def keep_apart(self, out: torch.Tensor, out_bytes: int, x: torch.Tensor, x_bytes: int) -> None:
        """Write down that two tensors, of a span of so many bytes, must not share memory."""
        written, read = self._number(out), self._number(x)
        if written < self._num_arguments and read < self._num_arguments:
            self._apart.append((written, read, -x_bytes, out_bytes))
        elif written not in self._owners or read not in self._owners:
            self._faithful = False

    def repetition(self, result: object) -> Repetition | None:
        """Return what was written down of a call that has returned ``result``."""
        parts = result if type(result) is tuple and len(result) > 1 else (result,)
        self._faithful &= all(isinstance(part, torch.Tensor) for part in parts)
        numbers = [self._number(part) for part in parts]
        made = {place for _, _, place in self._steps}
        devices = {self._values[i].get_device() for i in self._owners}
        device = devices.pop() if devices else -1
        if device >= 0:
            self._faithful &= device == torch.cuda.current_device()
        if not self._faithful or devices:
            return None
        last = len(self._values)  # takes what launches return
        steps = [
            (function, _pick(places), last if place < 0 else place)
            for function, places, place in self._steps
        ]
        values = [None if i in made else value for i, value in enumerate(self._values)]
        pick = itemgetter(*numbers)  # a value, or a tuple of several
        own = [*values[self._num_arguments :], None]
        return Repetition(steps, own, pick, self._apart, device if device >= 0 else None)

    def _step(self, function: Callable[..., Any], args: Sequence[object], place: int = -1) -> None:
        self._steps.append((function, tuple(map(self._number, args)), place))

    def _allocated(self, x: torch.Tensor) -> None:
        self._faithful &= x.is_contiguous()
        known = [self._values[i] for i in self._owners]
        like = next((other for other in known if other.dtype == x.dtype), None)
        place = self._add(x)
        if like is not None:
            self._step(torch.Tensor.new_empty, (like, tuple(x.shape)), place)
        else:
            self._step(_new_empty, (known[0], tuple(x.shape), x.dtype), place)
        self._owners.append(place)

    def _number(self, value: object) -> int:
        if not isinstance(value, torch.Tensor):
            self._faithful &= value is None or isinstance(value, _CONSTANTS)
            return self._add(value)
        for i, known in enumerate(self._values):
            if known is value:
                return i
        storage = value.untyped_storage()._cdata
        bases = [i for i in self._owners if self._values[i].untyped_storage()._cdata == storage]
        if len(bases) != 1:  # of tensors that share memory, which one is viewed cannot be told
            self._faithful = False
            return self._add(None)
        place = bases[0]
        if self._values[place].dtype != value.dtype:
            try:
                place = self._view(place, torch.Tensor.view, value.dtype)
            except RuntimeError:  # its sizes do not allow that
                self._faithful = False
                return self._add(None)
        base = self._values[place]
        form = tuple(value.shape), value.stride()
        start = value.storage_offset() - base.storage_offset()
        if start:
            return self._view(place, _view, *form, start)
        if form == (tuple(base.shape), base.stride()):
            return place
        return self._view(place, torch.Tensor.as_strided, *form)

    def _view(self, base: int, function: Callable[..., torch.Tensor], *form: Any) -> int:
        key = base, function, *form
        if key not in self._views:
            self._views[key] = place = self._add(function(self._values[base], *form))
            self._step(function, (self._values[base], *form), place)
        return self._views[key]

    def _add(self, value: object) -> int:
        self._values.append(value)
        return len(self._values) - 1


# in the class, torch would wrap it in what imports torch._dynamo: seconds, at the first call
Recorder.__torch_dispatch__ = Recorder._see  # type: ignore[method-assign]

_CONSTANTS = int, float, str, tuple, torch.dtype


def _pick(numbers: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Return a function that picks the values of these numbers, as a tuple."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda values: [values[i] for i in numbers]


def _new_empty(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


def _view(
    base: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], start: int
) -> torch.Tensor:
    return base.as_strided(shape, stride, base.storage_offset() + start)
