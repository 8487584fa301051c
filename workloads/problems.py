"""The problems of every op: functions that make them for a `Draw` of inputs.

`PROBLEMS` maps operators to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tileops import moe
from tileops.workloads.draw import TIGHT, Draw, Outputs
from tileops.workloads.problem import Problem
from tileops.workloads.problem import from_reference as _from_reference
from tileops.workloads.problem import size_of as _size
from tileops.workloads.problems_fp8 import PROBLEMS_FP8
from tileops.workloads.problems_layers import PROBLEMS_LAYERS

BLOCK_SIZE = 64


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
    ids, num_experts = draw.routes[1], draw.layer.local_experts
    slots = ids.numel() + (num_experts + 1) * (BLOCK_SIZE - 1)

    def any_order(outputs: Outputs) -> Outputs:
        """Sort the slots of each expert."""
        slot_ids, experts, used = outputs
        experts = torch.where((experts < 0) | (experts > num_experts), num_experts, experts)
        owners = experts.long().repeat_interleave(BLOCK_SIZE)[: slot_ids.numel()]
        return (owners * 2**32 + slot_ids).sort().values, experts, used

    yield _from_reference(
        partial(
            Problem,
            op="moe_permute_align_fwd",
            cls=moe.MoEPermuteAlignFwdOp,
            settings={"num_experts": num_experts, "block_size": BLOCK_SIZE},
            inputs={"topk_ids": ids},
            flops=0,
            num_bytes=_size(ids) + 4 * (slots + slots // BLOCK_SIZE),
            any_order=any_order,
        ),
        None,
    )


def _pre_permute(draw: Draw) -> Iterator[Problem]:
    hidden, ids = draw.tokens["hidden_states"], draw.routes[1]

    def any_order(outputs: Outputs) -> Outputs:
        """Give the row of each route, and whose rows they are among."""
        rows, ends, inverse = outputs
        places = inverse.flatten().long()
        owners = torch.searchsorted(ends, places.to(ends.dtype), right=True)
        used = places.clamp(min=-1).add(1).bincount(minlength=len(rows) + 1)
        found = rows[places.clamp(0, len(rows) - 1)]
        found[places < 0] = 0
        return found, ends, owners.where(places >= 0, -1), used

    yield _from_reference(
        partial(
            Problem,
            op="moe_pre_permute_fwd",
            cls=moe.MoEPrePermuteFwdOp,
            settings={"layout": TIGHT, "num_local_experts": draw.layer.local_experts},
            inputs={"hidden_states": hidden, "local_expert_ids": ids},
            flops=0,
            num_bytes=_size(hidden) * (1 + draw.layer.top_k) + 2 * _size(ids),
            any_order=any_order,
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
    **PROBLEMS_LAYERS,
    "shared_expert_mlp_fwd": _shared_expert,
    **PROBLEMS_FP8,
}
INDEX_OPS = ("fused_topk_fwd", "moe_permute_align_fwd")
