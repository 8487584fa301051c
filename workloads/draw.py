"""Draws: inputs of a layer's ops at one number of tokens, and weights where they are needed."""

from __future__ import annotations

from functools import cached_property

import torch

from tileops import moe
from tileops.workloads import fp8_layer, quantized_layer
from tileops.workloads.layer import Layer, Routing
from tileops.workloads.sparse_mixer import sparse_mixer_fwd

Outputs = tuple[torch.Tensor, ...]

TIGHT = moe.ContiguousLayoutSpec.tight_physical_psum()


class Draw:
    """Inputs of a layer at one number of tokens, drawn on first use.

    Args:
        layer: The layer.
        num_tokens: T.
        dtype: Of tokens and weights.
        device: Where they are.
        routing: How tokens choose experts.
        seed: Of the tokens.
        weights: Parameters whose experts are drawn as tokens choose them; None makes new ones.
    """

    def __init__(
        self,
        layer: Layer,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        routing: Routing = "uniform",
        seed: int = 1,
        weights: Weights | None = None,
    ) -> None:
        self.layer, self.num_tokens = layer, num_tokens
        self.dtype, self.device = dtype, device
        self.routing: Routing = routing
        self.seed = seed
        self._weights = weights

    @cached_property
    def tokens(self) -> dict[str, torch.Tensor]:
        """`hidden_states` and `gating_output`."""
        return self.layer.tokens(self.num_tokens, self.dtype, self.device, self.seed, self.routing)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor | None]:
        """The layer's parameters, with values for the experts that the tokens choose."""
        weights = self._weights or Weights(self.layer, self.dtype, self.device)
        return weights.drawn(self.routes[1])

    @cached_property
    def fp8(self) -> dict[str, torch.Tensor]:
        """The matrices of these experts in FP8, and their scales."""
        return self._fp8(self.routes[1])

    @cached_property
    def fp8_of_all(self) -> dict[str, torch.Tensor]:
        """The same, with values for every expert that is here."""
        return self._fp8(torch.arange(self.layer.local_experts))

    def _fp8(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = self._weights or Weights(self.layer, self.dtype, self.device)
        return weights.fp8(ids)

    @cached_property
    def quantized(self) -> dict[str, torch.Tensor]:
        """Experts with packed weights."""
        weights = self._weights or Weights(self.layer, self.dtype, self.device)
        return weights.quantized(self.routes[1])

    @cached_property
    def routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Routing weights and expert ids, `[T, K]` each."""
        return self.route()

    def route(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Work the routes out: in float64 inside `computing_in(torch.float64)`."""
        logits = self.tokens["gating_output"]
        if self.layer.scoring_func == "sparse_mixer":
            return sparse_mixer_fwd(logits, target="reference")
        route = moe.FusedTopKFwdOp(**self.layer.routing_settings(), target="reference")
        return route(logits, self.bias)

    @cached_property
    def bias(self) -> torch.Tensor | None:
        """The correction bias."""
        return self.layer.correction(self.device)

    @cached_property
    def chosen(self) -> torch.Tensor:
        """Ids of the routes to experts that are here."""
        ids = self.routes[1].flatten()
        return ids[ids < self.layer.local_experts]

    @cached_property
    def rows(self) -> Outputs:
        """The tokens as expert rows, their metadata and the inverse."""
        op = moe.MoEPrePermuteFwdOp(TIGHT, self.layer.local_experts, target="reference")
        return op(self.tokens["hidden_states"], self.routes[1])

    @cached_property
    def inner_rows(self) -> torch.Tensor:
        """Expert rows between the two GEMMs."""
        make = torch.Generator(self.device).manual_seed(self.seed)
        rows = torch.empty(
            self.routes[1].numel(), self.layer.ffn_size, dtype=self.dtype, device=self.device
        )
        return rows.normal_(0, 0.5, generator=make)

    def quantised(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows in FP8 and their scales."""
        return moe.quantize_fp8_rowwise(x)

    def slab(self, width: int) -> torch.Tensor:
        """Expert rows as an even routing fills slabs with them, `[E, T * K / E, width]`."""
        layer = self.layer
        height = -(-self.num_tokens * layer.top_k // layer.num_experts)
        make = torch.Generator(self.device).manual_seed(self.seed)
        shape = layer.local_experts, height, width
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=make)

    @property
    def output(self) -> torch.Tensor:
        """A new buffer for an op that writes one: no result of another op is in it."""
        return torch.full_like(self.tokens["hidden_states"], torch.nan)

    @cached_property
    def shared_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The shared expert's gate and up rows, and its down rows."""
        alone = Layer("shared", 1, 1, self.layer.hidden_size, self.layer.shared_size or 1)
        weights = alone.weights(self.dtype, self.device)
        return weights["w_gate_up"][0], weights["w_down"][0]  # type: ignore[index]

    @property
    def num_chosen_experts(self) -> int:
        """Experts that have a route."""
        return self.chosen.unique().numel()


class Weights:
    """The parameters of a layer, whose experts get values when tokens first choose them."""

    def __init__(self, layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
        self._layer, self._dtype, self._device = layer, dtype, device
        self._tensors: dict[str, torch.Tensor | None] = {}
        self._experts: set[int] = set()
        self._fp8: dict[str, torch.Tensor] = {}
        self._fp8_experts: set[int] = set()
        self._packed: dict[str, torch.Tensor] = {}
        self._packed_experts: set[int] = set()

    @property
    def num_drawn(self) -> int:
        """Experts that have values."""
        return len(self._experts)

    def drawn(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Return the parameters, those of the experts in ``ids`` with values."""
        self._tensors = self._tensors or self._layer.empty_weights(self._dtype, self._device)
        here = self._here(ids)
        self._layer.draw_experts(self._tensors, sorted(here - self._experts))
        self._experts |= here
        return self._tensors

    def fp8(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the matrices in FP8 and their scales, those of the experts in ``ids`` filled."""
        weights, here = self.drawn(ids), self._here(ids)
        self._fp8 = self._fp8 or fp8_layer.empty(self._layer, self._device)
        for e in sorted(here - self._fp8_experts):
            fp8_layer.fill(self._fp8, weights, e)
        self._fp8_experts |= here
        return self._fp8

    def quantized(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return packed weights and scales, those of the experts in ``ids`` with values."""
        here = self._here(ids)
        if not self._packed:
            self._packed = quantized_layer.empty(self._layer, self._dtype, self._device)
        for e in sorted(here - self._packed_experts):
            quantized_layer.fill(self._packed, self._layer, e)
        self._packed_experts |= here
        return self._packed

    def _here(self, ids: torch.Tensor) -> set[int]:
        return {e for e in ids.unique().tolist() if e < self._layer.local_experts}
