"""Routed experts: the expert MLP with the permutes around it."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.expert_mlp import check_expert_weights
from tileops.moe.grouped_gemm import ACTIVATIONS, run_grouped_gemm
from tileops.moe.modular import FusedMoEExpertsModular
from tileops.moe.op import Op
from tileops.overlap import refuse_overlap

FEW_ROUTES = 256
"""Most routes of the indexed form."""
FEW_ROUTES_PER_EXPERT = 2
"""Up to so many, the weights take the time, which the indexed form reads faster."""

torch.library.define(
    "tileops::fused_moe_experts_fwd_out",
    "(Tensor hidden_states, Tensor w_gate_up, Tensor w_down, Tensor topk_weights, Tensor topk_ids,"
    " Tensor? b_gate_up, Tensor? b_down, float routed_scaling_factor, str activation, str? target,"
    " Tensor(a!) out) -> ()",
)


@torch.library.impl("tileops::fused_moe_experts_fwd_out", "CompositeExplicitAutograd")
def _fused_moe_experts_fwd_out(
    hidden_states, w_gate_up, w_down, weights, ids, b_gate_up, b_down, *settings
):
    scale, activation, target, out = settings
    refuse_overlap(
        "FusedMoEExpertsFwdOp",
        "output",
        out,
        hidden_states=hidden_states,
        w_gate_up=w_gate_up,
        w_down=w_down,
        topk_weights=weights,
        topk_ids=ids,
        b_gate_up=b_gate_up,
        b_down=b_down,
    )
    args = hidden_states, w_gate_up, w_down, weights, ids, b_gate_up, b_down, scale, activation
    targets.run("fused_moe_experts_fwd", target, *args, out=out)


@torch.library.register_fake("tileops::fused_moe_experts_fwd_out")
def _fused_moe_experts_fwd_out_fake(*args):
    return None


def run_staged(
    hidden_states,
    w_gate_up,
    w_down,
    weights,
    ids,
    b_gate_up,
    b_down,
    scale,
    activation,
    *,
    target,
    out,
):
    """Permute, gate/up GEMM, down GEMM, combine: each on the target's own kernel."""
    layout = ContiguousLayoutSpec.tight_physical_psum()
    num_experts, hidden, ffn = w_down.shape
    rows, ends, inverse = targets.run(
        "moe_pre_permute_fwd", target, hidden_states, ids, layout, num_experts
    )
    act = rows.new_empty(rows.shape[0], ffn)
    run_grouped_gemm(rows, w_gate_up, ends, b_gate_up, layout, activation, target, act)
    # the permuted input is spent: its memory takes the expert output
    run_grouped_gemm(act, w_down, ends, b_down, layout, None, target, rows)
    targets.run("moe_post_permute_fwd", target, rows, weights, inverse, layout, scale, out=out)


def few_routes(w_down, ids) -> bool:
    """Say whether a call gets the indexed form: at most two routes an expert, and not too many."""
    return ids.numel() <= min(FEW_ROUTES_PER_EXPERT * w_down.shape[0], FEW_ROUTES)


def _staged(hidden_states, w_gate_up, w_down, weights, ids, *args, target, out):
    """Run the indexed form where routes are few, the grouped one elsewhere."""
    args = hidden_states, w_gate_up, w_down, weights, ids, *args
    if few_routes(w_down, ids):
        targets.run("indexed_expert_mlp_fwd", target, *args, out=out)
    else:
        run_staged(*args, target=target, out=out)


targets.register_staged(
    "fused_moe_experts_fwd",
    _staged,
    ("moe_pre_permute_fwd", "moe_grouped_gemm_fwd", "moe_post_permute_fwd"),
)


class FusedMoEExpertsFwdOp(Op, FusedMoEExpertsModular):
    r"""Run routed tokens through their experts and add up what the experts answer.

    Token t gets $s \sum_k w_{t,k} \, (D_e \, \mathrm{act}(G_e h_t + g_e) + d_e)$, where expert e of
    its route k has $G_e$ and $g_e$ as `w_gate_up` and `b_gate_up`, $D_e$ and $d_e$ as `w_down` and
    `b_down`, and $s$ is the `routed_scaling_factor`. Each bias joins its product in float32, before
    the activation or the cast; the routing weight then scales the biased down output. A route's
    down row is rounded once to the tokens' dtype; the sum over k is float32 in the order of k,
    rounded once. A route whose id lies outside [0, E) adds exactly nothing.

    Args:
        routed_scaling_factor: Finite, positive multiplier on the sum.
        activation: As [MoEGroupedGemmFwdOp][tileops.moe.MoEGroupedGemmFwdOp] defines them.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> op = FusedMoEExpertsFwdOp()
        >>> x, w_gate_up, w_down = torch.ones(3, 4), torch.ones(2, 16, 4), torch.ones(2, 4, 8)
        >>> weights, ids = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
        >>> op(torch.empty(3, 4), x, w_gate_up, w_down, weights, ids).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        routed_scaling_factor: float = 1.0,
        *,
        activation: str = "silu_and_mul",
        target: str | None = None,
    ) -> None:
        check.factor("FusedMoEExpertsFwdOp", "routed_scaling_factor", routed_scaling_factor)
        check.choice("FusedMoEExpertsFwdOp", "activation", activation, ACTIVATIONS)
        self.routed_scaling_factor = float(routed_scaling_factor)
        self.activation = activation
        self.target = targets.target_argument("FusedMoEExpertsFwdOp", target)

    def forward(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the experts, writing the combined result into `output`.

        Args:
            output: `[T, H]` buffer in the tokens' dtype. It must not overlap an input.
            hidden_states: `[T, H]` tokens; float32 (not on `cuda`), bfloat16 or float16.
            w_gate_up: `[E, 2F, H]`, its rows ordered as the activation reads them.
            w_down: `[E, H, F]`.
            topk_weights: `[T, K]` float32 routing weights.
            topk_ids: `[T, K]` int32, the expert of each route.
            b_gate_up: `[E, 2F]` in `w_gate_up`'s row order.
            b_down: `[E, H]`.

        Returns:
            `output`.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or `output`
                overlaps an input; as NoKernelError if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("FusedMoEExpertsFwdOp")
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        dtype = hidden_states.dtype
        checker.output("output", output, ("T", "H"), (dtype,))
        check_expert_weights(checker, dtype, w_gate_up, w_down, b_gate_up, b_down)
        checker.tensor("topk_weights", topk_weights, ("T", "K"), check.FLOAT32)
        checker.tensor("topk_ids", topk_ids, ("T", "K"), check.INT32)
        torch.ops.tileops.fused_moe_experts_fwd_out.default(
            hidden_states,
            w_gate_up,
            w_down,
            topk_weights,
            topk_ids,
            b_gate_up,
            b_down,
            self.routed_scaling_factor,
            self.activation,
            self.target,
            output,
        )
        return output
