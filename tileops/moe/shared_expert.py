"""The shared expert's dense gated MLP, and the fused layer that has one beside its experts."""

from __future__ import annotations

import torch

from tileops import check, repeat, targets
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.fused_moe import FusedMoEFwdOp
from tileops.moe.grouped_gemm import ACTIVATIONS
from tileops.moe.modular import FusedMoEExpertsModular, FusedMoEPrepareAndFinalize
from tileops.moe.op import Op

torch.library.define(
    "tileops::shared_expert_mlp_fwd",
    "(Tensor hidden_states, Tensor w_gate, Tensor w_up, Tensor w_down, str? target) -> Tensor",
)


@torch.library.impl("tileops::shared_expert_mlp_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _shared_expert_mlp_fwd(hidden_states, w_gate, w_up, w_down, target):
    out = hidden_states.new_empty(hidden_states.shape)
    targets.run("shared_expert_mlp_fwd", target, hidden_states, w_gate, w_up, w_down, out=out)
    return out


@torch.library.register_fake("tileops::shared_expert_mlp_fwd")
def _shared_expert_mlp_fwd_fake(hidden_states, w_gate, w_up, w_down, target):
    return hidden_states.new_empty(hidden_states.shape)


def _staged(hidden_states, w_gate, w_up, w_down, *, target, out):
    """Run two grouped GEMMs with one expert that has every row."""
    layout = ContiguousLayoutSpec.tight_physical_psum()
    num_tokens = hidden_states.shape[0]
    end = torch.full((1,), num_tokens, dtype=torch.int32, device=hidden_states.device)
    act = hidden_states.new_empty(num_tokens, w_gate.shape[0])
    gate_up = hidden_states, w_gate[None], w_up[None], end, None, None, layout
    targets.run("moe_grouped_gemm_fwd", target, *gate_up, ACTIVATIONS["silu_and_mul"], out=act)
    down = act, w_down[None], None, end, None, None, layout, None
    targets.run("moe_grouped_gemm_fwd", target, *down, out=out)


targets.register_staged("shared_expert_mlp_fwd", _staged, ("moe_grouped_gemm_fwd",))


def _check_weights(
    checker: check.Checker,
    hidden_states: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    prefix: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a shared expert's weights; return its gate rows and its up rows, two views."""
    dtype = (hidden_states.dtype,)
    if getattr(w_gate_up, "ndim", 2) == 3:
        checker.dims["G"] = 2
        checker.tensor(f"{prefix}w_gate_up", w_gate_up, ("G", "S", "H"), dtype)
        gate, up = w_gate_up.unbind(0)
    else:
        checker.tensor(f"{prefix}w_gate_up", w_gate_up, ("2S", "H"), dtype)
        gate, up = w_gate_up.chunk(2)
    checker.tensor(f"{prefix}w_down", w_down, ("H", "S"), dtype)
    return gate, up


class SharedExpertMLPFwdOp(Op):
    """Dense gated MLP: `down(silu(x @ gate.T) * (x @ up.T))`.

    Both products accumulate in float32; the activated rows are rounded to the tokens' dtype between
    them.

    Args:
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        ValueError: If no target has that name.

    Examples:
        >>> op = SharedExpertMLPFwdOp()
        >>> op(torch.ones(3, 4), torch.ones(2 * 6, 4), torch.ones(4, 6)).shape
        torch.Size([3, 4])
    """

    def __init__(self, *, target: str | None = None) -> None:
        self.target = targets.target_argument("SharedExpertMLPFwdOp", target)

    def forward(
        self, hidden_states: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor
    ) -> torch.Tensor:
        """Run the MLP on every token.

        Args:
            hidden_states: `[T, H]` tokens; float32 (not on `cuda`), bfloat16 or float16.
            w_gate_up: `[2S, H]`, S gate rows, then S up rows; or `[2, S, H]`, as a tensor-parallel
                slice of both halves is viewed.
            w_down: `[H, S]`.

        Returns:
            `[T, H]` in the tokens' dtype.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides; as NoKernelError
                if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("SharedExpertMLPFwdOp")
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        gate, up = _check_weights(checker, hidden_states, w_gate_up, w_down)
        return torch.ops.tileops.shared_expert_mlp_fwd.default(
            hidden_states, gate, up, w_down, self.target
        )


class _Routed(FusedMoEFwdOp):
    _name = "FusedMoESharedExpertFwdOp"


class FusedMoESharedExpertFwdOp(Op):
    """The routed layer and a shared expert that sees every token, side by side.

    The routed half is [FusedMoEFwdOp][tileops.moe.FusedMoEFwdOp]; the shared half is
    [SharedExpertMLPFwdOp][tileops.moe.SharedExpertMLPFwdOp]. `routed_scaling_factor` scales the
    routed output only.

    With `tp_size > 1` this rank computes its slice of the shared expert: rows
    `[rank * S / size, (rank + 1) * S / size)` of the gate half and of the up half, and the same
    columns of the down weight. The slices are views. The shared output is then a partial sum, which
    the caller adds up over the ranks; the routed half is not affected.

    Args:
        top_k: K, experts selected per token.
        scoring_func: `"softmax"` or `"sigmoid"`.
        renormalize: Divide the routing weights of a token by their sum.
        routed_scaling_factor: Finite, positive multiplier on the routed output.
        num_expert_group: Groups of consecutive experts; must divide E. 1 selects over all experts.
        topk_group: Groups kept per token; together they must hold at least K experts.
        tp_size: Ranks that share the shared expert.
        tp_rank: This rank's index.
        activation: Of the routed experts, as [MoEGroupedGemmFwdOp][tileops.moe.MoEGroupedGemmFwdOp]
            defines them; the shared expert's is `silu_and_mul`.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.
        prepare_finalize: As in [FusedMoEFwdOp][tileops.moe.FusedMoEFwdOp].
        experts: As in [FusedMoEFwdOp][tileops.moe.FusedMoEFwdOp].

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> layer = FusedMoESharedExpertFwdOp(top_k=2)
        >>> x, logits = torch.randn(5, 16), torch.randn(5, 4)
        >>> w_gate_up, w_down = torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> shared = torch.randn(2 * 6, 16), torch.randn(16, 6)
        >>> shared_output, routed_output = layer(x, logits, w_gate_up, w_down, None, *shared)
    """

    def __init__(
        self,
        top_k: int,
        scoring_func: str = "softmax",
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        num_expert_group: int = 1,
        topk_group: int = 1,
        tp_size: int = 1,
        tp_rank: int = 0,
        *,
        activation: str = "silu_and_mul",
        target: str | None = None,
        prepare_finalize: FusedMoEPrepareAndFinalize | None = None,
        experts: FusedMoEExpertsModular | None = None,
    ) -> None:
        check.integer("FusedMoESharedExpertFwdOp", "tp_size", tp_size, low=1)
        check.integer("FusedMoESharedExpertFwdOp", "tp_rank", tp_rank, low=0, high=tp_size - 1)
        self.routed = _Routed(
            top_k,
            scoring_func,
            renormalize,
            routed_scaling_factor,
            num_expert_group,
            topk_group,
            activation=activation,
            target=target,
            prepare_finalize=prepare_finalize,
            experts=experts,
        )
        self.top_k = top_k
        self.scoring_func = scoring_func
        self.renormalize = renormalize
        self.routed_scaling_factor = self.routed.routed_scaling_factor
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.tp_size = tp_size
        self.tp_rank = tp_rank
        self.activation = activation
        self.target = self.routed.target
        self.prepare_finalize = prepare_finalize
        self.experts = experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        gating_output: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        correction_bias: torch.Tensor | None = None,
        shared_w_gate_up: torch.Tensor | None = None,
        shared_w_down: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run both halves on one batch of tokens.

        Args:
            hidden_states: `[T, H]` tokens; float32 (not on `cuda`), bfloat16 or float16.
            gating_output: `[T, E]` router logits; float32, bfloat16 or float16.
            w_gate_up: `[E, 2F, H]`, its rows ordered as the activation reads them.
            w_down: `[E, H, F]`.
            correction_bias: `[E]` float32, added to the sigmoid scores for the selection only.
            shared_w_gate_up: `[2S, H]`, all S gate rows of the shared expert, then its up rows;
                None for a layer without one.
            shared_w_down: `[H, S]`, passed together with `shared_w_gate_up`.

        Returns:
            `shared_output` and `routed_output`, each `[T, H]` in the tokens' dtype; the first is
            None without shared weights, and a partial sum with `tp_size > 1`.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, `tp_size` does
                not divide S, or one shared weight comes without the other; as NoKernelError if the
                target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        shared = self._shared_slice(hidden_states, shared_w_gate_up, shared_w_down)
        routed_output = self.routed(
            hidden_states, gating_output, w_gate_up, w_down, correction_bias
        )
        if shared is None:
            return None, routed_output
        return torch.ops.tileops.shared_expert_mlp_fwd.default(
            hidden_states, *shared, self.target
        ), routed_output

    def _shared_slice(
        self,
        hidden_states: torch.Tensor,
        w_gate_up: torch.Tensor | None,
        w_down: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Check the shared weights and return this rank's gate rows, up rows and down columns."""
        op = "FusedMoESharedExpertFwdOp"
        if w_gate_up is None and w_down is None:
            return None
        if w_gate_up is None or w_down is None:
            missing = "shared_w_gate_up" if w_gate_up is None else "shared_w_down"
            raise ValueError(
                f"{op}: {missing} must be given with the other shared weight, got None"
            )
        checker = check.Checker(op)
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        gate, up = _check_weights(checker, hidden_states, w_gate_up, w_down, "shared_")
        width = w_down.shape[1]
        if width % self.tp_size:
            raise ValueError(f"{op}: tp_size must divide S = {width}, got {self.tp_size}")
        part = width // self.tp_size
        rows = slice(self.tp_rank * part, (self.tp_rank + 1) * part)
        return gate[rows], up[rows], w_down[:, rows]
