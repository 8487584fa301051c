"""Routed layers shaped as those of published models, with seeded inputs for outputs of order 1."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from tileops.workloads.grouped_gemm import activate

Routing = Literal["uniform", "zipf", "hot", "alike"]
"""Which experts tokens choose: all alike often; the r-th most popular one in proportion to 1/r; one
of them by every token; or every token the same ones, as its hidden state is the same."""

MAP_NORESERVE = 0x4000
"""Linux's flag for memory that need not be there before it is used; Python names it since 3.13."""

MAX_REDRAWS = 100
NEAR_TIE = 1e-6
"""Two scores closer than this may trade places with the rounding of a float32 sigmoid."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Layer:
    """The shape and routing of one routed layer; see ``FusedMoEFwdOp`` for the settings.

    Attributes:
        name: What the layer is called in tests and tables.
        num_experts: E, the experts that the router knows.
        top_k: K.
        hidden_size: H.
        ffn_size: F, the width of one expert.
        scoring_func: ``"sparse_mixer"`` is PhiMoE's, which only ``MoEFwdOp`` has.
        correction_bias: Whether the selection gets a per-expert bias.
        expert_bias: Whether both GEMMs have a bias.
        num_local_experts: The first so many experts are here, and routes to others are dropped:
            one rank of expert parallelism. None is all of them.
        shared_size: Width of the shared expert, None for a layer without one.
    """

    name: str
    num_experts: PositiveInt
    top_k: PositiveInt
    hidden_size: PositiveInt
    ffn_size: PositiveInt
    scoring_func: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    renormalize: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    num_expert_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    activation: Literal["silu_and_mul", "gelu_and_mul", "swigluoai"] = "silu_and_mul"
    correction_bias: bool = False
    expert_bias: bool = False
    num_local_experts: PositiveInt | None = None
    shared_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Layer:
        experts, groups = self.num_experts, self.num_expert_group
        if experts % groups or self.topk_group > groups:
            raise ValueError(
                f"num_expert_group = {groups} must divide num_experts = {experts} and be at least "
                f"topk_group = {self.topk_group}"
            )
        if self.top_k > experts // groups * self.topk_group:
            raise ValueError(f"top_k = {self.top_k} is more than the experts to choose from")
        if self.local_experts > experts:
            raise ValueError(f"num_local_experts = {self.num_local_experts} is more than {experts}")
        if self.scoring_func == "sparse_mixer" and (self.top_k != 2 or groups > 1):
            raise ValueError("scoring_func: sparse_mixer needs top_k: 2 and no groups")
        if self.correction_bias and self.scoring_func != "sigmoid":
            raise ValueError("correction_bias needs scoring_func: sigmoid")
        return self

    @property
    def local_experts(self) -> int:
        """Experts whose weights are here."""
        return self.num_local_experts or self.num_experts

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments of ``FusedMoEFwdOp``."""
        return {**self.routing_settings(), "activation": self.activation}

    def routing_settings(self) -> dict[str, Any]:
        """Return the constructor arguments of ``FusedTopKFwdOp``."""
        names = ("top_k", "scoring_func", "renormalize", "routed_scaling_factor")
        names += ("num_expert_group", "topk_group")
        return {name: getattr(self, name) for name in names}

    def weights(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> dict[str, torch.Tensor | None]:
        """Return the layer's parameters, named as ``FusedMoEFwdOp`` names them."""
        weights = self.empty_weights(dtype, device)
        self.draw_experts(weights, range(self.local_experts), seed)
        return weights

    def empty_weights(
        self, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor | None]:
        """Return the layer's parameters, those of the experts without values yet.

        On a CPU the memory of an expert is taken when it is written: what is never touched may be
        more than the machine has.
        """
        E, H, F = self.local_experts, self.hidden_size, self.ffn_size
        shapes = {"w_gate_up": (E, 2 * F, H), "w_down": (E, H, F)}
        if self.expert_bias:
            shapes |= {"b_gate_up": (E, 2 * F), "b_down": (E, H)}
        weights: dict[str, torch.Tensor | None] = dict.fromkeys(
            ("w_gate_up", "w_down", "correction_bias", "b_gate_up", "b_down")
        )
        for name, shape in shapes.items():
            weights[name] = uncommitted(shape, dtype, torch.device(device))
        weights["correction_bias"] = self.correction(device)
        return weights

    def correction(self, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Return the correction bias, None for a layer without one.

        It decides between neighbours in the order of scores, and leaves experts about as popular as
        they are without it.
        """
        if not self.correction_bias:
            return None
        order = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(0))
        return (torch.linspace(-0.2, 0.2, self.num_experts) / self.num_experts)[order].to(device)

    def draw_experts(
        self, weights: dict[str, torch.Tensor | None], experts: Iterable[int], seed: int = 0
    ) -> None:
        """Give values to some experts' parameters; an expert has the same in every process."""
        scales = {"w_gate_up": self.hidden_size**-0.5, "w_down": 2 * self.ffn_size**-0.5}
        scales |= {"b_gate_up": 0.5, "b_down": 0.5}
        drawn = {name: w for name, w in weights.items() if name in scales and w is not None}
        make = torch.Generator(weights["w_down"].device)  # type: ignore[union-attr]
        for e in experts:
            make.manual_seed(seed * self.num_experts + e)
            for name, weight in drawn.items():
                weight[e].normal_(0, scales[name], generator=make)

    def tokens(
        self,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 1,
        routing: Routing = "uniform",
    ) -> dict[str, torch.Tensor]:
        """Return hidden states and float32 router logits that no near-tie makes ambiguous."""
        make = torch.Generator(device).manual_seed(seed)
        rows = min(num_tokens, 1) if routing == "alike" else num_tokens
        hidden = torch.empty(rows, self.hidden_size, dtype=dtype, device=device)
        hidden.normal_(0, 1, generator=make)
        logits = self._logits(rows, make, routing)
        for _ in range(MAX_REDRAWS):
            near = self._near_ties(logits).nonzero()[:, 0]
            if not near.numel():
                break
            logits[near] = self._logits(near.numel(), make, routing)
        else:
            raise ValueError(
                f"{self.name}: found no router logits without near-ties: take fewer experts, or no "
                f"correction_bias"
            )
        inputs = {"hidden_states": hidden, "gating_output": logits}
        return {
            name: x.expand(num_tokens, -1).contiguous() if rows else x for name, x in inputs.items()
        }

    def _logits(self, rows: int, make: torch.Generator, routing: Routing) -> torch.Tensor:
        """Draw logits of even spacing, apart from the highest, whose lead outweighs any bias."""
        E, device = self.num_experts, make.device
        popularity = torch.zeros(E, device=device)
        if routing == "zipf":
            popularity = -torch.arange(1.0, E + 1, device=device).log()
        elif routing == "hot":
            popularity[0] = 1e4
        popularity = popularity.roll(int(make.initial_seed()) * 7 % self.local_experts)
        # the order of popularity plus Gumbel noise is drawing without replacement
        uniform = torch.rand(rows, E, device=device, generator=make).clamp(1e-9, 1 - 1e-6)
        order = (popularity - (-uniform.log()).log()).argsort(-1, descending=True)
        ranked = torch.linspace(3, -3, E, device=device)
        ranked[0] = 5
        return torch.empty_like(uniform).scatter_(1, order, ranked.expand(rows, -1))

    def _near_ties(self, logits: torch.Tensor) -> torch.Tensor:
        """Return which rows hold scores so close that their order could be a matter of rounding."""
        bias = self.correction(logits.device)
        if bias is None or self.num_experts == 1:
            return torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        scores = torch.sigmoid(logits.double()) + bias
        # the order of those chosen, and the first that is not; with groups it may be any expert
        most = self.num_experts if self.num_expert_group > 1 else self.top_k + 1
        best = scores.topk(min(most, self.num_experts), -1).values
        gap = -best.diff(dim=-1).amax(-1)
        if self.num_expert_group > 1:
            groups = scores.unflatten(-1, (self.num_expert_group, -1))
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            gap = torch.minimum(gap, best.sort(-1).values.diff(dim=-1).amin(-1))
        return gap < NEAR_TIE


def uncommitted(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without values; a CPU gives it memory a page at a time, on the first use."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, max(1, size * dtype.itemsize), flags)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


def eager_experts(
    hidden_states: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run the experts as a plain torch loop: what bounds compare with.

    It computes and returns ``dtype``, None for the tensors' own. The sum over a token's experts is
    never narrower than float32.
    """
    dtype = dtype or hidden_states.dtype
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(hidden_states.shape, dtype=wide, device=hidden_states.device)
    for e in topk_ids.unique().tolist():
        if not 0 <= e < w_down.shape[0]:
            continue
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        bias = None if b_gate_up is None else b_gate_up[e].to(dtype)
        tokens = hidden_states[token].to(dtype)
        gate_up = torch.nn.functional.linear(tokens, w_gate_up[e].to(dtype), bias)
        bias = None if b_down is None else b_down[e].to(dtype)
        down = torch.nn.functional.linear(activate(gate_up, activation), w_down[e].to(dtype), bias)
        out.index_add_(0, token, down.to(wide) * topk_weights[token, slot, None].to(wide))
    return out.to(dtype)
