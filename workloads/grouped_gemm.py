"""Grouped GEMM: reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tileops.layouts import MaskedLayoutSpec, MGroupedLayoutSpec
from tileops.moe.grouped_gemm import ACTIVATIONS, Activation
from tileops.workloads.accuracy import wide


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply a gated activation."""
    if activation.name == "gelu_and_mul":
        return torch.nn.functional.gelu(gate) * up
    if activation.name == "silu_and_mul":
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of the named gated activations to rows ordered as it reads them."""
    if activation == "swigluoai":
        gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, ACTIVATIONS[activation])


_PLAIN = {
    "relu": torch.relu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def activate_products(
    gate: torch.Tensor, up: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """Apply what a grouped GEMM is asked to apply, a gated activation if there are up values."""
    if activation is None:
        return gate
    return _PLAIN[activation.name](gate) if up is None else gated(gate, up, activation)


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


def moe_grouped_gemm_fwd(
    a, gate, up, layout_metadata, gate_bias, up_bias, layout, activation, *, target, out
):
    """Multiply expert by expert in a wider dtype; bias, activation, one rounding."""
    compute = wide(a.dtype)

    def product(rows, e, weight, bias):
        value = a[rows].to(compute) @ weight[e].to(compute).T
        return value if bias is None else value + bias[e].to(compute)

    for e, rows in expert_rows(layout, layout_metadata, a.shape[-2], gate.shape[0]):
        other = None if up is None else product(rows, e, up, up_bias)
        value = activate_products(product(rows, e, gate, gate_bias), other, activation)
        out[rows] = value.to(out.dtype)
