"""Permute-align: the routes sorted by expert in padded blocks, for GEMMs that gather their rows.

The kernels are those of `place_routes`, in the form that writes the route of each row:
one launch, or two when the routes are more than a cluster takes.
"""

from tileops.kernels.cuda.device import current, wrong_device
from tileops.kernels.cuda.place_routes import align
from tileops.moe.permute_align import align_shapes


def refuse(topk_ids, num_experts, block_size, *, target) -> str | None:
    """Say why a call cannot be served: another GPU, or more slots than an int32 counts."""
    num_slots, _ = align_shapes(topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_size)
    if num_slots >= 2**31:
        return f"takes fewer than 2**31 slots, got {num_slots}"
    return wrong_device(topk_ids)


def moe_permute_align_fwd(topk_ids, num_experts, block_size, *, target):
    """Sort the routes; returns the route of each slot, the expert of each block and their count."""
    num_slots, num_blocks = align_shapes(
        topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_size
    )
    slots, experts, count = (topk_ids.new_empty(n) for n in (num_slots, num_blocks, 1))
    with current(topk_ids.device):
        align(topk_ids, (slots, experts, count), block_size, num_experts)
    return slots, experts, count
