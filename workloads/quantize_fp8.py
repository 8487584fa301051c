"""Quantisation to FP8: references. They define the bits, so they always compute in float32."""

from __future__ import annotations

import torch

LARGEST = 448.0
"""Of the finite e4m3 numbers."""


def scales(amax: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Return the scales of blocks whose largest finite magnitudes these are."""
    # by a tensor: on a GPU torch multiplies by the inverse of a number, which rounds otherwise
    scale = amax / torch.full_like(amax, LARGEST)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale.double())  # in [0.5, 1): a power of two has 0.5
        exponent = exponent.long() - (mantissa == 0.5).long()
        power = ((exponent + 1023) << 52).view(torch.float64).float()
        scale = torch.where(scale == 0, 0.0, power)
    return torch.where(scale == 0, 1.0, scale)


def _quantize(blocks, dims, power_of_two):
    magnitude = torch.where(blocks.isfinite(), blocks.abs(), 0.0)
    scale = scales(magnitude.amax(dims, keepdim=True), power_of_two)
    value = (blocks / scale).clamp(-LARGEST, LARGEST)
    # NaN has one bit pattern, as on the GPU
    q = torch.where(value.isnan(), torch.nan, value).to(torch.float8_e4m3fn)
    return q, scale.squeeze(dims)


def quantize_fp8_rowwise_fwd(x, power_of_two, target):
    """Quantise each row in blocks of 128."""
    q, scale = _quantize(x.float().unflatten(-1, (-1, 128)), (-1,), power_of_two)
    return q.flatten(-2), scale


def quantize_fp8_blockwise_fwd(x, power_of_two, target):
    """Quantise in blocks of 128 rows and 128 columns."""
    blocks = x.float().unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    q, scale = _quantize(blocks, (-3, -1), power_of_two)
    return q.flatten(-2).flatten(-3, -2), scale
