"""The routed experts on Hopper, without a copy of the tokens.

Routes are placed among those of their expert, the same launch lists tiles of their rows, and both
products take the list. The first gathers its rows: it loads each from the token it belongs to. The
second starts while the last tiles of the first are at work, and the rows of a token are added up as
the post-permute op does.

Two results are allocated, the activated rows ``[T * K, F]`` and those of down ``[T * K, H]``, and
index lists of an int32 or so a route: no ``[T * K, H]`` copy of the tokens, and no ``[T * K, 2F]``
products of gate and up.
"""

import torch

from tileops.kernels.cuda.device import current, unfit, wrong_device
from tileops.kernels.cuda.place_routes import place_tiles
from tileops.kernels.cuda.post_permute import moe_post_permute_fwd
from tileops.kernels.cuda.sm90.configs import pick_gemm
from tileops.kernels.cuda.sm90.multiply_tiles import MAX_SPAN, multiply_tiles
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.experts import few_routes
from tileops.moe.grouped_gemm import ACTIVATIONS, gate_and_up

LAYOUT = ContiguousLayoutSpec.tight_physical_psum()
INDEXED_ROUTES = 96
"""Most routes that are left to the indexed form: it is the faster one with 64, not with 128."""
INDEXED_BYTES = 3e9
"""Most bytes of weights of so many experts as there are routes, in that form: it takes less time
before and after, but reads more slowly."""


def indexed_is_faster(w_gate_up, w_down, topk_ids) -> bool:
    """Say whether the indexed form takes less time for a call that it can serve."""
    num_routes, size = topk_ids.numel(), w_down.element_size()
    of_expert = size * (w_gate_up.shape[1:].numel() + w_down.shape[1:].numel())
    return num_routes <= INDEXED_ROUTES and num_routes * of_expert <= INDEXED_BYTES


def refuse(
    hidden_states,
    w_gate_up,
    w_down,
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
        return f"takes bfloat16 and float16, got {hidden_states.dtype}"
    num_experts, hidden, ffn = w_down.shape
    if hidden % 8 or ffn % 8 or not (hidden and ffn and num_experts):
        return f"takes H and F that are multiples of 8 (16 bytes) above 0, got {hidden} and {ffn}"
    if few_routes(w_down, topk_ids) and indexed_is_faster(w_gate_up, w_down, topk_ids):
        return (
            f"leaves {topk_ids.numel()} routes of {num_experts} experts to indexed_expert_mlp_fwd"
        )
    if (hidden_states.shape[0] - 1) * hidden_states.stride(0) >= MAX_SPAN:
        return f"takes tokens that span less than 2**34 elements, got {hidden_states.stride()}"
    if topk_ids.numel() * ffn > MAX_SPAN:
        return f"takes routes times F up to 2**34, got {topk_ids.numel()} times {ffn}"
    gate, up = gate_and_up(w_gate_up, activation)
    tokens = {"hidden_states": hidden_states, "output": out}
    weights = {"gate rows of w_gate_up": gate, "up rows of w_gate_up": up, "w_down": w_down}
    return unfit(tokens) or unfit(weights, expanded=False)


def fused_moe_experts_fwd(
    hidden_states,
    w_gate_up,
    w_down,
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
    """Write what the experts of each token add up to; see ``FusedMoEExpertsFwdOp``."""
    num_experts, hidden, ffn = w_down.shape
    num_routes = topk_ids.numel()
    if out.numel() == 0:
        return
    if num_routes == 0:
        out.zero_()
        return
    tile = pick_gemm(num_routes, num_experts)
    gate, up = gate_and_up(w_gate_up, activation)
    biases = gate_and_up(b_gate_up, activation)
    act = hidden_states.new_empty(num_routes, ffn)
    down = hidden_states.new_empty(num_routes, hidden)
    with current(out.device):
        inverse, sources, tiles = place_tiles(topk_ids, num_experts, tile.block_m)
        formula = ACTIVATIONS[activation]
        multiply_tiles(
            hidden_states, sources, gate, up, *biases, formula, tiles, tile, act, "first"
        )
        multiply_tiles(act, None, w_down, None, b_down, None, None, tiles, tile, down, "second")
    combined = topk_weights, inverse, LAYOUT, routed_scaling_factor
    moe_post_permute_fwd(down, *combined, target=target, out=out)
