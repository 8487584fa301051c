"""Hugging Face Transformers: the experts of a model on the ops of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tileops.moe import FusedMoEExpertsFwdOp
from tileops.moe.grouped_gemm import ACTIVATIONS

_OLDEST = 5, 8  # the first whose models take implementations that were registered
_Gates = tuple[Any, Any]
_ELSE = "run this model on another implementation: model.set_experts_implementation('grouped_mm')"


def register(name: str = "tileops", *, target: str | None = None) -> None:
    """Make an experts implementation known to Transformers.

    Afterwards `model.set_experts_implementation(name)`, or `experts_implementation=name` given to
    `from_pretrained`, runs the experts of a model on
    [FusedMoEExpertsFwdOp][tileops.moe.FusedMoEExpertsFwdOp]: in place, on the weights as they are,
    for prefill and for decoding. The model's own router and shared experts stay. A second call
    replaces what the first one registered.

    The registered function raises

    - RuntimeError if the model is in training mode, or a tensor requires grad under grad mode;
    - ValueError if the experts compute what the op has no form of (experts without a gate or with a
      norm behind them, other activations), or store transposed weights: see
      [convert_transposed_experts][tileops.integrations.transformers.convert_transposed_experts];
    - what the op raises, as NoKernelError where the target takes no such dtype.

    A route whose expert id lies outside [0, E) adds nothing, as expert parallelism needs.

    Args:
        name: What the implementation is called.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        ImportError: If Transformers is missing, or older than 5.8.
        TypeError: If the name is no str.
        ValueError: If the name is empty or another implementation's, or no target has `target`'s.
    """
    if not isinstance(name, str) or not name:
        kind = ValueError if name == "" else TypeError
        raise kind(f"register: name must be a str that is not empty, got {name!r}")
    interface, gates = _transformers()
    known = "eager" if name == "eager" else interface.ALL_EXPERTS_FUNCTIONS.get(name)
    if known is not None and getattr(known, "__module__", None) != __name__:
        raise ValueError(
            f"register: name must be one that no other implementation has, got {name!r}"
        )
    ops = {a: FusedMoEExpertsFwdOp(activation=a, target=target) for a in ACTIVATIONS}

    def experts_forward(
        module: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        if module.training:
            raise RuntimeError(
                f"{name}: {_kind(module)} must be in evaluation mode, since the op is "
                f"forward-only, got training mode; call model.eval(), or {_ELSE}"
            )
        weights = _weights(name, module)
        return ops[_activation(name, module, gates)](
            hidden_states.new_empty(hidden_states.shape),
            hidden_states,
            *weights,
            top_k_weights.float(),
            top_k_index.int(),
            *_biases(module),
        )

    interface.ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def convert_transposed_experts(model: torch.nn.Module) -> int:
    """Reorder in memory, once, the expert weights that a model stores transposed.

    gpt-oss stores `[E, H, 2F]` and `[E, F, H]`, of which the ops could only read columns. Each such
    weight is copied so that its transpose has contiguous rows, and keeps its shape, its values and
    its name: state dicts and the other implementations work as before. For the time of a copy the
    memory holds one weight twice. Call it after the model is loaded; moving or casting the model
    keeps the order, loading it again does not.

    Args:
        model: Any module. Nothing happens to weights that are stored as the ops read them.

    Returns:
        The number of weights that were reordered.
    """
    count = 0
    for module in model.modules():
        if not getattr(module, "is_transposed", False):
            continue
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name, None)
            if isinstance(weight, torch.nn.Parameter) and weight.ndim == 3:
                rows = weight.data.transpose(1, 2)
                if not rows.is_contiguous():
                    weight.data = rows.contiguous().transpose(1, 2)
                    count += 1
    return count


def _transformers() -> tuple[Any, _Gates]:
    """Return the module of the experts interface, and the gates that the ops have."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or tuple(map(int, found.split(".")[:2])) < _OLDEST:
        raise ImportError(
            f"register: Transformers must be installed, 5.8 or later, got {found}; "
            f"pip install 'transformers>=5.8'"
        )
    from transformers.integrations import moe
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return moe, (moe._default_apply_gate, GptOssExperts._apply_gate)


def _weights(name: str, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[E, 2F, H]`` and ``[E, H, F]``, the module's own memory."""
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        lack = "a gate, got none" if not getattr(module, "has_gate", True) else "no norm, got one"
        raise ValueError(f"{name}: experts of {_kind(module)} must have {lack}; {_ELSE}")
    w_gate_up, w_down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w_gate_up, w_down = w_gate_up.transpose(1, 2), w_down.transpose(1, 2)
        if w_gate_up.stride(2) != 1 or w_down.stride(2) != 1:
            raise ValueError(
                f"{name}: weights of {_kind(module)} must have contiguous rows when transposed, "
                f"got gate_up_proj with strides {module.gate_up_proj.stride()}; reorder them once: "
                f"tileops.integrations.transformers.convert_transposed_experts(model)"
            )
    return w_gate_up, w_down


def _biases(module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not module.has_bias:
        return None, None
    return module.gate_up_proj_bias, module.down_proj_bias


def _activation(name: str, module: Any, gates: _Gates) -> str:
    """Return the op's name of what the module computes between its two products."""
    usual, gpt_oss = gates
    gate = type(module)._apply_gate
    if gate is usual:
        activation = activation_of(module.act_fn)
        if activation is not None:
            return activation
        got = f"act_fn {_kind(module.act_fn)}"
    elif gate is gpt_oss:
        if (module.alpha, module.limit) == (1.702, 7.0):
            return "swigluoai"
        got = f"alpha {module.alpha} and limit {module.limit}"
    else:
        got = "a gate of its own"
    raise ValueError(
        f"{name}: {_kind(module)} must have silu, gelu (erf) or gpt-oss's activation with alpha "
        f"1.702 and limit 7, got {got}; {_ELSE}"
    )


def activation_of(function: Any) -> str | None:
    """Return the op's name of a model's activation of the gate, or None for one it lacks."""
    kind = _kind(function)
    if kind in ("SiLU", "SiLUActivation"):
        return "silu_and_mul"
    if kind == "GELUActivation" or (kind == "GELU" and function.approximate == "none"):
        return "gelu_and_mul"
    return None


def _kind(x: Any) -> str:
    return type(x).__name__
