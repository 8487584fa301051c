"""Permute-align: reference."""

from __future__ import annotations

import torch

from tileops.moe.permute_align import align_shapes


def moe_permute_align_fwd(topk_ids, num_experts, block_size, *, target):
    """Sort the routes by expert, stably, and start each expert on a block."""
    ids, device = topk_ids.flatten().long(), topk_ids.device
    slots, blocks = align_shapes(ids.numel(), num_experts, block_size)
    label = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = torch.sort(label, stable=True).indices
    counts = torch.bincount(label, minlength=num_experts + 1)[:num_experts]
    padded = (counts + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = order[: int(counts.sum())]
    owner = label[order]
    within = torch.arange(order.numel(), device=device) - (counts.cumsum(0) - counts)[owner]
    sorted_ids = torch.full((slots,), ids.numel(), dtype=torch.int32, device=device)
    sorted_ids[(ends - padded)[owner] + within] = order.int()
    starts = torch.arange(blocks, device=device) * block_size
    experts = torch.searchsorted(ends, starts, right=True)
    return sorted_ids, experts.int(), ends[-1:].int()
