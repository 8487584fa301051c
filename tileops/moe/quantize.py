"""Quantisation to FP8 with a scale for each block: rows of 128 values, or squares of 128 x 128."""

from __future__ import annotations

import torch

from tileops import check, targets

_SCHEMA = "(Tensor x, bool power_of_two, str? target) -> (Tensor, Tensor)"
torch.library.define("tileops::quantize_fp8_rowwise_fwd", _SCHEMA)
torch.library.define("tileops::quantize_fp8_blockwise_fwd", _SCHEMA)


def new_results(x: torch.Tensor, rows_of_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the bytes and the scales of ``x`` in blocks of so many rows."""
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    shape = [*x.shape[:-1], x.shape[-1] // check.BLOCK]
    if rows_of_block > 1:
        shape[-2] //= rows_of_block
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _quantize(op: str, x: torch.Tensor, rows_of_block: int, power_of_two: bool, target: str | None):
    """Run the target's kernel, which takes three dimensions of any strides but the last."""
    if x.numel() == 0:
        return new_results(x, rows_of_block)
    slabs = x[(None,) * (3 - x.ndim)] if x.ndim < 3 else x
    if x.ndim > 3:
        try:
            slabs = x.view(-1, *x.shape[-2:])
        except RuntimeError:  # no one stride leads through the outer dimensions
            parts = [_quantize(op, part, rows_of_block, power_of_two, target) for part in x]
            q, scale = zip(*parts, strict=True)
            return torch.stack(q), torch.stack(scale)
    q, scale = targets.run(op, target, slabs, power_of_two)
    lead = x.shape[:-2] if x.ndim > 1 else ()
    rows = scale.shape[-2:] if x.ndim > 1 else scale.shape[-1:]
    return q.view(x.shape), scale.view(*lead, *rows)


@torch.library.impl("tileops::quantize_fp8_rowwise_fwd", "CompositeExplicitAutograd")
def _quantize_fp8_rowwise_fwd(x, power_of_two, target):
    return _quantize("quantize_fp8_rowwise_fwd", x, 1, power_of_two, target)


@torch.library.register_fake("tileops::quantize_fp8_rowwise_fwd")
def _quantize_fp8_rowwise_fwd_fake(x, power_of_two, target):
    return new_results(x, 1)


@torch.library.impl("tileops::quantize_fp8_blockwise_fwd", "CompositeExplicitAutograd")
def _quantize_fp8_blockwise_fwd(x, power_of_two, target):
    return _quantize("quantize_fp8_blockwise_fwd", x, check.BLOCK, power_of_two, target)


@torch.library.register_fake("tileops::quantize_fp8_blockwise_fwd")
def _quantize_fp8_blockwise_fwd_fake(x, power_of_two, target):
    return new_results(x, check.BLOCK)


def _check(op: str, name: str, x: torch.Tensor, last: tuple[str, ...], power_of_two: bool) -> None:
    check.flag(op, "power_of_two", power_of_two)
    checker = check.Checker(op)
    lead = max(0, getattr(x, "ndim", 0) - len(last))
    checker.tensor(name, x, (*(f"D{axis}" for axis in range(lead)), *last), check.FLOATS)
    checker.in_blocks(name, x, *last)


def quantize_fp8_rowwise(
    x: torch.Tensor, *, power_of_two: bool = False, target: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations: a scale for each row and 128 columns.

    The scale of a block is its largest finite magnitude over 448, the largest number of e4m3, in
    float32. Where that is 0 (a block of zeros, or without finite values) the scale is 1. A value
    divided by its scale in float32 is rounded to e4m3, to nearest even. Infinities become +-448,
    NaN stays NaN. All targets give the same bits.

    Args:
        x: `[..., K]` of any strides but the last; float32, bfloat16 or float16. K is a multiple of
            128.
        power_of_two: Take the next power of two that is not smaller as the scale.
        target: Name of the target that serves the call, `BUILTIN` for the in-tree kernels, or None
            to decide from the device.

    Returns:
        `q`, `[..., K]` float8_e4m3fn, and `scale`, `[..., K/128]` float32: `q * scale` is about
        `x`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `x` has the wrong shape, dtype or strides, or no target has that name.
        RuntimeError: If `x` requires grad under grad mode.

    Examples:
        >>> q, scale = quantize_fp8_rowwise(torch.full((2, 256), 896.0))
        >>> q[0, 0].float(), scale.tolist()
        (tensor(448.), [[2.0, 2.0], [2.0, 2.0]])
    """
    op = "quantize_fp8_rowwise"
    name = targets.target_argument(op, target)
    _check(op, "x", x, ("K",), power_of_two)
    return torch.ops.tileops.quantize_fp8_rowwise_fwd.default(x, power_of_two, name)


def quantize_fp8_blockwise(
    w: torch.Tensor, *, power_of_two: bool = False, target: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights: a scale for each block of 128 rows and 128 columns.

    Scales and rounding are those of
    [quantize_fp8_rowwise][tileops.moe.quantize_fp8_rowwise]. This is how DeepSeek-V3's checkpoints
    store weights, with `weight_scale_inv` for `scale`.

    Args:
        w: `[..., N, K]` of any strides but the last; float32, bfloat16 or float16. N and K are
            multiples of 128.
        power_of_two: Take the next power of two that is not smaller as the scale.
        target: Name of the target that serves the call, `BUILTIN` for the in-tree kernels, or None
            to decide from the device.

    Returns:
        `q`, `[..., N, K]` float8_e4m3fn, and `scale`, `[..., N/128, K/128]` float32.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `w` has the wrong shape, dtype or strides, or no target has that name.
        RuntimeError: If `w` requires grad under grad mode.

    Examples:
        >>> q, scale = quantize_fp8_blockwise(torch.randn(8, 256, 384))
        >>> q.shape, scale.shape
        (torch.Size([8, 256, 384]), torch.Size([8, 2, 3]))
    """
    op = "quantize_fp8_blockwise"
    name = targets.target_argument(op, target)
    _check(op, "w", w, ("N", "K"), power_of_two)
    return torch.ops.tileops.quantize_fp8_blockwise_fwd.default(w, power_of_two, name)
