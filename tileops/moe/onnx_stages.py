"""What ONNX Runtime's MoE operators are made of: routes, activations, and experts in two GEMMs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops import targets
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.grouped_gemm import Activation

LAYOUT = ContiguousLayoutSpec.tight_physical_psum()
STAGES = ("fused_topk_fwd", "sparse_mixer_fwd", "moe_pre_permute_fwd", "moe_post_permute_fwd")
"""The operators that `route` and `run_experts` run."""

_PLAIN = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu"}

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Multiplies rows, grouped by expert up to the given ends, into a buffer."""


def plain_activation(activation_type: str) -> Activation | None:
    """Return what is applied to the products of FC1 alone."""
    name = _PLAIN.get(activation_type)
    return None if name is None else Activation(name)


def route(router_probs, k, normalize, use_sparse_mixer, target):
    """Return the weights and ids of a batch, on the target's own kernels."""
    if use_sparse_mixer:
        return targets.run("sparse_mixer_fwd", target, router_probs)
    settings = k, "softmax", normalize, 1, 1, 1.0
    return targets.run("fused_topk_fwd", target, router_probs, None, *settings)


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    sizes: tuple[int, int],
    first: Gemm,
    second: Gemm,
    target: str,
    out: torch.Tensor,
) -> None:
    """Permute, both GEMMs, combine; ``sizes`` are the number of experts and their width."""
    num_experts, width = sizes
    rows, ends, inverse = targets.run("moe_pre_permute_fwd", target, x, ids, LAYOUT, num_experts)
    inner = rows.new_empty(rows.shape[0], width)
    first(rows, ends, inner)
    # the permuted input is spent: its memory takes the expert output
    second(inner, ends, rows)
    targets.run("moe_post_permute_fwd", target, rows, weights, inverse, LAYOUT, 1.0, out=out)
