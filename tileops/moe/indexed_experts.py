"""The expert MLP for few routes: one read of each distinct expert's weights."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.expert_mlp import check_expert_weights
from tileops.moe.experts import run_staged
from tileops.moe.op import Op
from tileops.overlap import refuse_overlap

torch.library.define(
    "tileops::indexed_expert_mlp_fwd_out",
    "(Tensor hidden_states, Tensor w_gate_up, Tensor w_down, Tensor topk_weights, Tensor topk_ids,"
    " float routed_scaling_factor, str? target, Tensor(a!) out) -> ()",
)


@torch.library.impl("tileops::indexed_expert_mlp_fwd_out", "CompositeExplicitAutograd")
def _indexed_expert_mlp_fwd_out(
    hidden_states, w_gate_up, w_down, topk_weights, topk_ids, scale, target, out
):
    refuse_overlap(
        "IndexedExpertMLPFwdOp",
        "output",
        out,
        hidden_states=hidden_states,
        w_gate_up=w_gate_up,
        w_down=w_down,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
    )
    args = hidden_states, w_gate_up, w_down, topk_weights, topk_ids, None, None, scale
    targets.run("indexed_expert_mlp_fwd", target, *args, "silu_and_mul", out=out)


@torch.library.register_fake("tileops::indexed_expert_mlp_fwd_out")
def _indexed_expert_mlp_fwd_out_fake(*args):
    return None


targets.register_staged(
    "indexed_expert_mlp_fwd",
    run_staged,  # which also reads each expert that has routes once
    ("moe_pre_permute_fwd", "moe_grouped_gemm_fwd", "moe_post_permute_fwd"),
)


class IndexedExpertMLPFwdOp(Op):
    """Run few routes through their experts, reading the weights of each distinct expert once.

    [FusedMoEExpertsFwdOp][tileops.moe.FusedMoEExpertsFwdOp] with the activation `silu_and_mul` and
    without biases: the same sum, rounded in the same places. That op picks this form by itself
    where it pays, with any activation and biases.

    Args:
        routed_scaling_factor: Finite, positive multiplier on the sum.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the factor is out of range, or no target has that name.

    Examples:
        >>> op = IndexedExpertMLPFwdOp()
        >>> x, w_gate_up, w_down = torch.ones(3, 4), torch.ones(2, 16, 4), torch.ones(2, 4, 8)
        >>> weights, ids = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
        >>> op(torch.empty(3, 4), x, w_gate_up, w_down, weights, ids).shape
        torch.Size([3, 4])
    """

    def __init__(self, routed_scaling_factor: float = 1.0, *, target: str | None = None) -> None:
        check.factor("IndexedExpertMLPFwdOp", "routed_scaling_factor", routed_scaling_factor)
        self.routed_scaling_factor = float(routed_scaling_factor)
        self.target = targets.target_argument("IndexedExpertMLPFwdOp", target)

    def forward(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Run the experts, writing the combined result into `output`.

        Args:
            output: `[T, H]` buffer in the tokens' dtype. It must not overlap an input.
            hidden_states: `[T, H]` tokens; float32 (not on `cuda`), bfloat16 or float16.
            w_gate_up: `[E, 2F, H]`, F gate rows, then F up rows.
            w_down: `[E, H, F]`.
            topk_weights: `[T, K]` float32 routing weights.
            topk_ids: `[T, K]` int32; a route whose id lies outside [0, E) adds exactly nothing.

        Returns:
            `output`.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or `output`
                overlaps an input; as NoKernelError if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("IndexedExpertMLPFwdOp")
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        dtype = hidden_states.dtype
        checker.output("output", output, ("T", "H"), (dtype,))
        check_expert_weights(checker, dtype, w_gate_up, w_down, None, None)
        checker.tensor("topk_weights", topk_weights, ("T", "K"), check.FLOAT32)
        checker.tensor("topk_ids", topk_ids, ("T", "K"), check.INT32)
        args = hidden_states, w_gate_up, w_down, topk_weights, topk_ids
        torch.ops.tileops.indexed_expert_mlp_fwd_out.default(
            *args, self.routed_scaling_factor, self.target, output
        )
        return output
