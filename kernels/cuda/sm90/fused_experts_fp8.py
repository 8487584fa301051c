"""The routed FP8 experts on Hopper, without a copy of the tokens: as `fused_experts`, in FP8.

Tokens are quantised once, each with a scale for 128 columns. The first product gathers them, and
rounds what the activation gives to FP8 again, with such scales, where it has it in registers: the
activated rows exist as bytes only.
"""

import torch

from tileops.kernels.cuda.device import current, unfit, wrong_device
from tileops.kernels.cuda.place_routes import place_tiles
from tileops.kernels.cuda.post_permute import moe_post_permute_fwd
from tileops.kernels.cuda.quantize_fp8 import quantize_fp8_rowwise_fwd
from tileops.kernels.cuda.sm90.configs import pick_gemm_fp8
from tileops.kernels.cuda.sm90.multiply_tiles_fp8 import DEPTH, MAX_SPAN, multiply_tiles_fp8
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.grouped_gemm import ACTIVATIONS, gate_and_up
from tileops.moe.grouped_gemm_fp8 import gate_and_up_scales

LAYOUT = ContiguousLayoutSpec.tight_physical_psum()


def refuse(
    hidden_states,
    w_gate_up,
    w_gate_up_scale,
    w_down,
    w_down_scale,
    topk_weights,
    topk_ids,
    b_gate_up,
    b_down,
    routed_scaling_factor,
    activation,
    *,
    target,
    out,
) -> str | None:
    """Return why the kernels cannot serve a call, or None."""
    if (reason := wrong_device(hidden_states)) is not None:
        return reason
    if hidden_states.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16 tokens, got {hidden_states.dtype}"
    num_experts, hidden, ffn = w_down.shape
    if hidden % DEPTH or ffn % DEPTH or not (hidden and ffn and num_experts):
        return f"takes H and F that are multiples of {DEPTH} above 0, got {hidden} and {ffn}"
    if (hidden_states.shape[0] - 1) * hidden >= MAX_SPAN or topk_ids.numel() * ffn > MAX_SPAN:
        return (
            f"takes tokens, and routes times F, of less than 2**35 bytes in FP8, got "
            f"{tuple(hidden_states.shape)}, {topk_ids.numel()} routes and F = {ffn}"
        )
    gate, up = gate_and_up(w_gate_up, activation)
    tokens = {"hidden_states": hidden_states, "output": out}
    weights = {"gate rows of w_gate_up": gate, "up rows of w_gate_up": up, "w_down": w_down}
    return unfit(tokens) or unfit(weights, expanded=False)


def fused_moe_experts_fp8_fwd(
    hidden_states,
    w_gate_up,
    w_gate_up_scale,
    w_down,
    w_down_scale,
    topk_weights,
    topk_ids,
    b_gate_up,
    b_down,
    routed_scaling_factor,
    activation,
    *,
    target,
    out,
) -> None:
    """Write what the experts of each token add up to; see ``FusedMoEFP8FwdOp``."""
    num_experts, hidden, ffn = w_down.shape
    num_routes = topk_ids.numel()
    if out.numel() == 0:
        return
    if num_routes == 0:
        out.zero_()
        return
    tile = pick_gemm_fp8(num_routes, num_experts)
    gate, up = gate_and_up(w_gate_up, activation)
    gate_scale, up_scale = gate_and_up_scales(w_gate_up_scale, activation)
    biases = gate_and_up(b_gate_up, activation)
    act = w_down.new_empty(num_routes, ffn)
    act_scale = w_down_scale.new_empty(num_routes, ffn // DEPTH)
    down = hidden_states.new_empty(num_routes, hidden)
    with current(out.device):
        tokens, scale = quantize_fp8_rowwise_fwd(hidden_states[None], False, target=target)
        inverse, sources, tiles = place_tiles(topk_ids, num_experts, tile.block_m, even=False)
        multiply_tiles_fp8(
            *(tokens[0], scale[0], sources, gate, gate_scale, up, up_scale, *biases),
            *(ACTIVATIONS[activation], tiles, tile, act, act_scale),
            role="first",
        )
        multiply_tiles_fp8(
            *(act, act_scale, None, w_down, w_down_scale, None, None, b_down, None),
            *(None, tiles, tile, down),
            role="second",
        )
    combined = topk_weights, inverse, LAYOUT, routed_scaling_factor
    moe_post_permute_fwd(down, *combined, target=target, out=out)
