"""Top-k routing: reference and cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tileops.workloads.accuracy import precision


def descending(values: torch.Tensor) -> torch.Tensor:
    """Return the order of the last dimension: largest first, NaN last, equal values by index."""
    ranked = torch.where(values.isnan(), -torch.inf, values)
    by_value = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    # NaN and minus infinity compare equal above: a second stable pass puts NaN behind
    nan = values.isnan().gather(-1, by_value)
    return by_value.gather(-1, torch.sort(nan.byte(), dim=-1, stable=True).indices)


def _kept_groups(
    biased: torch.Tensor, num_groups: int, topk_group: int, sum_of_two: bool
) -> torch.Tensor:
    """Return which experts stand in a kept group, shaped as ``biased``."""
    groups = biased.unflatten(-1, (num_groups, -1))
    best = groups.gather(-1, descending(groups))[..., : 2 if sum_of_two else 1]
    kept = descending(best.sum(-1))[:, :topk_group]
    mask = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, kept, True)
    return mask[..., None].expand_as(groups).flatten(-2)


def fused_topk_fwd(
    gating_output,
    correction_bias,
    top_k,
    scoring_func,
    renormalize,
    num_expert_group,
    topk_group,
    routed_scaling_factor,
    target,
):
    """Score, keep groups, select, weigh: in float32, as the op's formula says."""
    logits = gating_output.to(precision(torch.float32))
    if scoring_func == "softmax":
        scores, ranked = torch.softmax(logits, -1), logits
    else:
        scores = torch.sigmoid(logits)
        ranked = scores if correction_bias is None else scores + correction_bias
    order = descending(ranked)
    if num_expert_group > 1:
        kept = _kept_groups(ranked, num_expert_group, topk_group, correction_bias is not None)
        # excluded experts go behind all kept ones, whatever these hold
        excluded = ~kept.gather(-1, order)
        order = order.gather(-1, torch.sort(excluded.byte(), dim=-1, stable=True).indices)
    ids = order[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = torch.where(total == 0, 0.0, weights / total)
    return (weights * routed_scaling_factor).contiguous(), ids.int().contiguous()


@dataclass(frozen=True)
class Case:
    """Routing of one model.

    Attributes:
        name: What the case is called in tests and tables.
        num_experts: E.
        settings: Arguments of ``FusedTopKFwdOp``.
        bias: Whether a correction bias is passed.
    """

    name: str
    num_experts: int
    settings: dict[str, Any] = field(hash=False)
    bias: bool = False

    def inputs(
        self, num_tokens: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(gating_output, correction_bias)`` whose scores have no near-ties.

        Each row is a shuffle of distinct, evenly spaced logits, so that a selection is never
        decided by the last bit of an exponential.
        """
        make = torch.Generator().manual_seed(seed)
        order = torch.rand(num_tokens, self.num_experts, generator=make).argsort(-1)
        logits = torch.linspace(-4, 4, self.num_experts)[order].to(dtype)
        bias = None
        if self.bias:
            bias = torch.linspace(-1, 1, self.num_experts)[
                torch.randperm(self.num_experts, generator=make)
            ].to(device)
        return logits.to(device), bias


_DEEPSEEK = {
    "top_k": 8,
    "scoring_func": "sigmoid",
    "renormalize": True,
    "num_expert_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}

CASES = (
    Case("qwen3-30b-a3b", 128, {"top_k": 8, "renormalize": True}),
    Case("olmoe", 64, {"top_k": 8}),
    Case("deepseek-v3", 256, _DEEPSEEK, bias=True),
    Case("deepseek-v2-lite", 64, {"top_k": 6}),
    Case("glm-4.5", 160, {"top_k": 8, "scoring_func": "sigmoid", "renormalize": True}, bias=True),
    Case("gpt-oss-20b", 32, {"top_k": 4, "renormalize": True}),
    Case("llama-4-maverick", 128, {"top_k": 1, "scoring_func": "sigmoid"}),
    Case("mixtral-8x7b", 8, {"top_k": 2, "renormalize": True}),
)
