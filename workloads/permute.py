"""Pre- and post-permute: references."""

from __future__ import annotations

import math

import torch

from tileops.layouts import MaskedLayoutSpec
from tileops.workloads.accuracy import wide


def moe_pre_permute_fwd(hidden_states, local_expert_ids, layout, num_local_experts, target):
    """Sort the routes by expert, stably, and place each behind the ones before it."""
    experts, device = num_local_experts, hidden_states.device
    top_k = local_expert_ids.shape[1]
    ids = local_expert_ids.flatten().long()
    valid = (ids >= 0) & (ids < experts)
    label = torch.where(valid, ids, experts)
    order = torch.sort(label, stable=True).indices
    counts = torch.bincount(label, minlength=experts + 1)[:experts]
    first = counts.cumsum(0) - counts
    sorted_label = label[order]
    slot = (
        torch.arange(ids.numel(), device=device)
        - torch.cat([first, counts.sum()[None]])[sorted_label]
    )
    keep = sorted_label < experts
    lead = layout.expert_shape(ids.numel(), experts)
    if isinstance(layout, MaskedLayoutSpec):
        keep &= slot < layout.max_m
        row = sorted_label * layout.max_m + slot
        metadata = counts.clamp(max=layout.max_m)
    else:
        padded = (counts + layout.alignment - 1) // layout.alignment * layout.alignment
        ends = padded.cumsum(0)
        starts = torch.cat([ends - padded, ends.new_zeros(1)])
        row = starts[sorted_label] + slot
        metadata = ends
        if layout.metadata == "per_row":
            rows = torch.arange(lead[0], device=device)
            metadata = torch.searchsorted(ends, rows, right=True)
    inverse = torch.full((ids.numel(),), -1, dtype=torch.int32, device=device)
    inverse[order[keep]] = row[keep].int()
    width = hidden_states.shape[1]
    flat = hidden_states.new_zeros(math.prod(lead), width)
    flat[row[keep]] = hidden_states[order[keep] // top_k]
    return flat.view(*lead, width), metadata.int(), inverse


def moe_post_permute_fwd(
    expert_output, topk_weights, inverse_indices, layout, routed_scaling_factor, target, out
):
    """Add up each token's rows in the order of k; a dropped route adds a zero, not a row."""
    compute = wide(expert_output.dtype)
    inverse = inverse_indices.view(topk_weights.shape).long()
    total = torch.zeros(out.shape, dtype=compute, device=out.device)
    for k in range(topk_weights.shape[1]):
        tokens = (inverse[:, k] >= 0).nonzero()[:, 0]
        if tokens.numel() == 0:
            continue
        row = inverse[tokens, k]
        if isinstance(layout, MaskedLayoutSpec):
            rows = expert_output[row // layout.max_m, row % layout.max_m]
        else:
            rows = expert_output[row]
        weight = (topk_weights[tokens, k] * routed_scaling_factor).to(compute)
        total[tokens] += weight[:, None] * rows.to(compute)
    out.copy_(total)
