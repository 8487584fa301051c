"""The problems of every op: functions that make them for a `Draw` of inputs.

`PROBLEMS` maps operators to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tileops import moe
from tileops.moe.op import Op
from tileops.workloads.accuracy import computing_in
from tileops.workloads.draw import TIGHT, Draw, Outputs
from tileops.workloads.layer import eager_experts
from tileops.workloads.problem import Problem
from tileops.workloads.problem import from_reference as _from_reference
from tileops.workloads.problem import size_of as _size
from tileops.workloads.problems_fp8 import PROBLEMS_FP8
from tileops.workloads.quantized_layer import BITS, COLUMNS, MATRICES, Dequantized

BLOCK_SIZE = 64
INDEXED_ROUTES_PER_EXPERT = 2
"""Up to so many ``indexed_expert_mlp_fwd`` is run: the fused op leaves it at 1 at the latest."""
MAX_EXPERTS_HALF = 64
"""Logits of even spacing stay distinct in bfloat16 up to so many experts."""


def _topk(draw: Draw) -> Iterator[Problem]:
    if draw.layer.scoring_func == "sparse_mixer":
        return
    logits = draw.tokens["gating_output"]
    routes = draw.num_tokens * draw.layer.top_k
    yield _from_reference(
        partial(
            Problem,
            op="fused_topk_fwd",
            cls=moe.FusedTopKFwdOp,
            settings=draw.layer.routing_settings(),
            inputs={"gating_output": logits, "correction_bias": draw.bias},
            flops=0,
            num_bytes=_size(logits, draw.bias) + 8 * routes,
        ),
        None,
    )


def _permute_align(draw: Draw) -> Iterator[Problem]:
    ids = draw.routes[1]
    slots = ids.numel() + (draw.layer.local_experts + 1) * (BLOCK_SIZE - 1)
    yield _from_reference(
        partial(
            Problem,
            op="moe_permute_align_fwd",
            cls=moe.MoEPermuteAlignFwdOp,
            settings={"num_experts": draw.layer.local_experts, "block_size": BLOCK_SIZE},
            inputs={"topk_ids": ids},
            flops=0,
            num_bytes=_size(ids) + 4 * (slots + slots // BLOCK_SIZE),
        ),
        None,
    )


def _pre_permute(draw: Draw) -> Iterator[Problem]:
    hidden, ids = draw.tokens["hidden_states"], draw.routes[1]
    yield _from_reference(
        partial(
            Problem,
            op="moe_pre_permute_fwd",
            cls=moe.MoEPrePermuteFwdOp,
            settings={"layout": TIGHT, "num_local_experts": draw.layer.local_experts},
            inputs={"hidden_states": hidden, "local_expert_ids": ids},
            flops=0,
            num_bytes=_size(hidden) * (1 + draw.layer.top_k) + 2 * _size(ids),
            copies=True,
        ),
        None,
    )


def _post_permute(draw: Draw) -> Iterator[Problem]:
    rows, _, inverse = draw.rows
    hidden = draw.tokens["hidden_states"]
    read = draw.chosen.numel() * draw.layer.hidden_size * draw.dtype.itemsize
    yield _from_reference(
        partial(
            Problem,
            op="moe_post_permute_fwd",
            cls=moe.MoEPostPermuteFwdOp,
            settings={"layout": TIGHT},
            inputs={
                "expert_output": rows,
                "topk_weights": draw.routes[0],
                "inverse_indices": inverse,
            },
            flops=0,
            num_bytes=read + _size(hidden, draw.routes[0], inverse),
        ),
        draw.dtype,
        out_dtype=torch.float32,
    )


def _grouped_gemm(draw: Draw) -> Iterator[Problem]:
    layer, weights = draw.layer, draw.weights
    rows, ends, _ = draw.rows
    count, experts = draw.chosen.numel(), draw.num_chosen_experts

    def gemm(part, a, weight, bias, activation) -> Problem:
        columns, depth = weight.shape[1:]
        width = layer.ffn_size if activation else columns
        return _from_reference(
            partial(
                Problem,
                op="moe_grouped_gemm_fwd",
                part=part,
                cls=moe.MoEGroupedGemmFwdOp,
                settings={"layout": TIGHT, "activation": activation},
                inputs={"a": a, "b": weight, "layout_metadata": ends, "bias": bias},
                flops=2.0 * count * columns * depth,
                num_bytes=draw.dtype.itemsize
                * (count * (depth + width) + experts * columns * (depth + (bias is not None))),
                live=lambda outputs: (outputs[0][:count],),
            ),
            draw.dtype,
            out_dtype=torch.float32,
        )

    yield gemm("gate_up", rows, weights["w_gate_up"], weights["b_gate_up"], layer.activation)
    yield gemm("down", draw.inner_rows, weights["w_down"], weights["b_down"], None)


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
    per_expert = _size(*weights.values()) / layer.local_experts
    small = _size(*(x for name, x in inputs.items() if name not in ("output", "hidden_states")))
    plain = _plain(draw, weights)
    return Problem(
        op=op,
        cls=cls,
        settings=settings,
        inputs=inputs | weights,
        exact=lambda: plain(torch.float64),
        same_dtype=lambda: plain(draw.dtype),
        flops=2.0 * draw.chosen.numel() * matrix,
        num_bytes=2 * _size(hidden) + draw.num_chosen_experts * per_expert + small,
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
    few = draw.num_tokens * layer.top_k <= INDEXED_ROUTES_PER_EXPERT * layer.local_experts
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
    per_expert = _size(*packed.values()) / layer.local_experts
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
        num_bytes=2 * _size(hidden) + draw.num_chosen_experts * per_expert + _size(logits),
    )


def _shared_expert(draw: Draw) -> Iterator[Problem]:
    layer, size = draw.layer, draw.layer.shared_size
    if size is None:
        return
    hidden, (w_gate_up, w_down) = draw.tokens["hidden_states"], draw.shared_weights

    def plain(dtype: torch.dtype) -> Outputs:
        gate, up = (hidden.to(dtype) @ w_gate_up.to(dtype).T).chunk(2, -1)
        return ((torch.nn.functional.silu(gate) * up) @ w_down.to(dtype).T,)

    yield Problem(
        op="shared_expert_mlp_fwd",
        cls=moe.SharedExpertMLPFwdOp,
        settings={},
        inputs={"hidden_states": hidden, "w_gate_up": w_gate_up, "w_down": w_down},
        exact=lambda: plain(torch.float64),
        same_dtype=lambda: plain(draw.dtype),
        flops=6.0 * draw.num_tokens * size * layer.hidden_size,
        num_bytes=2 * _size(hidden) + _size(w_gate_up, w_down),
    )


PROBLEMS: dict[str, Callable[[Draw], Iterator[Problem]]] = {
    "fused_topk_fwd": _topk,
    "moe_permute_align_fwd": _permute_align,
    "moe_pre_permute_fwd": _pre_permute,
    "moe_post_permute_fwd": _post_permute,
    "moe_grouped_gemm_fwd": _grouped_gemm,
    "fused_moe_experts_fwd": _fused_experts,
    "indexed_expert_mlp_fwd": _indexed,
    "fused_moe_fwd": _fused_moe,
    "moe_fwd": _onnx_moe,
    "qmoe_fwd": _qmoe,
    "shared_expert_mlp_fwd": _shared_expert,
    **PROBLEMS_FP8,
}
INDEX_OPS = ("fused_topk_fwd", "moe_permute_align_fwd")
