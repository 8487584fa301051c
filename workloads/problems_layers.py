"""The problems of the ops that run all experts of a layer, alone or with its routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tileops import moe
from tileops.moe.experts import FEW_ROUTES_PER_EXPERT
from tileops.moe.op import Op
from tileops.workloads.accuracy import computing_in
from tileops.workloads.draw import Draw, Outputs
from tileops.workloads.layer import eager_experts
from tileops.workloads.problem import Problem, size_of
from tileops.workloads.quantized_layer import BITS, COLUMNS, MATRICES, Dequantized

MAX_EXPERTS_HALF = 64
"""Logits of even spacing stay distinct in bfloat16 up to so many experts."""


def _plain(draw: Draw, weights: dict[str, Any]) -> Callable[[torch.dtype], Outputs]:
    """Return a function that routes and runs all experts in plain torch and in a dtype."""

    def plain(dtype: torch.dtype) -> Outputs:
        with computing_in(torch.promote_types(dtype, torch.float32)):
            scores, ids = draw.route()[0], draw.routes[1]
        args = dict(topk_weights=scores, topk_ids=ids, activation=draw.layer.activation, **weights)
        return (eager_experts(draw.tokens["hidden_states"], **args, dtype=dtype),)

    return plain


def _experts(
    draw: Draw, op: str, cls: type[Op], settings: dict, inputs: dict, biases: bool = True
) -> Problem:
    """Make the problem of an op that runs all of a layer's experts."""
    layer, names = draw.layer, ["w_gate_up", "w_down"]
    if biases:
        names += ["b_gate_up", "b_down"]
    weights = {name: draw.weights[name] for name in names}
    hidden = draw.tokens["hidden_states"]
    matrix = 3 * layer.ffn_size * layer.hidden_size
    per_expert = size_of(*weights.values()) / layer.local_experts
    small = size_of(*(x for name, x in inputs.items() if name not in ("output", "hidden_states")))
    plain = _plain(draw, weights)
    return Problem(
        op=op,
        cls=cls,
        settings=settings,
        inputs=inputs | weights,
        exact=lambda: plain(torch.float64),
        same_dtype=lambda: plain(draw.dtype),
        flops=2.0 * draw.chosen.numel() * matrix,
        num_bytes=2 * size_of(hidden) + draw.num_chosen_experts * per_expert + small,
    )


def _given_routes(draw: Draw) -> dict[str, torch.Tensor]:
    return {
        "output": draw.output,
        "hidden_states": draw.tokens["hidden_states"],
        "topk_weights": draw.routes[0],
        "topk_ids": draw.routes[1],
    }


def _fused_experts(draw: Draw) -> Iterator[Problem]:
    settings = {"activation": draw.layer.activation}
    cls, inputs = moe.FusedMoEExpertsFwdOp, _given_routes(draw)
    yield _experts(draw, "fused_moe_experts_fwd", cls, settings, inputs)


def _indexed(draw: Draw) -> Iterator[Problem]:
    layer = draw.layer
    few = draw.num_tokens * layer.top_k <= FEW_ROUTES_PER_EXPERT * layer.local_experts
    if few and layer.activation == "silu_and_mul" and not layer.expert_bias:
        cls, inputs = moe.IndexedExpertMLPFwdOp, _given_routes(draw)
        yield _experts(draw, "indexed_expert_mlp_fwd", cls, {}, inputs, biases=False)


def _fused_moe(draw: Draw) -> Iterator[Problem]:
    layer = draw.layer
    if layer.local_experts == layer.num_experts and layer.scoring_func != "sparse_mixer":
        inputs = {**draw.tokens, "correction_bias": draw.bias}
        yield _experts(draw, "fused_moe_fwd", moe.FusedMoEFwdOp, layer.settings(), inputs)


def _onnx_layer(draw: Draw) -> tuple[Draw, dict[str, Any]] | None:
    """Return the draw with logits in the tokens' dtype and the routing of ONNX Runtime's operators.

    None for a layer that they do not have.
    """
    layer = draw.layer
    if (
        layer.num_experts > MAX_EXPERTS_HALF
        or layer.scoring_func == "sigmoid"
        or layer.activation != "silu_and_mul"
        or layer.expert_bias
        or layer.local_experts != layer.num_experts
        or layer.num_expert_group > 1
        or layer.routed_scaling_factor != 1
    ):
        return None
    tokens = draw.tokens
    rounded = Draw(layer, draw.num_tokens, draw.dtype, draw.device)
    rounded.tokens = {**tokens, "gating_output": tokens["gating_output"].to(draw.dtype)}
    settings = {
        "k": layer.top_k,
        "normalize_routing_weights": layer.renormalize,
        "use_sparse_mixer": layer.scoring_func == "sparse_mixer",
    }
    return rounded, settings


def _onnx_moe(draw: Draw) -> Iterator[Problem]:
    if (found := _onnx_layer(draw)) is None:
        return
    rounded, settings = found
    rounded.weights = draw.weights
    gate, up = draw.weights["w_gate_up"].chunk(2, 1)  # type: ignore[union-attr]
    inputs = {
        "input": rounded.tokens["hidden_states"],
        "router_probs": rounded.tokens["gating_output"],
        "fc1_experts_weights": gate,
        "fc1_experts_bias": None,
        "fc2_experts_weights": draw.weights["w_down"],
        "fc3_experts_weights": up,
    }
    settings = {**settings, "activation_type": "silu"}
    made = _experts(rounded, "moe_fwd", moe.MoEFwdOp, settings, {}, biases=False)
    yield replace(made, inputs=inputs)


def _qmoe(draw: Draw) -> Iterator[Problem]:
    """Make the problem whose exact result is that of the dequantised weights."""
    found, odd = _onnx_layer(draw), draw.layer.ffn_size % 2 or draw.layer.hidden_size % 2
    if found is None or odd:
        return
    (rounded, settings), layer, packed = found, draw.layer, draw.quantized
    plain = _plain(rounded, {m: Dequantized(packed, name) for name, m in MATRICES.items()})
    hidden, logits = rounded.tokens["hidden_states"], rounded.tokens["gating_output"]
    per_expert = size_of(*packed.values()) / layer.local_experts
    yield Problem(
        op="qmoe_fwd",
        cls=moe.QMoEFwdOp,
        settings={
            **settings,
            "expert_weight_bits": BITS,
            "block_size": COLUMNS,
            "activation_type": "swiglu",
            "swiglu_fusion": 2,
        },
        inputs={"input": hidden, "router_probs": logits, "fc1_experts_bias": None, **packed},
        exact=lambda: plain(torch.float64),
        same_dtype=lambda: plain(draw.dtype),
        flops=6.0 * draw.chosen.numel() * layer.ffn_size * layer.hidden_size,
        num_bytes=2 * size_of(hidden) + draw.num_chosen_experts * per_expert + size_of(logits),
    )


PROBLEMS_LAYERS: dict[str, Callable[[Draw], Iterator[Problem]]] = {
    "fused_moe_experts_fwd": _fused_experts,
    "indexed_expert_mlp_fwd": _indexed,
    "fused_moe_fwd": _fused_moe,
    "moe_fwd": _onnx_moe,
    "qmoe_fwd": _qmoe,
}
