"""Top-k routing: which experts take each token, and with what weight."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.op import Op

_SCHEMA = (
    "(Tensor gating_output, Tensor? correction_bias, int top_k, str scoring_func, bool renormalize,"
    " int num_expert_group, int topk_group, float routed_scaling_factor, str? target)"
    " -> (Tensor, Tensor)"
)
torch.library.define("tileops::fused_topk_fwd", _SCHEMA)


@torch.library.impl("tileops::fused_topk_fwd", "CompositeExplicitAutograd")
def _fused_topk_fwd(gating_output, *settings):
    *settings, target = settings
    return targets.run("fused_topk_fwd", target, gating_output, *settings)


@torch.library.register_fake("tileops::fused_topk_fwd")
def _fused_topk_fwd_fake(gating_output, correction_bias, top_k, *settings):
    shape = (gating_output.shape[0], top_k)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


def check_routing(
    op: str,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> None:
    """Check the routing settings that several ops share."""
    check.integer(op, "top_k", top_k, low=1)
    check.choice(op, "scoring_func", scoring_func, ("softmax", "sigmoid"))
    check.flag(op, "renormalize", renormalize)
    check.integer(op, "num_expert_group", num_expert_group, low=1)
    check.integer(op, "topk_group", topk_group, low=1, high=num_expert_group)
    check.factor(op, "routed_scaling_factor", routed_scaling_factor)


def check_experts(
    op: str,
    num_experts: int,
    top_k: int,
    scoring_func: str,
    num_expert_group: int,
    topk_group: int,
    correction_bias: object,
) -> None:
    """Check the routing settings against the number of experts of a call."""
    if num_experts % num_expert_group:
        raise ValueError(
            f"{op}: num_expert_group must divide E = {num_experts}, got {num_expert_group}"
        )
    selectable = num_experts // num_expert_group * topk_group
    if top_k > selectable:
        raise ValueError(
            f"{op}: top_k must be at most {selectable}, the experts of topk_group = {topk_group} "
            f"of {num_expert_group} groups over E = {num_experts}, got {top_k}"
        )
    if correction_bias is not None and scoring_func != "sigmoid":
        raise ValueError(
            f"{op}: correction_bias must be None with scoring_func={scoring_func!r}; "
            f"it is added to sigmoid scores only"
        )


class FusedTopKFwdOp(Op):
    r"""Score the router logits of each token and select its experts.

    The score of an expert is, in float32 whatever the logits' dtype, $\mathrm{softmax}(x)_e$ over
    all E experts or $\mathrm{sigmoid}(x_e)$. Softmax routing ranks by the logits, sigmoid routing
    by score plus `correction_bias`; equal values go to the lower expert index. The weights are
    always the unbiased scores, divided by their sum with `renormalize` (a sum of 0 gives weights
    0), times `routed_scaling_factor`.

    With `num_expert_group > 1` the experts form groups of E / num_expert_group consecutive ones,
    and only experts of the `topk_group` best groups can be selected (DeepSeek-V3's routing). A
    group's score is the sum of its two best biased scores when a `correction_bias` is passed (its
    one score in a group of one), and its best score otherwise; equal groups go to the lower index.

    The ids of a token are distinct and inside [0, E) whatever the logits hold. NaN ranks below
    every number, minus infinity included. The weights are what the formula gives, NaN included, and
    a NaN stays in its own token's row.

    Args:
        top_k: K, experts selected per token.
        scoring_func: `"softmax"` (Qwen3) or `"sigmoid"` (DeepSeek-V3, GLM-4.5, Kimi K2).
        renormalize: Divide the weights of a token by their sum.
        num_expert_group: Groups of consecutive experts; must divide E. 1 selects over all experts.
        topk_group: Groups kept per token; together they must hold at least K experts.
        routed_scaling_factor: Finite, positive multiplier on the weights.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> op = FusedTopKFwdOp(top_k=2, renormalize=True)
        >>> weights, ids = op(torch.tensor([[2.0, 1.0, 0.0, -1.0]]))
        >>> ids
        tensor([[0, 1]], dtype=torch.int32)
        >>> weights
        tensor([[0.7311, 0.2689]])
    """

    def __init__(
        self,
        top_k: int,
        scoring_func: str = "softmax",
        renormalize: bool = False,
        num_expert_group: int = 1,
        topk_group: int = 1,
        routed_scaling_factor: float = 1.0,
        *,
        target: str | None = None,
    ) -> None:
        check_routing(
            "FusedTopKFwdOp",
            top_k,
            scoring_func,
            renormalize,
            num_expert_group,
            topk_group,
            routed_scaling_factor,
        )
        self.top_k = top_k
        self.scoring_func = scoring_func
        self.renormalize = renormalize
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.routed_scaling_factor = float(routed_scaling_factor)
        self.target = targets.target_argument("FusedTopKFwdOp", target)

    def forward(
        self, gating_output: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route one batch of tokens.

        Args:
            gating_output: `[T, E]` router logits; float32, bfloat16 or float16.
            correction_bias: `[E]` float32, added to the sigmoid scores for the selection only.

        Returns:
            `topk_weights` `[T, K]` float32 and `topk_ids` `[T, K]` int32, both in descending order
            of selection.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, K exceeds the
                selectable experts, or a bias comes with softmax scoring.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("FusedTopKFwdOp")
        checker.tensor("gating_output", gating_output, ("T", "E"), check.FLOATS)
        check_experts(
            "FusedTopKFwdOp",
            gating_output.shape[1],
            self.top_k,
            self.scoring_func,
            self.num_expert_group,
            self.topk_group,
            correction_bias,
        )
        if correction_bias is not None:
            checker.tensor("correction_bias", correction_bias, ("E",), check.FLOAT32)
        return torch.ops.tileops.fused_topk_fwd.default(
            gating_output,
            correction_bias,
            self.top_k,
            self.scoring_func,
            self.renormalize,
            self.num_expert_group,
            self.topk_group,
            self.routed_scaling_factor,
            self.target,
        )
