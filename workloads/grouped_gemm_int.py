"""Weights packed into integers: the format, how to make it, and the reference of their GEMM."""

from __future__ import annotations

import torch

from tileops.layouts import ContiguousLayoutSpec
from tileops.workloads.accuracy import wide
from tileops.workloads.grouped_gemm import activate_products, expert_rows

LAYOUT = ContiguousLayoutSpec.tight_physical_psum()


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of ``[0, 2**bits)`` along the last dimension into bytes, the low bits first."""
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    shifts = torch.arange(0, 8, bits, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)).int() << shifts).sum(-1).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of packed bytes, a byte each."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantize(
    weights: torch.Tensor, bits: int, block_size: int = 0, zero_points: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Round weights to the nearest codes, as ``QMoEFwdOp`` takes them.

    Args:
        weights: ``[..., N, K]``.
        bits: 4 or 8.
        block_size: Columns that share a scale; 0 for a scale a row.
        zero_points: Whether a scale has a zero point, from the smallest weight to the largest, or
            is symmetric about 0.

    Returns:
        The packed weights ``[..., N, K * bits / 8]``, float32 scales ``[..., N, G]``, and the
        packed zero points or None.
    """
    columns, top = weights.shape[-1], (1 << bits) - 1
    size = block_size or columns
    blocks = torch.nn.functional.pad(weights.float(), (0, -columns % size))
    blocks = blocks.unflatten(-1, (-1, size))
    if zero_points:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = (high - low) / top
        scales = torch.where(scales == 0, 1.0, scales)
        points = (-low / scales).round()
    else:
        scales = blocks.abs().amax(-1) / (top // 2)
        scales = torch.where(scales == 0, 1.0, scales)
        points = torch.full_like(scales, 1 << bits - 1)
    codes = (blocks / scales[..., None] + points[..., None]).round().clamp(0, top)
    packed = pack(codes.flatten(-2)[..., :columns], bits)
    if not zero_points:
        return packed, scales, None
    return packed, scales, pack(points if block_size else points[..., 0], bits)


def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bits: int,
    block_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``(code - zero point) * scale`` of ``[..., N, K]`` weights, computed in ``dtype``."""
    codes, rows = unpack(packed, bits), packed.shape[-2]
    columns, groups = codes.shape[-1], scales.shape[-1]
    if zero_points is None:
        points = torch.full_like(scales, 1 << bits - 1, dtype=torch.uint8)
    elif block_size:
        points = unpack(zero_points, bits)[..., :groups]
    else:
        points = unpack(zero_points, bits)[..., :rows, None]
    size = block_size or columns
    codes = torch.nn.functional.pad(codes, (0, -columns % size)) if columns % size else codes
    blocks = codes.unflatten(-1, (groups, size)).to(dtype)
    weights = blocks.sub_(points[..., None].to(dtype)).mul_(scales[..., None].to(dtype))
    return weights.flatten(-2)[..., :columns]


def gate_and_up(rows: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split rows, in the first dimension, into those of the gate and the up ones or None."""
    if order == "interleaved":
        return rows[0::2], rows[1::2]
    return rows.chunk(2) if order == "halves" else (rows, None)


def moe_grouped_gemm_int_fwd(
    a, b, scales, zero_points, ends, bias, order, activation, bits, block_size, *, target, out
):
    """Dequantise an expert at a time and multiply in a wider dtype."""
    compute = wide(a.dtype)
    for e, rows in expert_rows(LAYOUT, ends, a.shape[0], b.shape[0]):
        points = None if zero_points is None else zero_points[e]
        weights = dequantize(b[e], scales[e], points, bits, block_size, compute)
        product = weights @ a[rows].to(compute).T
        if bias is not None:
            product += bias[e].to(compute)[:, None]
        out[rows] = activate_products(*gate_and_up(product, order), activation).T.to(out.dtype)
