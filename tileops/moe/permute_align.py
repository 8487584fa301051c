"""The index arrays of a grouped GEMM that gathers its rows: routes by expert, in padded blocks."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.op import Op

torch.library.define(
    "tileops::moe_permute_align_fwd",
    "(Tensor topk_ids, int num_experts, int block_size, str? target) -> (Tensor, Tensor, Tensor)",
)


def align_shapes(num_routes: int, num_experts: int, block_size: int) -> tuple[int, int]:
    """Return the lengths of ``sorted_token_ids`` and ``expert_ids``, which the host knows."""
    slots = num_routes + (num_experts + 1) * (block_size - 1)
    return slots, (slots + block_size - 1) // block_size


@torch.library.impl("tileops::moe_permute_align_fwd", "CompositeExplicitAutograd")
def _moe_permute_align_fwd(topk_ids, num_experts, block_size, target):
    return targets.run("moe_permute_align_fwd", target, topk_ids, num_experts, block_size)


@torch.library.register_fake("tileops::moe_permute_align_fwd")
def _moe_permute_align_fwd_fake(topk_ids, num_experts, block_size, target):
    routes = topk_ids.shape[0] * topk_ids.shape[1]
    slots, blocks = align_shapes(routes, num_experts, block_size)
    return topk_ids.new_empty(slots), topk_ids.new_empty(blocks), topk_ids.new_empty(1)


class MoEPermuteAlignFwdOp(Op):
    """Sort the routes by expert and pad each expert's routes to whole blocks.

    Each expert has one range of slots, in expert order, as long as its route count rounded up to
    `block_size`: first its routes, in token order, then filler. Routes whose id lies outside
    [0, num_experts) stand nowhere.

    Args:
        num_experts: E.
        block_size: Slots of a block, the row tile of the GEMM.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is below 1, or no target has that name.

    Examples:
        >>> op = MoEPermuteAlignFwdOp(num_experts=3, block_size=2)
        >>> slots, experts, count = op(torch.tensor([[2, 0], [0, 2], [2, 1]], dtype=torch.int32))
        >>> slots[:count.item()]
        tensor([1, 2, 5, 6, 0, 3, 4, 6], dtype=torch.int32)
        >>> experts[:count.item() // 2]
        tensor([0, 1, 2, 2], dtype=torch.int32)
    """

    def __init__(
        self, num_experts: int, block_size: int = 64, *, target: str | None = None
    ) -> None:
        check.integer("MoEPermuteAlignFwdOp", "num_experts", num_experts, low=1)
        check.integer("MoEPermuteAlignFwdOp", "block_size", block_size, low=1)
        self.num_experts = num_experts
        self.block_size = block_size
        self.target = targets.target_argument("MoEPermuteAlignFwdOp", target)

    def forward(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort one batch of routes.

        Args:
            topk_ids: `[T, K]` int32, the expert of each route.

        Returns:
            Three int32 tensors. `sorted_token_ids` `[T * K + (E + 1) * (block_size - 1)]` holds the
            route `t * K + k` of each slot, and `T * K` in filler slots and past the padded count.
            `expert_ids` holds the expert of each block, and E past the padded count.
            `num_tokens_post_pad` `[1]` is the padded count, in slots.

        Raises:
            ValueError: If the tensor has the wrong shape, dtype or strides.
        """
        checker = check.Checker("MoEPermuteAlignFwdOp")
        checker.tensor("topk_ids", topk_ids, ("T", "K"), check.INT32)
        return torch.ops.tileops.moe_permute_align_fwd.default(
            topk_ids, self.num_experts, self.block_size, self.target
        )
