"""Routed layers shaped as those of published models, with seeded inputs for outputs of order 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileops.workloads.grouped_gemm import activate


@dataclass(frozen=True)
class Layer:
    """The shape and routing of one routed layer; see ``FusedMoEFwdOp`` for the settings.

    Attributes:
        name: What the layer is called in tests and tables.
        num_experts: E.
        hidden_size: H.
        ffn_size: F, the width of one expert.
        correction_bias: Whether the selection gets a per-expert bias.
        expert_bias: Whether both GEMMs have a bias.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    ffn_size: int
    scoring_func: str = "softmax"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    activation: str = "silu_and_mul"
    correction_bias: bool = False
    expert_bias: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the constructor arguments of ``FusedMoEFwdOp``."""
        names = ("top_k", "scoring_func", "renormalize", "routed_scaling_factor")
        names += ("num_expert_group", "topk_group", "activation")
        return {name: getattr(self, name) for name in names}

    def weights(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> dict[str, torch.Tensor | None]:
        """Return the layer's parameters, named as ``FusedMoEFwdOp`` names them."""
        E, H, F = self.num_experts, self.hidden_size, self.ffn_size
        normal = _normal(dtype, device, seed)
        # even spacing: with logits of even spacing no selection hangs on the last bit of a score
        order = torch.randperm(E, generator=torch.Generator().manual_seed(seed))
        return {
            "w_gate_up": normal((E, 2 * F, H), H**-0.5),
            "w_down": normal((E, H, F), 2 * F**-0.5),
            "correction_bias": torch.linspace(-1, 1, E)[order].to(device)
            if self.correction_bias
            else None,
            "b_gate_up": normal((E, 2 * F), 0.5) if self.expert_bias else None,
            "b_down": normal((E, H), 0.5) if self.expert_bias else None,
        }

    def tokens(
        self, num_tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return hidden states and float32 router logits that no near-tie makes ambiguous."""
        make = torch.Generator().manual_seed(seed)
        order = torch.rand(num_tokens, self.num_experts, generator=make).argsort(-1)
        logits = torch.linspace(-3, 3, self.num_experts)[order]
        hidden = _normal(dtype, device, seed)((num_tokens, self.hidden_size), 1.0)
        return {"hidden_states": hidden, "gating_output": logits.to(device)}


def _normal(
    dtype: torch.dtype, device: torch.device | str, seed: int
) -> Callable[[tuple[int, ...], float], torch.Tensor]:
    make = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, scale, generator=make)

    return draw


def eager_experts(
    hidden_states: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the experts as a plain torch loop in the tensors' own dtype: what bounds compare with."""
    out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for e in topk_ids.unique().tolist():
        if not 0 <= e < w_down.shape[0]:
            continue
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        bias = None if b_gate_up is None else b_gate_up[e]
        gate_up = torch.nn.functional.linear(hidden_states[token], w_gate_up[e], bias)
        bias = None if b_down is None else b_down[e]
        down = torch.nn.functional.linear(activate(gate_up, activation), w_down[e], bias)
        out.index_add_(0, token, down.float() * topk_weights[token, slot, None])
    return out.to(hidden_states.dtype)


DEEPSEEK_V3_ROUTING: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "num_expert_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "correction_bias": True,
}

LAYERS = {
    layer.name: layer
    for layer in (
        Layer("qwen3-30b-a3b", 128, 8, 2048, 768),
        Layer("olmoe-1b-7b", 64, 8, 2048, 1024, renormalize=False),
        Layer("mixtral-8x7b", 8, 2, 4096, 14336),
        Layer("deepseek-v3", 256, 8, 7168, 2048, **DEEPSEEK_V3_ROUTING),
        Layer("gpt-oss-20b", 32, 4, 2880, 2880, activation="swigluoai", expert_bias=True),
        Layer("llama-4-maverick", 128, 1, 5120, 8192, scoring_func="sigmoid", renormalize=False),
    )
}
