"""Argument checks shared by every op: a message names the op, the argument, and what it must be."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)
FP8 = (torch.float8_e4m3fn,)

BLOCK = 128
"""Side of the blocks that share a scale with FP8."""

SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
"""Of the positive float32 numbers."""


def integer(op: str, name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Check that a setting is an int (no bool) in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{op}: {name} must be {bound}, got {value}")


def flag(op: str, name: str, value: object) -> None:
    """Check that a setting is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def choice(op: str, name: str, value: object, options: Iterable[object]) -> None:
    """Check that a setting is one of ``options``."""
    options = list(options)
    if value is not None and not isinstance(value, tuple(type(o) for o in options)):
        kinds = " or ".join(sorted({type(o).__name__ for o in options if o is not None}))
        raise TypeError(f"{op}: {name} must be a {kinds}, one of {options}, got {value!r}")
    if value not in options:
        raise ValueError(f"{op}: {name} must be one of {options}, got {value!r}")


def number(op: str, name: str, value: object, *, infinite: bool = False) -> float:
    """Check that a setting is a number and, unless ``infinite``, finite in float32; return it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if value != value or (abs(value) > LARGEST and not infinite):
        kind = "a number" if infinite else "finite in float32"
        raise ValueError(f"{op}: {name} must be {kind}, got {value}")
    return float(value) if abs(value) <= LARGEST else math.copysign(math.inf, value)


def factor(op: str, name: str, value: object) -> None:
    """Check that a setting is finite and positive, in float32 too: kernels compute in it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{op}: {name} must be finite and positive in float32, got {value}")


class Checker:
    """Checks the tensors of one call and remembers what each dimension letter stood for.

    A shape is a tuple of letters (``("E", "2F", "H")``): a letter takes its size from the first
    tensor that has it, ``2F`` is an even size, and later tensors must agree.

    Args:
        op: Name of the op, for the messages.
        **dims: Letters whose sizes are known beforehand.
    """

    def __init__(self, op: str, **dims: int) -> None:
        self.op = op
        self.dims: dict[str, int] = dims
        self.device: torch.device | None = None

    def tensor(
        self,
        name: str,
        x: object,
        shape: tuple[str, ...],
        dtypes: tuple[torch.dtype, ...],
        *,
        any_stride: bool = False,
    ) -> None:
        """Check kind, rank, sizes, dtype, device, last stride and that no gradient is asked for."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{self.op}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in dtypes:
            self._fail_dtype(name, x, dtypes)
        known = len(self.dims)
        if x.ndim != len(shape) or not self._sizes_agree(x, shape):
            self._fail_shape(name, x, shape, known)
        if self.device is None:
            self.device = x.device
        elif x.device != self.device:
            raise ValueError(
                f"{self.op}: {name} must be on {self.device}, as the other tensors, got {x.device}"
            )
        strided = x.ndim and x.stride(-1) != 1 and x.shape[-1] > 1 and not any_stride
        if strided and x.numel():  # an empty tensor may have any strides
            raise ValueError(
                f"{self.op}: {name} must have a last dimension of stride 1, got strides "
                f"{x.stride()}; call .contiguous() on it once, outside the hot path"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.op}: {name} requires grad, but the op is forward-only: "
                f"call it under torch.no_grad() or detach the tensor"
            )

    def in_blocks(self, name: str, x: torch.Tensor, *letters: str) -> None:
        """Check that these sizes of ``x`` are whole blocks; make ``N/128`` a letter for each."""
        for letter in letters:
            size = self.dims[letter]
            if size % BLOCK:
                raise ValueError(
                    f"{self.op}: {name} must have {letter} a multiple of {BLOCK}, the side of the "
                    f"blocks that share a scale, got {letter} = {size} in {tuple(x.shape)}"
                )
            self.dims[f"{letter}/{BLOCK}"] = size // BLOCK

    def output(
        self, name: str, x: object, shape: tuple[str, ...], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        """Check a buffer to write into: as ``tensor``, and no dimension may be expanded."""
        self.tensor(name, x, shape, dtypes)
        assert isinstance(x, torch.Tensor)
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"{self.op}: {name} must not overlap itself, got shape {tuple(x.shape)} "
                f"with strides {x.stride()}"
            )

    def _sizes_agree(self, x: torch.Tensor, shape: tuple[str, ...]) -> bool:
        dims = self.dims
        for size, letter in zip(x.shape, shape, strict=True):
            if letter[0] == "2":
                if size % 2 or size // 2 != dims.setdefault(letter[1:], size // 2):
                    return False
            elif size != dims.setdefault(letter, size):
                return False
        return True

    def _fail_dtype(self, name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        want = " or ".join(str(dtype) for dtype in dtypes)
        hint = f"; use {name}.int()" if dtypes == INT32 and not x.is_floating_point() else ""
        raise ValueError(f"{self.op}: {name} must be {want}, got {x.dtype}{hint}")

    def _fail_shape(self, name: str, x: torch.Tensor, shape: tuple[str, ...], known: int) -> None:
        # what this very tensor introduced is no expectation: keep the first `known` letters
        dims = dict(list(self.dims.items())[:known])
        sizes = [
            2 * dims[d[1:]] if d[0] == "2" and d[1:] in dims else dims.get(d, d) for d in shape
        ]
        letters, values = ("[" + ", ".join(map(str, part)) + "]" for part in (shape, sizes))
        expected = letters if letters == values else f"{letters} = {values}"
        doubled = [size for size in sizes if isinstance(size, str) and size[0] == "2"]
        even = f" with {doubled[0]} even" if doubled else ""
        raise ValueError(f"{self.op}: {name} must be {expected}{even}, got {tuple(x.shape)}")
