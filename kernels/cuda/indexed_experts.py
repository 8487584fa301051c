"""The expert MLP of few routes: each expert's weights are read where they lie, and read once.

Three launches: gate and up with the activation, down, and post-permute's sum over each token's
routes. In the first two, which `build` makes, a thread block takes one route and some rows of its
expert's weights. Routes of one expert are multiplied eight at a time by the block of the first of
the eight; the blocks of the others leave. Tensor cores take the weights as the tall operand and the
eight routes as the narrow one, so what a warp loads goes into them as it comes, without a detour
through shared memory, and the loads alone set the pace.
"""

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.activations import sigmoid
from tileops.kernels.cuda.device import UNCHECKED, current, dtype_name, jit, unfit, wrong_device
from tileops.kernels.cuda.post_permute import moe_post_permute_fwd

WARP = 32
WARPS = 8
ROUTES = 8
"""Routes of one expert that are multiplied together: the narrow side of the tensor core's tile."""
WORDS = 4
"""32-bit words in the vector that a thread loads."""
VECTOR = 8
"""Columns in that vector."""
STEP = 4 * VECTOR
"""Columns that the four threads of a weight row load side by side."""
STEPS = 4
CHUNK = STEPS * STEP
"""Columns of a weight row that are in flight at once."""
RESIDENT = 3
"""Thread blocks that an SM holds at once: enough loads in flight while some start or finish."""
MAX_ROUTES = 8192
"""Routes beyond which looking through all of them in every block costs more than grouping them."""
MAX_WIDTH = 2**20
"""Largest H and F: the number of thread blocks stays an int32."""

# Barriers are placed by hand: two around each look at the ids, one before the sums are shared.
CONFIG = {**UNCHECKED, tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


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
def load_weights(held, weights, expert, low, high, column, bound_low, bound_high, depth):
    """Load ``STEPS`` vectors of rows ``low`` and ``high``; zeros where there is no such element."""
    for s in T.unroll(STEPS):
        at = column + s * STEP
        held[s, 0, 0:WORDS] = T.ldg128(
            weights[expert, low, at], pred=T.And(low < bound_low, at < depth)
        )
        held[s, 1, 0:WORDS] = T.ldg128(
            weights[expert, high, at], pred=T.And(high < bound_high, at < depth)
        )


@jit(pass_configs=CONFIG)
def build(dtype: str, gated: bool):
    """Build the kernel that multiplies rows by the weights of their routes' experts.

    A warp owns 16 rows of weights: 8 of gate and the 8 of up that belong to them, or 16 of down.
    ``2**split_bits`` warps share them, each with its part of the columns, and add up in their
    order. The kernel of the down product starts while the other one drains, and loads its first
    weights before it waits for the activated rows.

    T tokens, K routes a token, N routes, E experts with R rows of D columns of weights, ``out``
    rows of W columns.

    Args:
        dtype: Type of everything that is multiplied.
        gated: Whether ``rows`` are the tokens, multiplied by gate and up, and ``inverse`` is
            written: each route's own number, -1 if it is dropped. Otherwise there is a row a route,
            multiplied by down.
    """
    num_tokens, top_k, num_routes, num_experts = T.dynamic("T, K, N, E")
    num_rows, weight_rows, depth, width = T.dynamic("M, R, D, W")
    row_stride, expert_stride, weight_stride, id_stride, out_stride = (
        T.dynamic(f"{name}_stride", T.int64) for name in ("row", "expert", "weight", "id", "out")
    )
    operand = {"bfloat16": "bf16", "float16": "fp16"}[dtype]

    @T.prim_func
    def multiply_routes(
        rows: T.StridedTensor[(num_rows, depth), (row_stride, 1), dtype],
        weights: T.StridedTensor[
            (num_experts, weight_rows, depth), (expert_stride, weight_stride, 1), dtype
        ],
        ids: T.StridedTensor[(num_tokens, top_k), (id_stride, 1), T.int32],
        inverse: T.Tensor[(num_routes,), T.int32],
        out: T.StridedTensor[(num_routes, width), (out_stride, 1), dtype],
        blocks: T.int32,
        split_bits: T.int32,
    ):
        with T.Kernel(blocks, threads=WARPS * WARP) as block:
            T.annotate_min_blocks_per_sm(RESIDENT)
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            owner = lane // 4
            quad = lane % 4
            partial = T.alloc_shared((WARPS, 4, WARP), T.float32)
            ballots = T.alloc_shared((WARPS,), T.int32)
            held = T.alloc_local((STEPS, 2, WORDS), T.uint32)
            operands = T.alloc_local((STEPS, WORDS), T.uint32)
            tall = T.alloc_local((4,), T.uint32)
            narrow = T.alloc_local((2,), T.uint32)
            sums = T.alloc_local((2, 4), T.float32)
            total = T.alloc_local((4,), T.float32)
            before = T.alloc_var(T.int32)
            found = T.alloc_var(T.int32)
            member = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)

            # Neighbouring blocks take the same rows of all experts, so that two groups of routes to
            # one expert read its weights at about the same time, the second one from L2.
            part = T.truncdiv(block, num_routes)
            route = block - part * num_routes
            if gated:
                # only then: the down product reads the ids before it waits for this one
                T.pdl_sync()
                T.pdl_trigger()
            expert = ids[T.truncdiv(route, top_k), T.truncmod(route, top_k)]
            dropped = T.Or(expert < 0, expert >= num_experts)

            find_group(ids, route, expert, num_routes, ballots, before, found, member)
            leads = T.And(T.Not(dropped), before % ROUTES == 0)
            if gated and part == 0 and thread == 0:
                inverse[route] = T.Select(dropped, -1, route)

            tile = part * (WARPS >> split_bits) + (warp >> split_bits)
            split = warp & ((1 << split_bits) - 1)
            # In the gated product the second eight rows are those of up.
            low = tile * (8 if gated else 16) + owner
            high = low + (width if gated else 8)
            column = split * CHUNK + quad * VECTOR
            if leads:
                load_weights(held, weights, expert, low, high, column, width, weight_rows, depth)
            if not gated:
                T.pdl_sync()
            if leads:
                row = member
                if gated:
                    row = T.truncdiv(member, top_k)
                for h in T.unroll(2):
                    for c in T.unroll(4):
                        sums[h, c] = 0
                while column - quad * VECTOR < depth:
                    for s in T.unroll(STEPS):
                        at = column + s * STEP
                        operands[s, 0:WORDS] = T.ldg128(
                            rows[row, at], pred=T.And(member >= 0, at < depth)
                        )
                    # A thread's eight columns stand for any eight of the tile's: the sum is over
                    # all of them, and both operands are loaded alike.
                    for s in T.unroll(STEPS):
                        for h in T.unroll(2):
                            for w in T.unroll(4):
                                tall[w] = held[s, w % 2, 2 * h + w // 2]
                            for w in T.unroll(2):
                                narrow[w] = operands[s, 2 * h + w]
                            T.ptx_mma(
                                T.float32,
                                "m16n8k16",
                                "row",
                                "col",
                                operand,
                                operand,
                                "fp32",
                                tall.data,
                                0,
                                narrow.data,
                                0,
                                sums.data,
                                4 * h,
                                T.bool(False),
                            )
                    column = column + (CHUNK << split_bits)
                    load_weights(
                        held, weights, expert, low, high, column, width, weight_rows, depth
                    )

                # total: routes 2 * quad and 2 * quad + 1 by row low, then by row high
                for c in T.unroll(4):
                    total[c] = sums[0, c] + sums[1, c]
                    partial[warp, c, lane] = total[c]
                T.sync_threads()
                if split == 0:
                    for s in T.serial((1 << split_bits) - 1):
                        for c in T.unroll(4):
                            total[c] = total[c] + partial[warp + 1 + s, c, lane]
                    for c in T.unroll(2):
                        row = T.shfl_sync(member, (2 * quad + c) * 4)
                        if row >= 0 and low < width:
                            if gated:
                                out[row, low] = total[c] * sigmoid(total[c]) * total[2 + c]
                            else:
                                out[row, low] = total[c]
                                if high < width:
                                    out[row, high] = total[2 + c]

    return multiply_routes


def _split_bits(depth: int) -> int:
    """Return how many warps share a row, as a power of two: each with two chunks if possible."""
    return min(max(depth // (2 * CHUNK), 1).bit_length() - 1, WARPS.bit_length() - 1)


def _blocks(num_routes: int, width: int, depth: int, gated: bool) -> int:
    """Return how many thread blocks a product takes."""
    rows = (8 if gated else 16) * (WARPS >> _split_bits(depth))
    return -(-width // rows) * num_routes


def refuse(
    hidden_states: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    routed_scaling_factor: float,
    *,
    target: str,
    out: torch.Tensor,
) -> str | None:
    """Return why the kernels cannot serve a call, or None."""
    if (reason := wrong_device(hidden_states)) is not None:
        return reason
    if hidden_states.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {hidden_states.dtype}"
    _, hidden, ffn = w_down.shape
    if hidden % VECTOR or ffn % VECTOR:
        return f"takes H and F that are multiples of 8 (16 bytes), got {hidden} and {ffn}"
    if max(hidden, ffn) > MAX_WIDTH:
        return f"takes H and F up to 2**20, got {hidden} and {ffn}"
    if topk_ids.numel() > MAX_ROUTES:
        return f"takes at most {MAX_ROUTES} routes, got {topk_ids.numel()}"
    tensors = {
        "hidden_states": hidden_states,
        "w_gate_up": w_gate_up,
        "w_down": w_down,
        "output": out,
    }
    return unfit(tensors)


def indexed_expert_mlp_fwd(
    hidden_states: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    routed_scaling_factor: float,
    *,
    target: str,
    out: torch.Tensor,
) -> None:
    """Write what the experts of each token add up to; see ``IndexedExpertMLPFwdOp``."""
    num_experts, hidden, ffn = w_down.shape
    num_routes = topk_ids.numel()
    if out.numel() == 0:
        return
    if num_routes == 0 or num_experts == 0 or ffn == 0:
        out.zero_()
        return
    inverse = topk_ids.new_empty(num_routes)
    act = hidden_states.new_empty(num_routes, ffn)
    down = hidden_states.new_empty(num_routes, hidden)
    dtype = dtype_name(hidden_states)
    with current(out.device):
        for rows, weights, written, gated in (
            (hidden_states, w_gate_up, act, True),
            (act, w_down, down, False),
        ):
            width, depth = written.shape[1], rows.shape[1]
            blocks = _blocks(num_routes, width, depth, gated)
            build(dtype, gated)(
                rows, weights, topk_ids, inverse, written, blocks, _split_bits(depth)
            )
    weights = topk_weights, inverse, None, routed_scaling_factor
    moe_post_permute_fwd(down, *weights, target=target, out=out)
