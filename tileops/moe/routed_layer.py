"""What the routed layers share: their settings, and the steps that a user may replace."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.moe.grouped_gemm import ACTIVATIONS
from tileops.moe.modular import (
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalize,
    PrepareResult,
)
from tileops.moe.op import Op
from tileops.moe.topk import check_experts, check_routing


class RoutedLayer(Op):
    """Base of the routed layers: their constructor and what its settings decide."""

    _name: str  # the op that messages speak of

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
        check_routing(
            self._name,
            top_k,
            scoring_func,
            renormalize,
            num_expert_group,
            topk_group,
            routed_scaling_factor,
        )
        check.choice(self._name, "activation", activation, ACTIVATIONS)
        self.top_k = top_k
        self.scoring_func = scoring_func
        self.renormalize = renormalize
        self.routed_scaling_factor = float(routed_scaling_factor)
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.activation = activation
        self.target = targets.target_argument(self._name, target)
        for name, part, kind in (
            ("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalize),
            ("experts", experts, FusedMoEExpertsModular),
        ):
            if part is not None and not isinstance(part, kind):
                raise TypeError(f"{self._name}: {name} must be a {kind.__name__}, got {part!r}")
        self.prepare_finalize = prepare_finalize
        self.experts = experts

    def _check_routing(
        self,
        checker: check.Checker,
        num_experts: int,
        correction_bias: torch.Tensor | None,
    ) -> tuple[int, str, bool, int, int, float]:
        """Check the settings against the router's experts; return them for an operator."""
        check_experts(
            self._name,
            num_experts,
            self.top_k,
            self.scoring_func,
            self.num_expert_group,
            self.topk_group,
            correction_bias,
        )
        if correction_bias is not None:
            checker.dims["E"] = num_experts
            checker.tensor("correction_bias", correction_bias, ("E",), check.FLOAT32)
        return (
            self.top_k,
            self.scoring_func,
            self.renormalize,
            self.num_expert_group,
            self.topk_group,
            self.routed_scaling_factor,
        )

    def _prepare(
        self,
        movement: FusedMoEPrepareAndFinalize,
        hidden_states: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        num_experts: int,
    ) -> PrepareResult:
        """Have the tokens moved to the experts."""
        prepared = movement.prepare(hidden_states, weights, ids, num_experts)
        if not isinstance(prepared, PrepareResult):
            raise TypeError(
                f"{self._name}: prepare_finalize.prepare must return a PrepareResult, got "
                f"{type(prepared).__name__}"
            )
        return prepared
