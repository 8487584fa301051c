"""A routed layer and a shared expert, as one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tileops import check
from tileops.moe import FusedMoESharedExpertFwdOp
from tileops.nn.moe import MoE


class MoESharedExpert(MoE):
    """A routed layer and a shared expert beside it, whose outputs are added.

    As [MoE][tileops.nn.MoE], on
    [FusedMoESharedExpertFwdOp][tileops.moe.FusedMoESharedExpertFwdOp]; `routed_scaling_factor` does
    not touch the shared expert, whose activation is silu. The experts have no biases.

    Args:
        hidden_size: H.
        ffn_size: F, the width of a routed expert.
        num_experts: E.
        top_k: K, experts selected per token.
        shared_size: S, the width of the shared expert.
        scoring_func: As in MoE, as what follows.
        renormalize: As in MoE.
        routed_scaling_factor: As in MoE.
        num_expert_group: As in MoE.
        topk_group: As in MoE.
        shared_gate: Multiply the shared output of a token by the sigmoid of a linear layer from H
            to 1 (Qwen2-MoE, Qwen3-Next).
        activation: Of the routed experts.
        router_bias: As in MoE.
        correction_bias: As in MoE.
        router_dtype: As in MoE.
        target: As in MoE.
        device: As in MoE.
        dtype: As in MoE.

    Attributes:
        shared_w_gate_up: `[2S, H]`, all S gate rows, then the up rows.
        shared_w_down: `[H, S]`.
        shared_gate: `nn.Linear` from H to 1 without bias, or None.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> layer = MoESharedExpert(16, 8, num_experts=4, top_k=2, shared_size=24)
        >>> layer(torch.randn(5, 16)).shape
        torch.Size([5, 16])
    """

    shared_w_gate_up: nn.Parameter
    shared_w_down: nn.Parameter
    _op_class = FusedMoESharedExpertFwdOp
    _shared = True

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        shared_size: int,
        scoring_func: str = "softmax",
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        num_expert_group: int = 1,
        topk_group: int = 1,
        *,
        shared_gate: bool = False,
        activation: str = "silu_and_mul",
        router_bias: bool = False,
        correction_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        target: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            ffn_size,
            num_experts,
            top_k,
            scoring_func,
            renormalize,
            routed_scaling_factor,
            num_expert_group,
            topk_group,
            activation=activation,
            router_bias=router_bias,
            correction_bias=correction_bias,
            router_dtype=router_dtype,
            target=target,
            device=device,
            dtype=dtype,
        )
        check.integer("MoESharedExpert", "shared_size", shared_size, low=1)
        check.flag("MoESharedExpert", "shared_gate", shared_gate)
        options: Any = {"device": device, "dtype": dtype}
        self.shared_size = shared_size
        self._add("shared_w_gate_up", (2 * shared_size, hidden_size), options)
        self._add("shared_w_down", (hidden_size, shared_size), options)
        self._draw("shared_w_gate_up")
        self._draw("shared_w_down")
        gate = nn.Linear(hidden_size, 1, bias=False, **options) if shared_gate else None
        self.shared_gate = None if gate is None else gate.requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run both halves and add them up; as `MoE.forward`."""
        tokens = self._tokens(hidden_states)
        shared, routed = self.op(
            tokens,
            self.router(tokens),
            self.w_gate_up,
            self.w_down,
            self.correction_bias,
            self.shared_w_gate_up,
            self.shared_w_down,
        )
        if self.shared_gate is not None:
            shared = torch.sigmoid(self.shared_gate(tokens)) * shared
        return (routed + shared).view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Return the sizes, and the op with the routing settings."""
        return f"shared_size={self.shared_size}, {super().extra_repr()}"
