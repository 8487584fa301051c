"""What a Transformers config, or a block built from one, says of its MoE layer.

Only attributes are read: Transformers need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tileops import check
from tileops.integrations.transformers import activation_of

ACTIVATIONS = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_python": "gelu_and_mul",
}
"""Ours by the names of Transformers; its other kinds of GELU are approximations."""


def _qwen(config: Any) -> dict[str, Any]:
    return {
        "ffn_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "renormalize": config.norm_topk_prob,
    }


def _qwen_shared(config: Any) -> dict[str, Any]:
    shared = {"shared_size": config.shared_expert_intermediate_size, "shared_gate": True}
    return _qwen(config) | shared


def _mixtral(config: Any) -> dict[str, Any]:
    return {
        "ffn_size": config.intermediate_size,
        "num_experts": config.num_local_experts,
        "renormalize": True,
    }


def _olmoe(config: Any) -> dict[str, Any]:
    return {
        "ffn_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "renormalize": config.norm_topk_prob,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    shared = {}
    if config.n_shared_experts:
        shared["shared_size"] = config.moe_intermediate_size * config.n_shared_experts
    return {
        "ffn_size": config.moe_intermediate_size,
        "num_experts": config.n_routed_experts,
        "scoring_func": "sigmoid",
        "renormalize": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_expert_group": config.n_group,
        "topk_group": config.topk_group,
        "correction_bias": True,
        "router_dtype": torch.float32,
        **shared,
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    if (alpha, limit) != (1.702, 7.0):
        raise ValueError(
            f"MoE: swiglu_alpha and swiglu_limit of the config must be 1.702 and 7.0, got {alpha} "
            f"and {limit}"
        )
    return {
        "ffn_size": config.intermediate_size,
        "num_experts": config.num_local_experts,
        "renormalize": True,  # it takes the softmax over the selected logits: the same
        "activation": "swigluoai",
        "router_bias": True,
        "expert_bias": True,
    }


FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "deepseek_v3": _deepseek,
    "glm4_moe": _deepseek,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen_shared,
    "qwen3_moe": _qwen,
    "qwen3_next": _qwen_shared,
}
"""By `model_type`: the arguments of a module, but for those that all configs have."""


def settings(config: Any) -> dict[str, Any]:
    """Return the arguments of `tileops.nn.MoE`, or of `MoESharedExpert` if one is `shared_size`."""
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None:
        raise ValueError(
            f"MoE: model_type of the config must be one of {sorted(FAMILIES)}, got "
            f"{getattr(config, 'model_type', None)!r}; give the sizes and the routing yourself"
        )
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"MoE: hidden_act of the config must be one of {list(ACTIVATIONS)}, got "
            f"{config.hidden_act!r}"
        )
    found = {
        "hidden_size": config.hidden_size,
        "top_k": config.num_experts_per_tok,
        "activation": ACTIVATIONS[config.hidden_act],
        **family(config),
    }
    if "shared_size" in found and found["activation"] != "silu_and_mul":
        raise ValueError(
            f"MoESharedExpert: hidden_act of the config must be silu, which the shared expert has, "
            f"got {config.hidden_act!r}"
        )
    return found


def config_and_dtype(kind: str, block: Any) -> tuple[Any, torch.dtype]:
    """Return the config of a block and the dtype of its experts' weights.

    Raises:
        ValueError: If it has no packed experts, or none of a dtype that the modules have.
    """
    experts: Any = getattr(block, "experts", None)
    if not hasattr(experts, "gate_up_proj") or not hasattr(experts, "config"):
        raise ValueError(
            f"{kind}: block must have experts with a config and a gate_up_proj, got "
            f"{type(block).__name__} without; leave the dense layers of a model as they are, and "
            f"load quantised experts dequantised"
        )
    dtype = experts.gate_up_proj.dtype
    if dtype not in check.FLOATS:
        raise ValueError(
            f"{kind}: weights of block.experts must be one of {list(check.FLOATS)}, got {dtype}; "
            f"convert them, or see docs/fp8.md for FP8 weights with their scales"
        )
    return experts.config, dtype


def check_settings(kind: str, block: Any, wanted: dict[str, Any]) -> None:
    """Check that a block computes what its config says.

    Args:
        kind: The module's class, for the messages.
        block: The block.
        wanted: What `settings` makes of the config.

    Raises:
        ValueError: If an attribute of the block, or of a part of it, was set to something else.
    """
    named = {
        "top_k": "top_k",
        "norm_topk_prob": "renormalize",
        "routed_scaling_factor": "routed_scaling_factor",
        "num_group": "num_expert_group",
        "n_group": "num_expert_group",
        "topk_group": "topk_group",
    }
    router, activation = _router(block), wanted["activation"]
    found = [
        (f"{where}.{name}", getattr(part, name), wanted[setting])
        for where, part in (("block", block), ("router", router))
        for name, setting in named.items()
        if setting in wanted and hasattr(part, name)
    ]
    if activation == "swigluoai":
        experts = block.experts
        found += [("experts.alpha", experts.alpha, 1.702), ("experts.limit", experts.limit, 7.0)]
    else:
        found.append(("experts.act_fn", activation_of(block.experts.act_fn), activation))
    if (shared := _shared(block)) is not None:
        found.append(("shared expert's act_fn", activation_of(shared.act_fn), "silu_and_mul"))
    for name, got, expected in found:
        if got != expected:
            raise ValueError(
                f"{kind}: {name} of {type(block).__name__} must be {expected!r}, as its config "
                f"says, got {got!r}; set the config and the block alike"
            )


def state(
    kind: str, block: Any, wanted: dict[str, torch.Tensor], copy: bool
) -> dict[str, torch.Tensor]:
    """Return the weights of a block as the state dict of a module, of its memory where that can be.

    Args:
        kind: The module's class, for the messages.
        block: The block.
        wanted: The module's state dict: its names, and each tensor's dtype.
        copy: Allow copies of weights whose layouts disagree.

    Raises:
        ValueError: If names disagree, or a weight would be copied without `copy`.
    """
    parts = {name: part for name, part in _parts(block).items() if part[0] is not None}
    if parts.keys() != wanted.keys():
        differ = sorted(parts.keys() ^ wanted.keys())
        raise ValueError(
            f"{kind}: block must have the weights that its config says, got "
            f"{type(block).__name__}, which differs in {', '.join(differ)}"
        )
    copied = [
        name
        for name, part in parts.items()
        if len(part) != 1 or part[0].dtype != wanted[name].dtype or part[0].stride(-1) != 1
    ]
    if copied and not copy:
        raise ValueError(
            f"{kind}: copy must be True, since the layout of {', '.join(copied)} is another in "
            f"{type(block).__name__}, got False"
        )
    return {
        name: (_copy(part, wanted[name].dtype) if name in copied else part[0]).detach()
        for name, part in parts.items()
    }


def _copy(part: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(part).to(dtype).contiguous()


def _parts(block: Any) -> dict[str, tuple[Any, ...]]:
    """Return for each weight of a module the tensors of a block whose rows make it up."""
    router, experts = _router(block), block.experts
    w_gate_up, w_down = experts.gate_up_proj, experts.down_proj
    if getattr(experts, "is_transposed", False):
        w_gate_up, w_down = w_gate_up.transpose(1, 2), w_down.transpose(1, 2)
    parts: dict[str, tuple[Any, ...]] = {
        "router.weight": (router.weight,),
        "router.bias": (getattr(router, "bias", None),),
        "correction_bias": (getattr(router, "e_score_correction_bias", None),),
        "w_gate_up": (w_gate_up,),
        "w_down": (w_down,),
        "b_gate_up": (getattr(experts, "gate_up_proj_bias", None),),
        "b_down": (getattr(experts, "down_proj_bias", None),),
    }
    if (shared := _shared(block)) is not None:
        parts["shared_w_gate_up"] = shared.gate_proj.weight, shared.up_proj.weight
        parts["shared_w_down"] = (shared.down_proj.weight,)
    if (gate := getattr(block, "shared_expert_gate", None)) is not None:
        parts["shared_gate.weight"] = (gate.weight,)
    return parts


def _router(block: Any) -> Any:
    return block.gate if hasattr(block, "gate") else block.router


def _shared(block: Any) -> Any:
    """Return the shared expert, or None; with `n_shared_experts=0` the blocks have an empty one."""
    for name in ("shared_expert", "shared_experts"):
        shared = getattr(block, name, None)
        if shared is not None and shared.gate_proj.weight.shape[0] > 0:
            return shared
    return None
