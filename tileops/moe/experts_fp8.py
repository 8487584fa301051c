"""Routed experts with FP8 weights, and the shared expert's MLP with them."""

from __future__ import annotations

import torch

from tileops import check, repeat, targets
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.grouped_gemm_fp8 import check_scale, run_grouped_gemm_fp8

torch.library.define(
    "tileops::fused_moe_experts_fp8_fwd",
    "(Tensor hidden_states, Tensor? hidden_scale, Tensor w_gate_up, Tensor w_gate_up_scale,"
    " Tensor w_down, Tensor w_down_scale, Tensor topk_weights, Tensor topk_ids, Tensor? b_gate_up,"
    " Tensor? b_down, float routed_scaling_factor, str activation, ScalarType out_dtype,"
    " str? target) -> Tensor",
)
torch.library.define(
    "tileops::shared_expert_mlp_fp8_fwd",
    "(Tensor hidden_states, Tensor w_gate_up, Tensor w_gate_up_scale, Tensor w_down,"
    " Tensor w_down_scale, str? target) -> Tensor",
)


def check_fp8_weights(
    checker: check.Checker,
    w_gate_up: torch.Tensor,
    w_gate_up_scale: torch.Tensor,
    w_down: torch.Tensor,
    w_down_scale: torch.Tensor,
    *,
    expert: tuple[str, ...] = ("E",),
    width: str = "F",
    prefix: str = "",
) -> None:
    """Check FP8 weights and their scales against what the checker knows of E and H.

    A block must not hold gate rows and up rows of stacked halves: F, not 2F, is in whole blocks.
    """
    checker.tensor(f"{prefix}w_gate_up", w_gate_up, (*expert, f"2{width}", "H"), check.FP8)
    checker.in_blocks(f"{prefix}w_gate_up", w_gate_up, width, "H")
    scale_shape = *expert, f"2{width}/128", "H/128"
    check_scale(checker, f"{prefix}w_gate_up_scale", w_gate_up_scale, scale_shape)
    checker.tensor(f"{prefix}w_down", w_down, (*expert, "H", width), check.FP8)
    scale_shape = *expert, "H/128", f"{width}/128"
    check_scale(checker, f"{prefix}w_down_scale", w_down_scale, scale_shape)


@torch.library.impl("tileops::fused_moe_experts_fp8_fwd", "CompositeExplicitAutograd")
def _fused_moe_experts_fp8_fwd(hidden_states, hidden_scale, *args):
    *args, out_dtype, target = args
    out = torch.empty(hidden_states.shape, dtype=out_dtype, device=hidden_states.device)
    if hidden_scale is None:
        targets.run("fused_moe_experts_fp8_fwd", target, hidden_states, *args, out=out)
    else:
        _run(hidden_states, hidden_scale, *args, target=target, out=out)
    return out


@torch.library.register_fake("tileops::fused_moe_experts_fp8_fwd")
def _fused_moe_experts_fp8_fwd_fake(hidden_states, *args):
    return torch.empty(hidden_states.shape, dtype=args[-2], device=hidden_states.device)


def _run(
    hidden_states,
    hidden_scale,
    w_gate_up,
    w_gate_up_scale,
    w_down,
    w_down_scale,
    weights,
    ids,
    b_gate_up,
    b_down,
    scale,
    activation,
    *,
    target,
    out,
):
    """Permute and quantise, gate/up GEMM, quantise, down GEMM, combine.

    Tokens that come quantised are permuted with their scales.
    """
    layout = ContiguousLayoutSpec.tight_physical_psum()
    num_experts, _, ffn = w_down.shape

    def permute(x):
        return targets.run("moe_pre_permute_fwd", target, x, ids, layout, num_experts)

    def quantize(x):
        q, scales = targets.run("quantize_fp8_rowwise_fwd", target, x[None], False)
        return q[0], scales[0]

    rows, ends, inverse = permute(hidden_states)
    if hidden_scale is None:
        rows, row_scale = quantize(rows)
    else:
        row_scale = permute(hidden_scale)[0]
    act = torch.empty(rows.shape[0], ffn, dtype=torch.float32, device=rows.device)
    gate_up = rows, row_scale, w_gate_up, w_gate_up_scale, ends, b_gate_up, layout
    run_grouped_gemm_fp8(*gate_up, activation, target, act)
    down = torch.empty(rows.shape, dtype=out.dtype, device=rows.device)
    second = *quantize(act), w_down, w_down_scale, ends, b_down, layout
    run_grouped_gemm_fp8(*second, None, target, down)
    targets.run("moe_post_permute_fwd", target, down, weights, inverse, layout, scale, out=out)


def _staged(hidden_states, *args, target, out):
    _run(hidden_states, None, *args, target=target, out=out)


targets.register_staged(
    "fused_moe_experts_fp8_fwd",
    _staged,
    (
        "quantize_fp8_rowwise_fwd",
        "moe_pre_permute_fwd",
        "moe_grouped_gemm_fp8_fwd",
        "moe_post_permute_fwd",
    ),
)


@torch.library.impl("tileops::shared_expert_mlp_fp8_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _shared_expert_mlp_fp8_fwd(hidden_states, *args):
    *args, target = args
    out = hidden_states.new_empty(hidden_states.shape)
    targets.run("shared_expert_mlp_fp8_fwd", target, hidden_states, *args, out=out)
    return out


@torch.library.register_fake("tileops::shared_expert_mlp_fp8_fwd")
def _shared_expert_mlp_fp8_fwd_fake(hidden_states, *args):
    return hidden_states.new_empty(hidden_states.shape)


def _shared_staged(hidden_states, w_gate_up, w_gate_up_scale, w_down, w_down_scale, *, target, out):
    """Run two grouped GEMMs with one expert that has every row."""
    layout = ContiguousLayoutSpec.tight_physical_psum()
    num_tokens, device = hidden_states.shape[0], hidden_states.device
    end = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
    act = torch.empty(num_tokens, w_down.shape[1], dtype=torch.float32, device=device)

    def multiply(x, weight, weight_scale, activation, result):
        q, scale = targets.run("quantize_fp8_rowwise_fwd", target, x[None], False)
        operands = q[0], scale[0], weight[None], weight_scale[None], end, None, layout
        run_grouped_gemm_fp8(*operands, activation, target, result)

    multiply(hidden_states, w_gate_up, w_gate_up_scale, "silu_and_mul", act)
    multiply(act, w_down, w_down_scale, None, out)


targets.register_staged(
    "shared_expert_mlp_fp8_fwd",
    _shared_staged,
    ("quantize_fp8_rowwise_fwd", "moe_grouped_gemm_fp8_fwd"),
)
