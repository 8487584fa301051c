"""A routed Mixture-of-Experts layer as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from tileops import check
from tileops.integrations import hf_blocks
from tileops.moe import FusedMoEFwdOp
from tileops.moe.op import Op
from tileops.moe.topk import check_experts
from tileops.nn.float32 import Float32Linear, keep_dtype


class MoE(nn.Module):
    """A routed Mixture-of-Experts layer: router and experts.

    The router is a linear layer; [FusedMoEFwdOp][tileops.moe.FusedMoEFwdOp] does the rest, and its
    rules for ties, NaN, groups and rounding hold here.

    Args:
        hidden_size: H.
        ffn_size: F, the width of an expert.
        num_experts: E.
        top_k: K, experts selected per token.
        scoring_func: `"softmax"` or `"sigmoid"`.
        renormalize: Divide the routing weights of a token by their sum.
        routed_scaling_factor: Finite, positive multiplier on the output.
        num_expert_group: Groups of consecutive experts; must divide E. 1 selects over all experts.
        topk_group: Groups kept per token; together they must hold at least K experts.
        activation: As [MoEGroupedGemmFwdOp][tileops.moe.MoEGroupedGemmFwdOp] defines them.
        router_bias: Give the router a bias.
        expert_bias: Give the experts the biases `b_gate_up` and `b_down`.
        correction_bias: Have a `correction_bias`, which is added to the sigmoid scores for the
            selection only.
        router_dtype: `torch.float32` keeps the router in float32, weight and product, whatever
            `.to()` makes of the rest; None treats it as the rest.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.
        device: Of the parameters.
        dtype: Of the parameters: float32, bfloat16 or float16.

    Attributes:
        router: `nn.Linear` from H to E.
        w_gate_up: `[E, 2F, H]`, its rows ordered as the activation reads them.
        w_down: `[E, H, F]`.
        b_gate_up: `[E, 2F]`, or None.
        b_down: `[E, H]`, or None.
        correction_bias: `[E]`, a buffer that stays float32 whatever `.to()` makes of the rest, or
            None.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> layer = MoE(hidden_size=16, ffn_size=8, num_experts=4, top_k=2, renormalize=True)
        >>> layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    w_gate_up: nn.Parameter
    w_down: nn.Parameter
    b_gate_up: nn.Parameter | None
    b_down: nn.Parameter | None
    correction_bias: torch.Tensor | None
    _op_class: Callable[..., Op] = FusedMoEFwdOp
    _shared = False
    _returns_pair = False

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        scoring_func: str = "softmax",
        renormalize: bool = False,
        routed_scaling_factor: float = 1.0,
        num_expert_group: int = 1,
        topk_group: int = 1,
        *,
        activation: str = "silu_and_mul",
        router_bias: bool = False,
        expert_bias: bool = False,
        correction_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        target: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        sizes = {"hidden_size": hidden_size, "ffn_size": ffn_size, "num_experts": num_experts}
        for name, size in sizes.items():
            check.integer(kind, name, size, low=1)
        for name, flag in {
            "router_bias": router_bias,
            "expert_bias": expert_bias,
            "correction_bias": correction_bias,
        }.items():
            check.flag(kind, name, flag)
        check.choice(kind, "router_dtype", router_dtype, (None, torch.float32))
        check.choice(kind, "dtype", dtype, (None, *check.FLOATS))
        routing = scoring_func, renormalize, routed_scaling_factor, num_expert_group, topk_group
        self.op = self._op_class(top_k, *routing, activation=activation, target=target)
        self.hidden_size, self.ffn_size, self.num_experts = hidden_size, ffn_size, num_experts
        groups = num_expert_group, topk_group
        bias = correction_bias or None
        check_experts(kind, num_experts, top_k, scoring_func, *groups, bias)

        options: Any = {"device": device, "dtype": dtype}
        linear = nn.Linear if router_dtype is None else Float32Linear
        self.router = linear(hidden_size, num_experts, bias=router_bias, **options)
        self.router.requires_grad_(False)
        self._add("w_gate_up", (num_experts, 2 * ffn_size, hidden_size), options)
        self._add("w_down", (num_experts, hidden_size, ffn_size), options)
        self._add("b_gate_up", (num_experts, 2 * ffn_size) if expert_bias else None, options)
        self._add("b_down", (num_experts, hidden_size) if expert_bias else None, options)
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("correction_bias", zeros if correction_bias else None)
        self.reset_parameters()

    def _add(self, name: str, shape: tuple[int, ...] | None, options: dict[str, Any]) -> None:
        weight = None if shape is None else torch.empty(shape, **options)
        parameter = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Draw weights and biases as `nn.Linear` does; zero the correction bias."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]
        for name, _ in self.named_parameters(recurse=False):
            self._draw(name)
        if self.correction_bias is not None:
            self.correction_bias.zero_()

    def _draw(self, name: str) -> None:
        bound = getattr(self, name.replace("b_", "w_")).shape[-1] ** -0.5
        nn.init.uniform_(getattr(self, name), -bound, bound)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: `[..., H]` in the dtype of the weights, any leading dimensions.

        Returns:
            A tensor of the same shape and dtype; with None beside it if the module was made from a
            block of gpt-oss, whose model takes a pair.

        Raises:
            ValueError: If the tokens have the wrong shape or dtype; what else the op says.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        tokens = self._tokens(hidden_states)
        out = self.op(
            tokens,
            self.router(tokens),
            self.w_gate_up,
            self.w_down,
            self.correction_bias,
            self.b_gate_up,
            self.b_down,
        ).view(hidden_states.shape)
        if self._returns_pair:
            return out, None  # type: ignore[return-value]
        return out

    def _tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Check the tokens before the router's product, and view them as a matrix."""
        kind, dtype = type(self).__name__, self.w_gate_up.dtype
        if hidden_states.ndim == 0 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{kind}: hidden_states must be [..., H] = [..., {self.hidden_size}], got "
                f"{tuple(hidden_states.shape)}"
            )
        if hidden_states.dtype != dtype:
            raise ValueError(
                f"{kind}: hidden_states must be {dtype}, as the weights, got {hidden_states.dtype}"
            )
        return hidden_states.reshape(-1, self.hidden_size)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        bias = self.correction_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.correction_bias = keep_dtype(fn)(bias)
        return self

    def extra_repr(self) -> str:
        """Return the sizes, and the op with the routing settings."""
        return (
            f"hidden_size={self.hidden_size}, ffn_size={self.ffn_size}, "
            f"num_experts={self.num_experts}, op={self.op!r}"
        )

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        target: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Build a layer with the sizes and the routing of a Transformers config.

        Args:
            config: Of a model type in `tileops.integrations.hf_blocks.FAMILIES`.
            target: As in the constructor.
            device: As in the constructor.
            dtype: As in the constructor.

        Raises:
            ValueError: If the model type is unknown, its activation is none of the op's, or it has
                a shared expert and this class has none, or the reverse.
        """
        arguments = hf_blocks.settings(config)
        if ("shared_size" in arguments) != cls._shared:
            other = "MoESharedExpert" if "shared_size" in arguments else "MoE"
            raise ValueError(
                f"{cls.__name__}: model_type of the config must be one for this class, got "
                f"{config.model_type!r}; use tileops.nn.{other}"
            )
        return cls(**arguments, target=target, device=device, dtype=dtype)

    @classmethod
    def from_hf(cls, block: nn.Module, *, copy: bool = False, target: str | None = None) -> Self:
        """Build a layer on the weights of a Transformers block.

        Memory is shared where the layouts agree: later changes to either show in both. They do not
        agree for

        - the gate and up matrices of a shared expert, which are one tensor here;
        - experts of gpt-oss, unless their model went through
          [convert_transposed_experts][tileops.integrations.transformers.convert_transposed_experts];
        - a router or correction bias in half precision that must be float32 here.

        A module made from a block of gpt-oss returns the output and None, in the place of the
        router's scores, since that model unpacks two values.

        Args:
            block: As `model.model.layers[i].mlp`, with its `experts` and its `gate` or `router`.
            copy: Allow copies of the weights whose layouts disagree.
            target: As in the constructor.

        Raises:
            ValueError: As `from_config`; if the block has no packed experts, computes something
                else than its config says, or has weights of a dtype that the op does not take; or
                if a weight would be copied without `copy=True`.
        """
        config, dtype = hf_blocks.config_and_dtype(cls.__name__, block)
        module = cls.from_config(config, target=target, device="meta", dtype=dtype)
        hf_blocks.check_settings(cls.__name__, block, hf_blocks.settings(config))
        state = hf_blocks.state(cls.__name__, block, module.state_dict(), copy)
        module.load_state_dict(state, assign=True)
        module._returns_pair = config.model_type == "gpt_oss"
        return module.train(block.training)
