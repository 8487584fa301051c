"""The two parts of a fused layer that a user may replace: moving the tokens, and the experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrepareResult:
    """The tokens that this rank's experts work on.

    Attributes:
        hidden_states: `[T', H]` tokens; T' may differ from the layer's T.
        topk_weights: `[T', K]` float32 routing weights, scaled already.
        topk_ids: `[T', K]` int32; ids outside [0, E) of the weights are dropped.
        scale: Quantisation scale of `hidden_states`, or None where they are not quantised.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    scale: torch.Tensor | None = None


class WeightedReduce(ABC):
    """The sum over a token's routes, as a step of its own: whoever finalizes applies it once."""

    @abstractmethod
    def apply(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Reduce `expert_output` into `output`.

        Args:
            output: `[T', H]` buffer. On return every element is written.
            expert_output: What the experts wrote, shaped as their `output_shape`.
            topk_weights: `[T', K]` float32.
            topk_ids: `[T', K]` int32.

        Returns:
            `output`.
        """


class WeightedReduceNoOp(WeightedReduce):
    """For experts whose output is weighted and reduced already: a copy where the buffers differ."""

    def apply(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Copy `expert_output` to `output`, unless they are one tensor."""
        if output is not expert_output:
            output.copy_(expert_output)
        return output


class FusedMoEPrepareAndFinalize(ABC):
    """Brings tokens to the experts before the layer's MLP and takes the results back after it.

    Expert parallelism dispatches and combines here. `prepare` gets every token of this rank and
    weights that carry the routed scaling factor; `finalize` must leave every element of `output`
    written.
    """

    @abstractmethod
    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
    ) -> PrepareResult:
        """Return the tokens that this rank's experts work on.

        Args:
            hidden_states: `[T, H]` tokens.
            topk_weights: `[T, K]` float32 routing weights, scaled already.
            topk_ids: `[T, K]` int32 ids over all experts.
            num_experts: E of the router.
        """

    @abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weighted_reduce: WeightedReduce,
    ) -> None:
        """Bring the experts' results back to `output`.

        Args:
            output: `[T, H]` buffer of the layer. On return every element is written.
            expert_output: What the experts wrote.
            topk_weights: `[T', K]` as `prepare` returned them.
            topk_ids: `[T', K]` as `prepare` returned them.
            weighted_reduce: The experts' reduction; apply it exactly once.
        """


class PrepareAndFinalizeNoOp(FusedMoEPrepareAndFinalize):
    """One rank holds all experts: the tokens stay where they are."""

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
    ) -> PrepareResult:
        """Return the arguments."""
        return PrepareResult(hidden_states, topk_weights, topk_ids)

    def finalize(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weighted_reduce: WeightedReduce,
    ) -> None:
        """Reduce into the layer's output."""
        weighted_reduce.apply(output, expert_output, topk_weights, topk_ids)


class FusedMoEExpertsModular(ABC):
    """The experts of a fused layer: from prepared tokens to expert output.

    Attributes:
        activation: Name of the gated activation, for the caller to read.
    """

    activation: str = "silu_and_mul"

    @abstractmethod
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
        """Run the experts on the prepared tokens, writing every element of `output`.

        Args:
            output: Buffer of `output_shape(T', H, K)` in the tokens' dtype.
            hidden_states: `[T', H]` prepared tokens.
            w_gate_up: `[E, 2F, H]`.
            w_down: `[E, H, F]`.
            topk_weights: `[T', K]` float32, scaled already: a factor in here is the user's own.
            topk_ids: `[T', K]` int32.
            b_gate_up: `[E, 2F]` or None.
            b_down: `[E, H]` or None.

        Returns:
            `output`.
        """

    def output_shape(self, num_tokens: int, hidden_size: int, top_k: int) -> tuple[int, ...]:
        """Return the shape of the buffer that `forward` writes: `(T', H)` where it reduces."""
        return (num_tokens, hidden_size)

    def make_weighted_reduce(self) -> WeightedReduce:
        """Return the reduction that is left to do on what `forward` wrote."""
        return WeightedReduceNoOp()
