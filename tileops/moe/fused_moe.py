"""The whole routed Mixture-of-Experts feed-forward layer."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.expert_mlp import check_expert_weights
from tileops.moe.experts import FusedMoEExpertsFwdOp
from tileops.moe.modular import PrepareAndFinalizeNoOp
from tileops.moe.routed_layer import RoutedLayer

torch.library.define(
    "tileops::fused_moe_fwd",
    "(Tensor hidden_states, Tensor gating_output, Tensor w_gate_up, Tensor w_down,"
    " Tensor? correction_bias, Tensor? b_gate_up, Tensor? b_down, int top_k, str scoring_func,"
    " bool renormalize, int num_expert_group, int topk_group, float routed_scaling_factor,"
    " str activation, str? target) -> Tensor",
)


@torch.library.impl("tileops::fused_moe_fwd", "CompositeExplicitAutograd")
def _fused_moe_fwd(*args):
    *args, target = args
    return targets.run("fused_moe_fwd", target, *args)


@torch.library.register_fake("tileops::fused_moe_fwd")
def _fused_moe_fwd_fake(hidden_states, *args):
    return hidden_states.new_empty(hidden_states.shape)


def _staged(
    hidden_states,
    gating_output,
    w_gate_up,
    w_down,
    correction_bias,
    b_gate_up,
    b_down,
    top_k,
    scoring_func,
    renormalize,
    num_expert_group,
    topk_group,
    routed_scaling_factor,
    activation,
    *,
    target,
):
    """Route, then run the experts: each on the target's own kernel."""
    weights, ids = targets.run(
        "fused_topk_fwd",
        target,
        gating_output,
        correction_bias,
        top_k,
        scoring_func,
        renormalize,
        num_expert_group,
        topk_group,
        routed_scaling_factor,
    )
    out = hidden_states.new_empty(hidden_states.shape)
    # the routing weights carry the factor already
    experts = hidden_states, w_gate_up, w_down, weights, ids, b_gate_up, b_down, 1.0, activation
    targets.run("fused_moe_experts_fwd", target, *experts, out=out)
    return out


targets.register_staged("fused_moe_fwd", _staged, ("fused_topk_fwd", "fused_moe_experts_fwd"))


class FusedMoEFwdOp(RoutedLayer):
    """Route each token to its top-k experts and return the weighted sum of what they answer.

    The routed feed-forward layer of a Mixture-of-Experts model, from the router's logits to the
    combined output: [FusedTopKFwdOp][tileops.moe.FusedTopKFwdOp] followed by
    [FusedMoEExpertsFwdOp][tileops.moe.FusedMoEExpertsFwdOp], whose rules for ties, NaN, groups,
    biases and rounding hold here. `routed_scaling_factor` is applied once, through the routing
    weights.

    | model | settings |
    | --- | --- |
    | Qwen3 | `scoring_func="softmax"`, `renormalize=True` |
    | DeepSeek-V3 | `"sigmoid"`, `renormalize=True`, 8 groups, 4 kept, factor 2.5, correction bias |
    | Kimi K2 | `"sigmoid"`, `renormalize=True`, factor 2.827, correction bias |
    | gpt-oss | `"softmax"`, `renormalize=True`, `activation="swigluoai"`, both expert biases |

    Args:
        top_k: K, experts selected per token.
        scoring_func: `"softmax"` or `"sigmoid"`.
        renormalize: Divide the routing weights of a token by their sum.
        routed_scaling_factor: Finite, positive multiplier on the output.
        num_expert_group: Groups of consecutive experts; must divide E. 1 selects over all experts.
        topk_group: Groups kept per token; together they must hold at least K experts.
        activation: As [MoEGroupedGemmFwdOp][tileops.moe.MoEGroupedGemmFwdOp] defines them.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.
        prepare_finalize: Moves the tokens to the experts and the results back, as for expert
            parallelism; None for tokens and experts in one place.
        experts: Computes the experts in the place of
            [FusedMoEExpertsFwdOp][tileops.moe.FusedMoEExpertsFwdOp]. The routing weights that it
            gets carry `routed_scaling_factor` already.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> layer = FusedMoEFwdOp(top_k=2, renormalize=True)
        >>> x, logits = torch.randn(5, 16), torch.randn(5, 4)
        >>> w_gate_up, w_down = torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> layer(x, logits, w_gate_up, w_down).shape
        torch.Size([5, 16])
    """

    _name = "FusedMoEFwdOp"

    def forward(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        correction_bias: torch.Tensor | None = None,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer on one batch of tokens.

        Args:
            hidden_states: `[T, H]` tokens; float32 (not on `cuda`), bfloat16 or float16.
            gating_output: `[T, E]` router logits; float32, bfloat16 or float16.
            w_gate_up: `[E, 2F, H]`, its rows ordered as the activation reads them.
            w_down: `[E, H, F]`.
            correction_bias: `[E]` float32, added to the sigmoid scores for the selection only.
            b_gate_up: `[E, 2F]` in `w_gate_up`'s row order.
            b_down: `[E, H]`.

        Returns:
            `[T, H]` in the tokens' dtype.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides; as NoKernelError
                if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker(self._name)
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        checker.tensor("gating_output", gating_output, ("T", "E"), check.FLOATS)
        num_experts = checker.dims["E"]
        if self.prepare_finalize is not None:
            del checker.dims["E"]  # the weights may be those of this rank's experts only
        check_expert_weights(checker, hidden_states.dtype, w_gate_up, w_down, b_gate_up, b_down)
        routing = self._check_routing(checker, num_experts, correction_bias)
        if self.prepare_finalize is None and self.experts is None:
            return torch.ops.tileops.fused_moe_fwd.default(
                hidden_states,
                gating_output,
                w_gate_up,
                w_down,
                correction_bias,
                b_gate_up,
                b_down,
                *routing,
                self.activation,
                self.target,
            )
        weights, ids = torch.ops.tileops.fused_topk_fwd.default(
            gating_output, correction_bias, *routing, self.target
        )
        return self._chain(
            hidden_states, weights, ids, num_experts, w_gate_up, w_down, b_gate_up, b_down
        )

    def _chain(
        self,
        hidden_states: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        num_experts: int,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        b_gate_up: torch.Tensor | None,
        b_down: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layer as a chain of ops around the user's own parts."""
        movement = self.prepare_finalize or PrepareAndFinalizeNoOp()
        experts = self.experts or FusedMoEExpertsFwdOp(
            activation=self.activation, target=self.target
        )
        prepared = self._prepare(movement, hidden_states, weights, ids, num_experts)
        if prepared.scale is not None and self.experts is None:
            raise ValueError(
                f"{self._name}: prepare_finalize must return tokens without a scale, since "
                "FusedMoEExpertsFwdOp takes none that are quantised; pass experts= that do"
            )
        rows, hidden = prepared.hidden_states.shape
        shape = experts.output_shape(rows, hidden, prepared.topk_ids.shape[1])
        expert_output = hidden_states.new_empty(shape)
        experts.forward(
            expert_output,
            prepared.hidden_states,
            w_gate_up,
            w_down,
            prepared.topk_weights,
            prepared.topk_ids,
            b_gate_up,
            b_down,
        )
        output = hidden_states.new_empty(hidden_states.shape)
        reduce = experts.make_weighted_reduce()
        movement.finalize(output, expert_output, prepared.topk_weights, prepared.topk_ids, reduce)
        return output
