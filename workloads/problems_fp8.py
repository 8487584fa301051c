"""The problems of the ops with FP8 operands, on layers whose H and F are multiples of 128."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tileops import moe
from tileops.layouts import MaskedLayoutSpec, MGroupedLayoutSpec
from tileops.moe.grouped_gemm_fp8 import run_grouped_gemm_fp8
from tileops.workloads.accuracy import computing_in
from tileops.workloads.draw import TIGHT, Draw, Outputs
from tileops.workloads.fp8_layer import Dequantised
from tileops.workloads.layer import eager_experts
from tileops.workloads.problem import Problem, from_reference, size_of

FULL_SLAB = 8
"""From so many rows an expert on there are problems of slabs, all full and so read every weight."""


def _has_fp8(draw: Draw) -> bool:
    """Say whether the layer is in whole blocks; its other values are then bfloat16."""
    whole = draw.layer.hidden_size % 128 == draw.layer.ffn_size % 128 == 0
    return whole and draw.dtype == torch.bfloat16


def _quantisation(op: str, function: Callable[..., Any], name: str, x: torch.Tensor) -> Problem:
    return from_reference(
        partial(
            Problem,
            op=op,
            cls=partial(partial, function),
            settings={},
            inputs={name: x},
            flops=0,
            num_bytes=size_of(x) + x.numel(),
            live=lambda outputs: (outputs[0].view(torch.uint8), outputs[1]),
            copies=True,
        ),
        None,
    )


def _quantize_rowwise(draw: Draw) -> Iterator[Problem]:
    if _has_fp8(draw):
        x = draw.tokens["hidden_states"]
        yield _quantisation("quantize_fp8_rowwise_fwd", moe.quantize_fp8_rowwise, "x", x)


def _quantize_blockwise(draw: Draw) -> Iterator[Problem]:
    """Make the problem of one expert's down weights, which are quantised one after the other."""
    if _has_fp8(draw) and draw.chosen.numel():
        w = draw.weights["w_down"][int(draw.chosen[0])]  # type: ignore[index]
        yield _quantisation("quantize_fp8_blockwise_fwd", moe.quantize_fp8_blockwise, "w", w)


def _gemm(
    part: str,
    layout: MGroupedLayoutSpec,
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    metadata: torch.Tensor,
    num_rows: int,
    num_experts: int,
) -> Problem:
    """Make the problem of ``num_rows`` rows of so many experts, the first ones if not a slab."""
    columns, depth = b[0].shape[1:]
    masked = isinstance(layout, MaskedLayoutSpec)

    def computed(compute: torch.dtype, dtype: torch.dtype) -> Outputs:
        out = torch.empty(*a[0].shape[:-1], columns, dtype=dtype, device=metadata.device)
        with computing_in(compute):
            args = *a, *b, metadata, None, layout, None
            run_grouped_gemm_fp8(*args, "reference", out)
        return (out,)

    per_row = depth + depth // 128 * 4 + 2 * columns
    return Problem(
        op="moe_grouped_gemm_fp8_fwd",
        part=part,
        cls=moe.MoEGroupedGemmFP8FwdOp,
        settings={"layout": layout},
        inputs=dict(a=a[0], a_scale=a[1], b=b[0], b_scale=b[1], layout_metadata=metadata),
        exact=lambda: computed(torch.float64, torch.float64),
        same_dtype=lambda: computed(torch.float32, torch.bfloat16),
        flops=2.0 * num_rows * columns * depth,
        num_bytes=num_rows * per_row + num_experts * columns * depth * (1 + 4 / 128**2),
        live=lambda outputs: outputs if masked else (outputs[0][:num_rows],),
        fp8=True,
    )


def _matrices(fp8: dict[str, torch.Tensor]) -> list[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    parts = {"gate_up": "w_gate_up", "down": "w_down"}
    return [(part, (fp8[name], fp8[f"{name}_scale"])) for part, name in parts.items()]


def _grouped_gemm(draw: Draw) -> Iterator[Problem]:
    if not _has_fp8(draw):
        return
    rows, ends, _ = draw.rows
    sizes = draw.chosen.numel(), draw.num_chosen_experts
    for (part, b), x in zip(_matrices(draw.fp8), (rows, draw.inner_rows), strict=True):
        yield _gemm(part, TIGHT, draw.quantised(x), b, ends, *sizes)
    routes = draw.num_tokens * draw.layer.top_k
    if draw.routing != "uniform" or routes < FULL_SLAB * draw.layer.num_experts:
        return
    for part, b in _matrices(draw.fp8_of_all):
        slab = draw.slab(b[0].shape[2])
        num_experts, height, _ = slab.shape
        counts = torch.full((num_experts,), height, dtype=torch.int32, device=slab.device)
        layout = MaskedLayoutSpec(height)
        sizes = num_experts * height, num_experts
        yield _gemm(f"{part} masked", layout, draw.quantised(slab), b, counts, *sizes)


def _fused_moe(draw: Draw) -> Iterator[Problem]:
    """Make the problem whose exact result is that of unquantised activations."""
    layer = draw.layer
    every = layer.local_experts == layer.num_experts
    if not (_has_fp8(draw) and every and layer.scoring_func != "sparse_mixer"):
        return
    fp8, biases = draw.fp8, {name: draw.weights[name] for name in ("b_gate_up", "b_down")}
    inputs = {**draw.tokens, "correction_bias": draw.bias, **fp8, **biases}
    settings, hidden = layer.settings(), draw.tokens["hidden_states"]

    def exact() -> Outputs:
        with computing_in(torch.float64):
            scores = draw.route()[0]
        matrices: Any = [Dequantised(fp8, name) for name in ("w_gate_up", "w_down")]
        routes = scores, draw.routes[1], layer.activation
        return (eager_experts(hidden, *matrices, *routes, **biases, dtype=torch.float64),)

    def same() -> Outputs:
        return (moe.FusedMoEFP8FwdOp(**settings, target="reference")(**inputs),)

    per_expert = size_of(*fp8.values(), *biases.values()) / layer.local_experts
    yield Problem(
        op="fused_moe_fp8_fwd",
        cls=moe.FusedMoEFP8FwdOp,
        settings=settings,
        inputs=inputs,
        exact=exact,
        same_dtype=same,
        flops=6.0 * draw.chosen.numel() * layer.ffn_size * layer.hidden_size,
        num_bytes=2 * size_of(hidden)
        + draw.num_chosen_experts * per_expert
        + size_of(draw.tokens["gating_output"], draw.bias),
        fp8=True,
    )


PROBLEMS_FP8: dict[str, Callable[[Draw], Iterator[Problem]]] = {
    "quantize_fp8_rowwise_fwd": _quantize_rowwise,
    "quantize_fp8_blockwise_fwd": _quantize_blockwise,
    "moe_grouped_gemm_fp8_fwd": _grouped_gemm,
    "fused_moe_fp8_fwd": _fused_moe,
}
