"""ONNX models on the ops: implementations for the reference evaluator of the package `onnx`.

`reference_ops` has them. They serve `MoE`, `QMoE`, `SwiGLU` and `MoERouter` of the domain
`com.microsoft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tileops import moe, targets
from tileops.integrations.onnx_values import (
    must_be,
    only,
    read_dtype,
    read_flag,
    read_float,
    read_int,
    read_str,
    to_numpy,
    to_torch,
)
from tileops.moe.op import Op

if TYPE_CHECKING:
    import numpy as np
    from onnx.reference.op_run import OpRun

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class _Node:
    """How a node becomes a call of an op.

    Attributes:
        name: Its type.
        cls: Class of the op.
        inputs: For each input the argument that it is; None for one that is not served.
        given: Arguments that may not be left out.
        settings: For each attribute the setting that it is, and how its value is read.
        checked: For each other attribute a check of its value.
        equal: For each attribute whose value must be that of a setting, the setting.
        required: Attributes without a default.
    """

    name: str
    cls: Callable[..., Op]
    inputs: tuple[str | None, ...]
    given: tuple[str, ...]
    settings: dict[str, tuple[str, Callable[[Any], Any]]]
    checked: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    equal: dict[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def op(self, attributes: dict[str, Any], target: str | None) -> Op:
        """Return the op for a node's attributes; raise ValueError for those that it lacks."""
        found = {}
        for name, value in attributes.items():
            try:
                if name in self.settings:
                    setting, read = self.settings[name]
                    found[setting] = read(value)
                elif name in self.checked:
                    self.checked[name](value)
                elif name in self.equal:
                    read_int(value)
                else:
                    served = [*self.settings, *self.checked, *self.equal]
                    raise ValueError(f"is not served; these are: {served}")
            except ValueError as error:
                raise ValueError(f"{self.title}: attribute {name} {error}") from None
        for name in self.required:
            if name not in attributes:
                raise ValueError(f"{self.title}: attribute {name} must be given")
        op = self.cls(**found, target=target)
        for name, setting in self.equal.items():
            want = getattr(op, setting)
            if attributes.get(name, want) != want:
                raise ValueError(
                    f"{self.title}: attribute {name} must be {setting}, {want}, "
                    f"got {attributes[name]}"
                )
        return op

    @property
    def title(self) -> str:
        """The type and the domain, for messages."""
        return f"{self.name} of {MICROSOFT}"

    def arguments(
        self, inputs: tuple[np.ndarray | None, ...], device: torch.device
    ) -> dict[str, torch.Tensor | None]:
        """Return the op's arguments by their names, None for what is left out."""
        if len(inputs) > len(self.inputs):
            raise ValueError(f"{self.title}: takes {len(self.inputs)} inputs, got {len(inputs)}")
        found: dict[str, torch.Tensor | None] = {name: None for name in self.inputs if name}
        for number, (name, value) in enumerate(zip(self.inputs, inputs, strict=False)):
            if value is None:
                continue
            if name is None:
                raise ValueError(f"{self.title}: input {number} is not served: leave it out")
            found[name] = to_torch(value, device)
        for number, name in enumerate(self.inputs):
            if name in self.given and found[name] is None:
                raise ValueError(f"{self.title}: input {number} ({name}) must be given")
        return found


def _read(read: Callable[[Any], Any], *names: str) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Return the settings that are attributes of the same name."""
    return {name: (name, read) for name in names}


_MOE_SETTINGS = {
    **_read(read_int, "k", "swiglu_fusion"),
    **_read(read_str, "activation_type"),
    **_read(read_float, "swiglu_limit", "activation_alpha", "activation_beta"),
    **_read(read_flag, "normalize_routing_weights", "use_sparse_mixer"),
}
_FC3 = (None, None, None)
_NODES = (
    _Node(
        "MoE",
        moe.MoEFwdOp,
        ("input", "router_probs")
        + ("fc1_experts_weights", "fc1_experts_bias", "fc2_experts_weights", "fc2_experts_bias")
        + ("fc3_experts_weights", "fc3_experts_bias"),
        ("input", "router_probs", "fc1_experts_weights", "fc2_experts_weights"),
        _MOE_SETTINGS,
        {"swiglu_limit_after_activation": only(0)},
    ),
    _Node(
        "QMoE",
        moe.QMoEFwdOp,
        ("input", "router_probs", "fc1_experts_weights", "fc1_scales", "fc1_experts_bias")
        + ("fc2_experts_weights", "fc2_scales", "fc2_experts_bias", *_FC3)
        + ("fc1_zero_points", "fc2_zero_points", None, "router_weights")
        + (None,) * 6,
        ("input", "router_probs", "fc1_experts_weights", "fc1_scales")
        + ("fc2_experts_weights", "fc2_scales"),
        _MOE_SETTINGS
        | _read(read_int, "expert_weight_bits")
        | {"block_size": ("block_size", lambda value: read_int(value) or None)},
        {
            "swiglu_limit_after_activation": only(0),
            "quant_type": only("int"),
            # what the kernel for CPUs takes these for; other providers pack -1 in their own way
            "weights_prepacked": only(0, -1),
            # a lower bound
            "accuracy_level": partial(must_be, "INT"),
        },
        # also of FC3, which is not served, as exporters write the three together
        {f"fc{number}_expert_weight_bits": "expert_weight_bits" for number in (1, 2, 3)},
    ),
    _Node(
        "SwiGLU",
        moe.SwiGLUFwdOp,
        ("gate", "up"),
        ("gate",),
        _read(read_float, "limit", "activation_alpha", "activation_beta"),
        {"round_activation": only(0)},
    ),
    _Node(
        "MoERouter",
        moe.MoERouterFwdOp,
        ("scores", "bias", "expert_ids"),
        ("scores",),
        _read(read_int, "local_expert_count", "topk", "local_expert_start")
        | _read(read_str, "scoring", "selection")
        | _read(read_float, "route_scale")
        | _read(read_dtype, "dtype"),
        required=("local_expert_count",),
    ),
)


def reference_ops(
    target: str | None = None, device: torch.device | str = "cpu"
) -> list[type[OpRun]]:
    """Return what `onnx.reference.ReferenceEvaluator` takes as `new_ops`.

    Attributes and inputs are those of ONNX Runtime's operators, and their defaults too. One that no
    op has, such as `swiglu_limit_after_activation=1` or the FC3 of `QMoE`, is an error when the
    evaluator is made or run. Weights of `QMoE` are in the plain layout, `weights_prepacked=0`; -1,
    the default there, is taken for it, as ONNX Runtime does on CPUs. `block_size=0` gives whole
    rows a scale. `fc1_expert_weight_bits` and its like must be `expert_weight_bits`.
    `accuracy_level` asks for a least accuracy, which any value gets.

    Arrays are float32, float16, or bfloat16 of `ml_dtypes`.

    Args:
        target: Name of the target that serves the ops, or None to decide from the device.
        device: Where they run. Arrays are copied there and back unless it is the CPU.

    Raises:
        ImportError: If the package `onnx` is not installed.
        ValueError: If no target has that name.

    Examples:
        >>> from onnx import parser
        >>> from onnx.reference import ReferenceEvaluator
        >>> model = parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["com.microsoft": 1]>
        ...     g (float[2, 8] x) => (float[2, 4] y) { y = com.microsoft.SwiGLU <limit = 7.0> (x) }
        ... ''')
        >>> evaluator = ReferenceEvaluator(model, new_ops=reference_ops())
        >>> evaluator.run(None, {"x": torch.ones(2, 8).numpy()})[0].shape
        (2, 4)
    """
    try:
        from onnx.reference.op_run import OpRun
    except ImportError as error:
        raise ImportError(
            "tileops.integrations.onnx needs the package onnx: pip install 'tileops[onnx]'"
        ) from error
    target, where = targets.target_argument("reference_ops", target), torch.device(device)

    def made(node: _Node) -> type[OpRun]:
        class Run(OpRun):
            op_domain = MICROSOFT
            op_schema = None  # or that of ONNX's own operator of the name would fill attributes in

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if not self.has_linked_attribute:  # then the values come with the call
                    node.op({name: getattr(self, name) for name in self.attributes_names_}, target)

            def _run(self, *inputs: np.ndarray | None, **attributes: Any):  # type: ignore[override]
                result = node.op(attributes, target)(**node.arguments(inputs, where))
                results = result if isinstance(result, tuple) else (result,)
                return tuple(map(to_numpy, results))

        Run.__name__ = Run.__qualname__ = node.name
        return Run

    return list(map(made, _NODES))
