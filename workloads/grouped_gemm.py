"""Grouped GEMM: reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tileops.layouts import MaskedLayoutSpec, MGroupedLayoutSpec
from tileops.workloads.accuracy import wide


def activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply a gated activation to rows ordered as it reads them."""
    if activation == "swigluoai":
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "gelu_and_mul":
        return torch.nn.functional.gelu(gate) * up
    return torch.nn.functional.silu(gate) * up


def expert_rows(
    layout: MGroupedLayoutSpec, metadata: torch.Tensor, num_rows: int, num_experts: int
) -> Iterator[tuple[int, tuple]]:
    """Yield each expert that has rows, with the index of those rows in the matrix or slab."""
    values = metadata.tolist()
    if isinstance(layout, MaskedLayoutSpec):
        for e, count in enumerate(values):
            if count > 0:
                yield e, (e, slice(0, min(count, layout.max_m)))
    elif layout.metadata == "physical_psum":
        start = 0
        for e, end in enumerate(values):
            end = min(end, num_rows)
            if end > start:
                yield e, (slice(start, end),)
                start = end
    else:
        for e in sorted({v for v in values if 0 <= v < num_experts}):
            yield e, ((metadata == e).nonzero()[:, 0],)


def moe_grouped_gemm_fwd(a, b, layout_metadata, bias, layout, activation, target, out):
    """Multiply expert by expert in a wider dtype; bias, activation, one rounding."""
    compute = wide(a.dtype)
    for e, rows in expert_rows(layout, layout_metadata, a.shape[-2], b.shape[0]):
        product = a[rows].to(compute) @ b[e].to(compute).T
        if bias is not None:
            product += bias[e].to(compute)
        out[rows] = (product if activation is None else activate(product, activation)).to(out.dtype)
