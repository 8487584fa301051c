"""Top-k routing: reference."""

from __future__ import annotations

import torch

from tileops.workloads.accuracy import precision


def descending(values: torch.Tensor) -> torch.Tensor:
    """Return the order of the last dimension: largest first, NaN last, equal values by index."""
    ranked = torch.where(values.isnan(), -torch.inf, values)
    by_value = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    # NaN and minus infinity compare equal above: a second stable pass puts NaN behind
    nan = values.isnan().gather(-1, by_value)
    return by_value.gather(-1, torch.sort(nan.byte(), dim=-1, stable=True).indices)


def _kept_groups(
    biased: torch.Tensor, num_groups: int, topk_group: int, sum_of_two: bool
) -> torch.Tensor:
    """Return which experts stand in a kept group, shaped as ``biased``."""
    groups = biased.unflatten(-1, (num_groups, -1))
    best = groups.gather(-1, descending(groups))[..., : 2 if sum_of_two else 1]
    kept = descending(best.sum(-1))[:, :topk_group]
    mask = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, kept, True)
    return mask[..., None].expand_as(groups).flatten(-2)


def fused_topk_fwd(
    gating_output,
    correction_bias,
    top_k,
    scoring_func,
    renormalize,
    num_expert_group,
    topk_group,
    routed_scaling_factor,
    target,
):
    """Score, keep groups, select, weigh: in float32, as the op's formula says."""
    logits = gating_output.to(precision(torch.float32))
    if scoring_func == "softmax":
        scores, ranked = torch.softmax(logits, -1), logits
    else:
        scores = torch.sigmoid(logits)
        ranked = scores if correction_bias is None else scores + correction_bias
    order = descending(ranked)
    if num_expert_group > 1:
        kept = _kept_groups(ranked, num_expert_group, topk_group, correction_bias is not None)
        # excluded experts go behind all kept ones, whatever these hold
        excluded = ~kept.gather(-1, order)
        order = order.gather(-1, torch.sort(excluded.byte(), dim=-1, stable=True).indices)
    ids = order[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total == 0, 0.0, weights / total)
    return (weights * routed_scaling_factor).contiguous(), ids.int().contiguous()
