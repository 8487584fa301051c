"""Grouped GEMM of FP8 operands with block scales: reference."""

from __future__ import annotations

import torch

from tileops.workloads.accuracy import wide
from tileops.workloads.grouped_gemm import expert_rows, gated

_BLOCK = 128


def scaled_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """Return ``a [M, K] @ b [N, K].T`` for scales ``[M, K/128]`` and ``[S, K/128]`` of b's rows.

    A block of K is multiplied without its scales, then scaled and added, in the order of K.
    """
    compute = wide(a.dtype)
    num_rows, depth = b.shape
    scale_rows = torch.arange(num_rows, device=b.device) * b_scale.shape[0] // max(num_rows, 1)
    total = torch.zeros(a.shape[0], num_rows, dtype=compute, device=a.device)
    for block in range(depth // _BLOCK):
        columns = slice(block * _BLOCK, (block + 1) * _BLOCK)
        product = a[:, columns].to(compute) @ b[:, columns].to(compute).T
        b_factor = b_scale[scale_rows, block].to(compute)
        total += product * (a_scale[:, block, None].to(compute) * b_factor)
    return total


def moe_grouped_gemm_fp8_fwd(
    a,
    a_scale,
    gate,
    gate_scale,
    up,
    up_scale,
    layout_metadata,
    gate_bias,
    up_bias,
    layout,
    activation,
    *,
    target,
    out,
):
    """Multiply expert by expert in a wider dtype; bias, activation, one rounding."""

    def product(rows, e, weight, scale, bias):
        value = scaled_product(a[rows], a_scale[rows], weight[e], scale[e])
        return value if bias is None else value + bias[e].to(value.dtype)

    for e, rows in expert_rows(layout, layout_metadata, a.shape[-2], gate.shape[0]):
        value = product(rows, e, gate, gate_scale, gate_bias)
        if up is not None:
            value = gated(value, product(rows, e, up, up_scale, up_bias), activation)
        out[rows] = value.to(out.dtype)
