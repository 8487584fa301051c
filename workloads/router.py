"""MoERouter: reference."""

from __future__ import annotations

import torch

from tileops.workloads.accuracy import precision
from tileops.workloads.topk import descending

LOWEST = {torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -1e4}
"""What a column holds whose expert has no weight."""


def affinity(scores: torch.Tensor, scoring: str) -> torch.Tensor:
    """Score in float32: every form keeps its tails."""
    scores = scores.to(precision(torch.float32))
    if scoring == "softmax":
        return torch.softmax(scores, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(scores)
    softplus = scores.clamp(min=0) + torch.log1p(torch.exp(-scores.abs()))
    # far below zero softplus is the exponential, whose root does not underflow as it would
    return torch.where(scores < -20, torch.exp(scores / 2), softplus.sqrt())


def moe_router_fwd(
    scores, bias, expert_ids, count, topk, start, scoring, route_scale, dtype, *, target
):
    """Score, choose, normalise, keep the local columns."""
    num_experts = scores.shape[1]
    affinities = affinity(scores, scoring)
    if expert_ids is None:
        ranked = affinities if bias is None else affinities + bias
        ids = descending(ranked)[:, :topk]
        chosen = ranked.gather(1, ids) > torch.finfo(torch.float32).min  # false for NaN
    else:
        chosen = (expert_ids >= 0) & (expert_ids < num_experts)
        ids = torch.where(chosen, expert_ids, 0).long()
    slots = torch.where(chosen, affinities.gather(1, ids), 0.0)
    total = slots.sum(1, keepdim=True)
    weights = torch.where(total > 0, slots / total, 0.0)
    mass = torch.zeros_like(affinities).scatter_add_(1, ids, weights)[:, start : start + count]
    probs = torch.where(mass > 0, mass.log(), LOWEST[dtype]).to(dtype)
    return probs, route_scale * mass.sum(1, keepdim=True)
