"""The routed layer with FP8 weights, and a shared expert beside it."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.experts_fp8 import check_fp8_weights
from tileops.moe.modular import (
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalize,
    WeightedReduceNoOp,
)
from tileops.moe.routed_layer import RoutedLayer

torch.library.define(
    "tileops::fused_moe_fp8_fwd",
    "(Tensor hidden_states, Tensor gating_output, Tensor w_gate_up, Tensor w_gate_up_scale,"
    " Tensor w_down, Tensor w_down_scale, Tensor? correction_bias, Tensor? b_gate_up,"
    " Tensor? b_down, int top_k, str scoring_func, bool renormalize, int num_expert_group,"
    " int topk_group, float routed_scaling_factor, str activation, str? target) -> Tensor",
)


@torch.library.impl("tileops::fused_moe_fp8_fwd", "CompositeExplicitAutograd")
def _fused_moe_fp8_fwd(*args):
    *args, target = args
    return targets.run("fused_moe_fp8_fwd", target, *args)


@torch.library.register_fake("tileops::fused_moe_fp8_fwd")
def _fused_moe_fp8_fwd_fake(hidden_states, *args):
    return hidden_states.new_empty(hidden_states.shape)


def _staged(
    hidden_states,
    gating_output,
    w_gate_up,
    w_gate_up_scale,
    w_down,
    w_down_scale,
    correction_bias,
    b_gate_up,
    b_down,
    *settings,
    target,
):
    """Route, then run the experts: each on the target's own kernel."""
    *routing, activation = settings
    weights, ids = targets.run("fused_topk_fwd", target, gating_output, correction_bias, *routing)
    out = hidden_states.new_empty(hidden_states.shape)
    experts = hidden_states, w_gate_up, w_gate_up_scale, w_down, w_down_scale
    # the routing weights carry the factor already
    rest = weights, ids, b_gate_up, b_down, 1.0, activation
    targets.run("fused_moe_experts_fp8_fwd", target, *experts, *rest, out=out)
    return out


targets.register_staged(
    "fused_moe_fp8_fwd", _staged, ("fused_topk_fwd", "fused_moe_experts_fp8_fwd")
)


class FusedMoEFP8FwdOp(RoutedLayer):
    """The routed layer on FP8 weights with a scale for every 128 x 128 block.

    Routing is that of [FusedMoEFwdOp][tileops.moe.FusedMoEFwdOp]. The tokens are quantised as
    [quantize_fp8_rowwise][tileops.moe.quantize_fp8_rowwise] does it and multiplied as
    [MoEGroupedGemmFP8FwdOp][tileops.moe.MoEGroupedGemmFP8FwdOp] does; bias and activation are
    applied to the float32 product, whose result is quantised row-wise in turn and multiplied by the
    down weights. A route's down row is rounded once to the tokens' dtype; the sum over the routes
    is float32 in their order, rounded once. With few routes `cuda` may add up the
    128-wide blocks of a product in parts, in an order that is fixed for a shape.

    The weights of DeepSeek-V3's checkpoints go in as they are, `weight_scale_inv` as the scale. H
    and F are multiples of 128.

    Args:
        top_k: K, experts selected per token.
        scoring_func: `"softmax"` or `"sigmoid"`.
        renormalize: Divide the routing weights of a token by their sum.
        routed_scaling_factor: Finite, positive multiplier on the routed output.
        num_expert_group: Groups of consecutive experts; must divide E. 1 selects over all experts.
        topk_group: Groups kept per token; together they must hold at least K experts.
        activation: As [MoEGroupedGemmFwdOp][tileops.moe.MoEGroupedGemmFwdOp] defines them. Rows of
            `"swigluoai"` are interleaved: 64 gate rows and 64 up rows share a scale.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.
        prepare_finalize: Moves the tokens to the experts and the results back. Where its `prepare`
            returns a `scale`, the tokens are float8_e4m3fn `[T', H]` with scales `[T', H/128]`.
        experts: Must be None: the interface hands no scales to `forward`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, `experts` is given, or no target has that name.

    Examples:
        >>> layer = FusedMoEFP8FwdOp(top_k=2, renormalize=True)
        >>> x, logits = torch.randn(5, 256), torch.randn(5, 4)
        >>> gate_up = quantize_fp8_blockwise(torch.randn(4, 2 * 128, 256))
        >>> down = quantize_fp8_blockwise(torch.randn(4, 256, 128))
        >>> layer(x, logits, *gate_up, *down).shape
        torch.Size([5, 256])
    """

    _name = "FusedMoEFP8FwdOp"

    def __init__(
        self,
        top_k: int,
        scoring_func: str = "softmax",
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        num_expert_group: int = 1,
        topk_group: int = 1,
        *,
        activation: str = "silu_and_mul",
        target: str | None = None,
        prepare_finalize: FusedMoEPrepareAndFinalize | None = None,
        experts: FusedMoEExpertsModular | None = None,
    ) -> None:
        if experts is not None:
            raise ValueError(
                f"{self._name}: experts must be None, got {experts!r}: FusedMoEExpertsModular gets "
                "no scales; give experts that hold their own to FusedMoEFwdOp"
            )
        super().__init__(
            top_k,
            scoring_func,
            renormalize,
            routed_scaling_factor,
            num_expert_group,
            topk_group,
            activation=activation,
            target=target,
            prepare_finalize=prepare_finalize,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_gate_up_scale: torch.Tensor,
        w_down: torch.Tensor,
        w_down_scale: torch.Tensor,
        correction_bias: torch.Tensor | None = None,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
        *,
        shared_w_gate_up: torch.Tensor | None = None,
        shared_w_gate_up_scale: torch.Tensor | None = None,
        shared_w_down: torch.Tensor | None = None,
        shared_w_down_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on one batch of tokens.

        Args:
            hidden_states: `[T, H]` tokens; float32, bfloat16 or float16.
            gating_output: `[T, E]` router logits; float32, bfloat16 or float16.
            w_gate_up: `[E, 2F, H]` float8_e4m3fn, its rows ordered as the activation reads them.
            w_gate_up_scale: `[E, 2F/128, H/128]` float32, of any strides.
            w_down: `[E, H, F]` float8_e4m3fn.
            w_down_scale: `[E, H/128, F/128]` float32, of any strides.
            correction_bias: `[E]` float32, added to the sigmoid scores for the selection only.
            b_gate_up: `[E, 2F]` in the tokens' dtype and `w_gate_up`'s row order.
            b_down: `[E, H]` in the tokens' dtype.
            shared_w_gate_up: `[2S, H]` float8_e4m3fn of a shared expert, all S gate rows, then its
                up rows. Its activation is `silu_and_mul`, and it gets no `routed_scaling_factor`.
            shared_w_gate_up_scale: `[2S/128, H/128]` float32.
            shared_w_down: `[H, S]` float8_e4m3fn.
            shared_w_down_scale: `[H/128, S/128]` float32.

        Returns:
            `[T, H]` in the tokens' dtype; with a shared expert `shared_output` and `routed_output`,
            each of these.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, a width is no
                multiple of 128, or only some of the shared expert's tensors are given; as
                NoKernelError if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker(self._name)
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        checker.tensor("gating_output", gating_output, ("T", "E"), check.FLOATS)
        num_experts = checker.dims["E"]
        if self.prepare_finalize is not None:
            del checker.dims["E"]  # the weights may be those of this rank's experts only
        weights = w_gate_up, w_gate_up_scale, w_down, w_down_scale
        check_fp8_weights(checker, *weights)
        for name, bias, width in (("b_gate_up", b_gate_up, "2F"), ("b_down", b_down, "H")):
            if bias is not None:
                checker.tensor(name, bias, ("E", width), (hidden_states.dtype,))
        routing = self._check_routing(checker, num_experts, correction_bias)
        shared = self._shared(
            checker, shared_w_gate_up, shared_w_gate_up_scale, shared_w_down, shared_w_down_scale
        )
        if self.prepare_finalize is None:
            inputs = hidden_states, gating_output, *weights, correction_bias, b_gate_up, b_down
            routed = torch.ops.tileops.fused_moe_fp8_fwd.default(
                *inputs, *routing, self.activation, self.target
            )
        else:
            scores, ids = torch.ops.tileops.fused_topk_fwd.default(
                gating_output, correction_bias, *routing, self.target
            )
            parts = hidden_states, scores, ids, num_experts, weights, b_gate_up, b_down
            routed = self._chain(self.prepare_finalize, *parts)
        if shared is None:
            return routed
        mlp = torch.ops.tileops.shared_expert_mlp_fp8_fwd.default
        return mlp(hidden_states, *shared, self.target), routed

    def _shared(
        self, checker: check.Checker, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...] | None:
        """Check the shared expert's tensors, which come together or not at all."""
        given = tuple(x for x in tensors if x is not None)
        if not given:
            return None
        if len(given) < len(tensors):
            names = "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale"
            missing = [f"shared_{n}" for n, x in zip(names, tensors, strict=True) if x is None]
            raise ValueError(
                f"{self._name}: {missing[0]} must be given with the other tensors of the shared "
                "expert, got None"
            )
        check_fp8_weights(checker, *given, expert=(), width="S", prefix="shared_")
        return given

    def _chain(
        self,
        movement: FusedMoEPrepareAndFinalize,
        hidden_states: torch.Tensor,
        scores: torch.Tensor,
        ids: torch.Tensor,
        num_experts: int,
        weights: tuple[torch.Tensor, ...],
        b_gate_up: torch.Tensor | None,
        b_down: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the experts between the user's own movements."""
        prepared = self._prepare(movement, hidden_states, scores, ids, num_experts)
        checker = check.Checker(self._name, H=hidden_states.shape[1])
        checker.in_blocks("hidden_states", hidden_states, "H")
        quantised = prepared.scale is not None
        dtypes = check.FP8 if quantised else (hidden_states.dtype,)
        checker.tensor("prepared hidden_states", prepared.hidden_states, ("T'", "H"), dtypes)
        if quantised:
            shape = "T'", "H/128"
            checker.tensor("prepared scale", prepared.scale, shape, check.FLOAT32)
        routes = "T'", "K"
        checker.tensor("prepared topk_weights", prepared.topk_weights, routes, check.FLOAT32)
        checker.tensor("prepared topk_ids", prepared.topk_ids, routes, check.INT32)
        expert_output = torch.ops.tileops.fused_moe_experts_fp8_fwd.default(
            prepared.hidden_states,
            prepared.scale,
            *weights,
            prepared.topk_weights,
            prepared.topk_ids,
            b_gate_up,
            b_down,
            1.0,
            self.activation,
            hidden_states.dtype,
            self.target,
        )
        output = hidden_states.new_empty(hidden_states.shape)
        given = prepared.topk_weights, prepared.topk_ids
        movement.finalize(output, expert_output, *given, WeightedReduceNoOp())
        return output
