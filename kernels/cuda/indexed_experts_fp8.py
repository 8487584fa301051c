"""The FP8 experts of few routes: each expert's weights are read where they lie, and read once.

Four launches: the tokens are quantised, gate and up with the activation, down, and post-permute's
sum over each token's routes. Neither product waits for the launch before it until its first weights
are on their way.

The activated rows are kept in float32, and every warp of the down product quantises what it reads
of them. The tokens have a launch of their own: all warps of the gate and up product, which reads
twice the weights, would do that work again, and their division is to be exact.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda.activations import sigmoid
from tileops.kernels.cuda.device import current, dtype_name, jit, sm_count, unfit, wrong_device
from tileops.kernels.cuda.indexed_experts import CONFIG, MAX_WIDTH
from tileops.kernels.cuda.lines import LINES, read_of_line
from tileops.kernels.cuda.post_permute import moe_post_permute_fwd
from tileops.kernels.cuda.quantize_fp8 import CUDA, quantize_fp8_rowwise_fwd
from tileops.kernels.cuda.route_groups import ROUTES, WARP, WARPS

BLOCK = 128
"""Columns, and rows of weights, that share a scale."""
BLOCK_BITS = BLOCK.bit_length() - 1
WORDS = 4
"""32-bit words in the vector that a thread loads."""
VECTOR = 16
"""Columns of weights in that vector."""
STEP = 4 * VECTOR
"""Columns that the four threads of a weight row load side by side."""
STEPS = BLOCK // STEP
BLOCKS = 2
CHUNK = BLOCKS * BLOCK
"""Columns of a weight row that are in flight at once."""
HELD = STEPS * VECTOR
"""Columns of a block that a thread has."""
LARGEST = 448.0
"""The largest E4M3 number."""
FLOAT32_MAX = 3.4028234663852886e38


@T.macro
def find_group(ids, route, expert, num_routes, ballots, before: T.Ref, found: T.Ref, member: T.Ref):
    """Find how many routes before this one have its expert, and if it leads, which it leads.

    It leads a group if ``before`` is a multiple of ``ROUTES``. A warp looks at 32 ids, then all
    share what they saw. Lane i gets number i // 4 of the ``found`` routes as its ``member``, -1 if
    there are fewer.
    """
    first = T.alloc_var(T.int32)
    seen = T.alloc_var(T.int32)
    matches = T.alloc_var(T.int32)
    thread = T.get_thread_binding()
    top_k = ids.shape[1]
    first = 0
    before = 0
    found = 0
    member = -1
    while first < num_routes and found < ROUTES and (first <= route or before % ROUTES == 0):
        at = first + thread
        seen = -1
        if at < num_routes:
            seen = ids[T.truncdiv(at, top_k), T.truncmod(at, top_k)]
        ballot = T.Cast(T.int32, T.ballot(seen == expert))
        if thread % WARP == 0:
            ballots[thread // WARP] = ballot
        T.sync_threads()
        for w in T.unroll(WARPS):
            at = first + w * WARP
            matches = ballots[w]
            if at < route:
                earlier = T.Select(at + WARP <= route, -1, (1 << (route - at)) - 1)
                before = before + T.call_extern(T.int32, "__popc", matches & earlier)
                matches = matches & (earlier ^ -1)
            while matches != 0 and found < ROUTES:
                chosen = T.call_extern(T.int32, "__ffs", matches) - 1
                member = T.Select(thread % WARP // 4 == found, at + chosen, member)
                found = found + 1
                matches = matches & (matches - 1)
        T.sync_threads()
        first = first + WARPS * WARP


@T.macro
def load_weights(held, held_scale, weights, scales, expert, low, high, column, depth):
    """Load vectors of rows ``low`` and ``high`` with their scales; zeros past the last column."""
    for b in T.unroll(BLOCKS):
        for s in T.unroll(STEPS):
            at = column + b * BLOCK + s * STEP
            inside = at < depth
            read_of_line(held[b, s, 0, 0], weights[expert, low, at], inside)
            read_of_line(held[b, s, 1, 0], weights[expert, high, at], inside)
        at = T.min(column + b * BLOCK, depth - 1) >> BLOCK_BITS
        held_scale[b, 0] = scales[expert, low >> BLOCK_BITS, at]
        if held_scale.shape[1] == 2:
            held_scale[b, 1] = scales[expert, high >> BLOCK_BITS, at]


@T.macro
def quantize(wide, words, scale: T.Ref):
    """Quantise the columns that the four threads of a row have of a block.

    The largest finite magnitude sets the scale; ``T.max`` passes over NaN by itself.
    """
    largest = T.alloc_var(T.float32)
    inverse = T.alloc_var(T.float32)
    largest = 0
    for i in T.unroll(HELD):
        largest = T.max(largest, T.abs(wide[i]))
    if T.any_sync(T.Cast(T.int32, largest > FLOAT32_MAX)) != 0:
        largest = 0
        for i in T.unroll(HELD):
            size = T.abs(wide[i])
            largest = T.max(largest, T.Select(size <= FLOAT32_MAX, size, T.float32(0)))
    for apart in (1, 2):
        largest = T.max(largest, T.shfl_xor(largest, apart))
    scale = T.ieee_fdiv(largest, T.float32(LARGEST))
    scale = T.Select(scale == 0, T.float32(1), scale)
    inverse = T.min(T.ieee_frcp(scale), T.float32(FLOAT32_MAX))
    for w in T.unroll(HELD // 4):
        values = tuple(wide[4 * w + i] * inverse for i in range(4))
        words[0, w] = T.call_extern(T.uint32, "to_e4m3", *values)


@jit(pass_configs=CONFIG)
def build(out_dtype: str, gated: bool):
    """Build the kernel that multiplies rows by the weights of their routes' experts.

    A warp owns 16 rows of weights: 8 of gate and the 8 of up that belong to them, or 16 of down.
    ``2**split_bits`` warps share them, each with its part of the columns, and add up in their
    order. H and F are multiples of 128, so all rows of all warps exist.

    Of an FP8 ``mma`` the compiler makes float16 ones on Hopper, which has none: both operands are
    converted, which is exact, and sums are float32.

    T tokens, K routes a token, N routes, E experts with R rows of D columns of weights and S by B
    scales, ``out`` rows of W columns.

    Args:
        out_dtype: Type of ``out``: float32 if gated.
        gated: Whether ``rows`` are the quantised tokens with their ``row_scales``, multiplied by
            gate and up, and ``inverse`` is written: each route's own number, -1 if it is dropped.
            Otherwise there is a float32 row a route, quantised here and multiplied by down, and
            None is passed for ``row_scales``.
    """
    num_tokens, top_k, num_routes, num_experts = T.dynamic("T, K, N, E")
    num_rows, weight_rows, depth, width = T.dynamic("M, R, D, W")
    scale_rows, num_blocks = T.dynamic("S, B")
    expert_stride, weight_stride, id_stride = (
        T.dynamic(f"{name}_stride", T.int64) for name in ("expert", "weight", "id")
    )
    scale_strides = T.dynamic("scale_expert, scale_row, scale_block", T.int64)

    row_dtype = T.uint8 if gated else T.float32

    @T.prim_func
    def multiply_routes_fp8(
        rows: T.Tensor[(num_rows, depth), row_dtype],
        row_scales: T.Tensor[(num_rows, num_blocks), T.float32],
        weights: T.StridedTensor[
            (num_experts, weight_rows, depth), (expert_stride, weight_stride, 1), T.uint8
        ],
        scales: T.StridedTensor[(num_experts, scale_rows, num_blocks), scale_strides, T.float32],
        ids: T.StridedTensor[(num_tokens, top_k), (id_stride, 1), T.int32],
        inverse: T.Tensor[(num_routes,), T.int32],
        out: T.Tensor[(num_routes, width), out_dtype],
        blocks: T.int32,
        split_bits: T.int32,
    ):
        with T.Kernel(blocks, threads=WARPS * WARP, prelude=CUDA + LINES) as block:
            T.annotate_min_blocks_per_sm(3 if gated else 2)
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            owner = lane // 4
            quad = lane % 4
            partial = T.alloc_shared((WARPS, 4, WARP), T.float32)
            ballots = T.alloc_shared((WARPS,), T.int32)
            held = T.alloc_local((BLOCKS, STEPS, 2, WORDS), T.uint32)
            held_scale = T.alloc_local((BLOCKS, 2 if gated else 1), T.float32)
            operands = T.alloc_local((BLOCKS if gated else 1, STEPS * WORDS), T.uint32)
            row_scale = T.alloc_local((BLOCKS if gated else 1,), T.float32)
            tall = T.alloc_local((4,), T.uint32)
            narrow = T.alloc_local((2,), T.uint32)
            products = T.alloc_local((4,), T.float32)
            total = T.alloc_local((4,), T.float32)
            before = T.alloc_var(T.int32)
            found = T.alloc_var(T.int32)
            member = T.alloc_var(T.int32)
            part = T.alloc_var(T.int32)
            route = T.alloc_var(T.int32)
            low = T.alloc_var(T.int32)
            high = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            scale = T.alloc_var(T.float32)
            if not gated:
                wide_words = T.alloc_local((HELD,), T.uint32)
                wide = T.view(wide_words, (HELD,), T.float32)

            # Neighbouring blocks take the same rows of all experts, so that two groups of routes to
            # one expert read its weights at about the same time, the second one from L2.
            part = T.truncdiv(block, num_routes)
            route = block - part * num_routes
            # The ids are not from the launch before, which had waited for theirs before it let this
            # one start.
            expert = ids[T.truncdiv(route, top_k), T.truncmod(route, top_k)]
            dropped = T.Or(expert < 0, expert >= num_experts)
            find_group(ids, route, expert, num_routes, ballots, before, found, member)
            leads = T.And(T.Not(dropped), before % ROUTES == 0)

            tile = part * (WARPS >> split_bits) + (warp >> split_bits)
            split = warp & ((1 << split_bits) - 1)
            # In the gated product the second eight rows are those of up.
            low = tile * (8 if gated else 16) + owner
            high = low + (width if gated else 8)
            column = split * CHUNK + quad * VECTOR
            if leads:
                load_weights(held, held_scale, weights, scales, expert, low, high, column, depth)
            T.pdl_sync()
            T.pdl_trigger()
            if gated and part == 0 and thread == 0:
                inverse[route] = T.Select(dropped, -1, route)
            if leads:
                # What stands for absent routes is not stored: they repeat this one, for no traffic.
                row = T.Select(member >= 0, member, route)
                if gated:
                    row = T.truncdiv(row, top_k)
                for c in T.unroll(4):
                    total[c] = 0
                while column - quad * VECTOR < depth:
                    if gated:
                        for b in T.unroll(BLOCKS):
                            for s in T.unroll(STEPS):
                                at = column + b * BLOCK + s * STEP
                                operands[b, s * WORDS : (s + 1) * WORDS] = T.ldg128(
                                    rows[row, at], pred=at < depth
                                )
                            at = T.min(column + b * BLOCK, depth - 1) >> BLOCK_BITS
                            row_scale[b] = row_scales[row, at]
                    for b in T.unroll(BLOCKS):
                        if column - quad * VECTOR + b * BLOCK < depth:
                            if not gated:
                                for v in T.unroll(HELD // 4):
                                    at = column + b * BLOCK + v // 4 * STEP + v % 4 * 4
                                    wide_words[4 * v : 4 * v + 4] = T.ldg128(rows[row, at])
                                quantize(wide, operands, scale)
                                row_scale[0] = scale
                            for c in T.unroll(4):
                                products[c] = 0
                            # A thread's columns stand for any of the tile's: the sum is over all of
                            # them, and both operands are loaded alike.
                            for i in T.unroll(STEPS * WORDS // 2):
                                for w in T.unroll(4):
                                    tall[w] = held[b, i // 2, w % 2, i % 2 * 2 + w // 2]
                                for w in T.unroll(2):
                                    narrow[w] = operands[b if gated else 0, 2 * i + w]
                                T.ptx_mma(
                                    T.float32,
                                    "m16n8k32",
                                    "row",
                                    "col",
                                    "e4m3",
                                    "e4m3",
                                    "fp32",
                                    tall.data,
                                    0,
                                    narrow.data,
                                    0,
                                    products.data,
                                    0,
                                    T.bool(False),
                                )
                            # routes 2 * quad and 2 * quad + 1 by row low, then by row high
                            for c in T.unroll(2):
                                scale = T.shfl_sync(
                                    row_scale[b if gated else 0], (2 * quad + c) * 4
                                )
                                for h in T.unroll(2):
                                    both = scale * held_scale[b, h if gated else 0]
                                    total[2 * h + c] = total[2 * h + c] + products[2 * h + c] * both
                    column = column + (CHUNK << split_bits)
                    load_weights(
                        held, held_scale, weights, scales, expert, low, high, column, depth
                    )

                for c in T.unroll(4):
                    partial[warp, c, lane] = total[c]
                T.sync_threads()
                if split == 0:
                    for s in T.serial((1 << split_bits) - 1):
                        for c in T.unroll(4):
                            total[c] = total[c] + partial[warp + 1 + s, c, lane]
                    for c in T.unroll(2):
                        row = T.shfl_sync(member, (2 * quad + c) * 4)
                        if row >= 0:
                            if gated:
                                out[row, low] = total[c] * sigmoid(total[c]) * total[2 + c]
                            else:
                                out[row, low] = total[c]
                                out[row, high] = total[2 + c]

    return multiply_routes_fp8


def _grid(num_routes: int, width: int, depth: int, gated: bool, sms: int) -> tuple[int, int]:
    """Return how many thread blocks a product takes, and the power of two of warps that share rows.

    Each warp of these gets two chunks if possible, or one where the blocks are too few for two on
    each of ``sms`` multiprocessors.
    """
    most = WARPS.bit_length() - 1
    bits = min(max(depth // (2 * CHUNK), 1).bit_length() - 1, most)
    rows = (8 if gated else 16) * WARPS
    if (width // (rows >> bits)) * num_routes < 2 * sms and CHUNK << bits < depth:
        bits = min(bits + 1, most)
    return width // (rows >> bits) * num_routes, bits


def enough_routes(routes: int, hidden: int, ffn: int) -> bool:
    """Say whether `sm90.fused_experts_fp8` is faster: with jobs for most multiprocessors.

    Measured on an H200: it is slower with 48 blocks of 256 rows of weights, and faster with 96.
    """
    return routes * min(2 * ffn, hidden) >= 256 * 80


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
    num_routes = topk_ids.numel()
    if num_routes >= num_experts or enough_routes(num_routes, hidden, ffn):
        return f"leaves {num_routes} routes of {num_experts} experts to the form of more"
    if activation != "silu_and_mul":
        return f"takes the activation silu_and_mul, got {activation}"
    if b_gate_up is not None or b_down is not None:
        return "takes no biases, got some"
    if hidden % BLOCK or ffn % BLOCK or not (hidden and ffn):
        return f"takes H and F that are multiples of {BLOCK} above 0, got {hidden} and {ffn}"
    if max(hidden, ffn) > MAX_WIDTH:
        return f"takes H and F up to 2**20, got {hidden} and {ffn}"
    tensors = {
        "hidden_states": hidden_states,
        "w_gate_up": w_gate_up,
        "w_down": w_down,
        "output": out,
    }
    return unfit(tensors)


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
    _, hidden, ffn = w_down.shape
    num_routes = topk_ids.numel()
    if out.numel() == 0:
        return
    if num_routes == 0:
        out.zero_()
        return
    inverse = topk_ids.new_empty(num_routes)
    act = w_down_scale.new_empty(num_routes, ffn)
    down = hidden_states.new_empty(num_routes, hidden)
    sms = sm_count(out.device)
    with current(out.device):
        tokens, scale = quantize_fp8_rowwise_fwd(hidden_states[None], False, target=target)
        for rows, row_scale, weights, scales, written, gated in (
            (tokens[0].view(torch.uint8), scale[0], w_gate_up, w_gate_up_scale, act, True),
            (act, None, w_down, w_down_scale, down, False),
        ):
            grid = _grid(num_routes, written.shape[1], rows.shape[1], gated, sms)
            build(dtype_name(written), gated)(
                *(rows, row_scale, weights.view(torch.uint8), scales),
                *(topk_ids, inverse, written, *grid),
            )
    combined = topk_weights, inverse, None, routed_scaling_factor
    moe_post_permute_fwd(down, *combined, target=target, out=out)
