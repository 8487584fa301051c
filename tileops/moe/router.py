"""Routing for expert parallelism: the router row whose softmax gives this rank's share."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.op import Op

SCORINGS = ("sqrt_softplus", "softmax", "sigmoid")
SELECTIONS = ("topk", "noaux_tc")

torch.library.define(
    "tileops::moe_router_fwd",
    "(Tensor scores, Tensor? bias, Tensor? expert_ids, int local_expert_count, int topk,"
    " int local_expert_start, str scoring, float route_scale, ScalarType dtype, str? target)"
    " -> (Tensor, Tensor)",
)


@torch.library.impl("tileops::moe_router_fwd", "CompositeExplicitAutograd")
def _moe_router_fwd(scores, *settings):
    *settings, target = settings
    return targets.run("moe_router_fwd", target, scores, *settings)


@torch.library.register_fake("tileops::moe_router_fwd")
def _moe_router_fwd_fake(
    scores, bias, expert_ids, count, topk, start, scoring, route_scale, dtype, target
):
    rows = scores.shape[0]
    return (
        scores.new_empty((rows, count), dtype=dtype),
        scores.new_empty((rows, 1), dtype=torch.float32),
    )


class MoERouterFwdOp(Op):
    r"""Turn router scores into the rows that an expert-parallel MoE call needs.

    An affinity $a_e$ is $\sqrt{\mathrm{softplus}(s_e)}$, softmax over all E, or $\sigma(s_e)$, in
    float32. The `topk` experts with the largest affinity, plus `bias` under `"noaux_tc"`, are
    chosen; equal values go to the lower index; what is NaN or not above $-3.4 \cdot 10^{38}$ cannot
    be chosen and leaves its slot empty. With `expert_ids` the choice is given (hash routing): ids
    outside [0, E) are empty slots, and `bias` and the selection play no part. The weight of a
    chosen expert is its affinity without the bias, divided by the sum over the choice; a repeated
    id collects its slots' weights.

    `router_probs` holds the logarithm of each local expert's weight, and a very low value elsewhere
    (-1e30, in float16 -1e4), so that a softmax over the local columns gives $w_e / W$ with $W$ the
    local sum; `weight_scale` is `route_scale` times $W$, exactly 0 where no local expert was
    chosen. Over all ranks, softmax times scale adds up to the routed sum. This is the `MoERouter`
    operator proposed for ONNX Runtime.

    Args:
        local_expert_count: Experts of this rank, the columns of `router_probs`.
        topk: Experts chosen per token, at most 32.
        local_expert_start: First expert of this rank.
        scoring: `"sqrt_softplus"`, `"softmax"` or `"sigmoid"`.
        selection: `"topk"` or `"noaux_tc"`, which takes a bias.
        route_scale: Finite factor on `weight_scale`.
        dtype: dtype of `router_probs`: float32, bfloat16 or float16.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> op = MoERouterFwdOp(local_expert_count=2, topk=2, scoring="sigmoid")
        >>> probs, scale = op(torch.tensor([[0.0, 0.0, -9.0, 9.0]]))
        >>> probs.softmax(1) * scale  # experts 3 and 0 were chosen; 0 is one of this rank's 0 and 1
        tensor([[0.3334, 0.0000]])
    """

    def __init__(
        self,
        local_expert_count: int,
        topk: int = 1,
        local_expert_start: int = 0,
        scoring: str = "sqrt_softplus",
        selection: str = "noaux_tc",
        route_scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        *,
        target: str | None = None,
    ) -> None:
        op = "MoERouterFwdOp"
        check.integer(op, "local_expert_count", local_expert_count, low=1)
        check.integer(op, "topk", topk, low=1, high=32)
        check.integer(op, "local_expert_start", local_expert_start, low=0)
        check.choice(op, "scoring", scoring, SCORINGS)
        check.choice(op, "selection", selection, SELECTIONS)
        check.number(op, "route_scale", route_scale)
        check.choice(op, "dtype", dtype, check.FLOATS)
        self.local_expert_count = local_expert_count
        self.topk = topk
        self.local_expert_start = local_expert_start
        self.scoring = scoring
        self.selection = selection
        self.route_scale = float(route_scale)
        self.dtype = dtype
        self.target = targets.target_argument(op, target)

    def forward(
        self,
        scores: torch.Tensor,
        bias: torch.Tensor | None = None,
        expert_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route one batch of tokens.

        Args:
            scores: `[T, E]` router scores; float32, or bfloat16 or float16, which are widened.
            bias: `[E]` float32, added to the affinities for the selection only.
            expert_ids: `[T, topk]` int64 or int32, the given choice.

        Returns:
            `router_probs` `[T, local_expert_count]` in `dtype`, and `weight_scale` `[T, 1]`
            float32.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides; the local experts
                reach past E; `topk` exceeds E; or a bias comes with the selection `"topk"`.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        op = "MoERouterFwdOp"
        checker = check.Checker(op)
        checker.tensor("scores", scores, ("T", "E"), check.FLOATS)
        num_experts = scores.shape[1]
        if self.topk > num_experts:
            raise ValueError(f"{op}: topk must be at most E = {num_experts}, got {self.topk}")
        if self.local_expert_start + self.local_expert_count > num_experts:
            raise ValueError(
                f"{op}: local_expert_start + local_expert_count must be at most E = {num_experts}, "
                f"got {self.local_expert_start} + {self.local_expert_count}"
            )
        if expert_ids is not None:
            checker.dims["topk"] = self.topk
            checker.tensor("expert_ids", expert_ids, ("T", "topk"), (torch.int64, torch.int32))
            bias = None
        elif bias is not None:
            if self.selection != "noaux_tc":
                raise ValueError(f"{op}: bias must be None with selection='topk'")
            checker.tensor("bias", bias, ("E",), check.FLOAT32)
        return torch.ops.tileops.moe_router_fwd.default(
            scores,
            bias,
            expert_ids,
            self.local_expert_count,
            self.topk,
            self.local_expert_start,
            self.scoring,
            self.route_scale,
            self.dtype,
            self.target,
        )
