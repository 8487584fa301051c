"""The expert MLP of few routes: each expert's weights are read where they lie, and read once.

Three launches: gate and up with the activation, down, and post-permute's sum over each token's
routes. The first two, which `build` makes, have two thread blocks an SM, which go through jobs: up
to eight routes of one expert by some rows of its weights. Tensor cores take the weights as the tall
operand and the eight routes as the narrow one. A thread keeps a ring of loads of its own in flight,
across jobs too, and multiplies what it has loaded itself, so that nothing waits for other threads
and the loads alone set the pace. The second launch fills its rings before it waits for the first.
"""

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.activations import GATED, gated
from tileops.kernels.cuda.device import (
    UNCHECKED,
    current,
    dtype_name,
    jit,
    sm_count,
    unfit,
    wrong_device,
)
from tileops.kernels.cuda.lines import LINES, copy_of_line
from tileops.kernels.cuda.post_permute import moe_post_permute_fwd
from tileops.kernels.cuda.route_groups import (
    EXPERT,
    FIELDS,
    ID,
    ROUTES,
    THREADS,
    WARP,
    WARPS,
    list_groups,
)
from tileops.moe.experts import FEW_ROUTES
from tileops.moe.grouped_gemm import ACTIVATIONS, Activation, gate_and_up

WORDS = 4
"""32-bit words in the vector that a thread loads."""
VECTOR = 8
"""Columns in that vector."""
STEP = 4 * VECTOR
"""Columns that the four threads of a weight row load side by side."""
STEPS = 4
CHUNK = STEPS * STEP
"""Columns of a weight row that a warp loads at once."""
CHUNK_BITS = CHUNK.bit_length() - 1
RING = 3
"""Chunks that a warp has in flight: 96 KB a block."""
RESIDENT = 2
"""Thread blocks of an SM."""
MAX_WIDTH = 2**20
"""Largest H and F: the number of jobs stays an int32."""

# Barriers are placed by hand: when groups are listed, and before the sums of warps are added up.
CONFIG = {**UNCHECKED, tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


@T.macro
def seek(job, groups, rows_of_job, owned: int, split_bits, table, expert: T.Ref, low: T.Ref):
    """Set the expert of a job, and the first of the rows of its weights that a thread has."""
    thread = T.get_thread_binding()
    expert = table[EXPERT, T.truncmod(job, groups)]  # noqa: F841
    low = T.truncdiv(job, groups) * rows_of_job
    low = low + (thread // WARP >> split_bits) * owned + thread % WARP // 4


@T.macro
def load_weights(ring, slot, first: bool, gate, up, expert, low, column):
    """Load a chunk of the rows of weights of a thread; zeros where there is no such element."""
    thread = T.get_thread_binding()
    for s in T.unroll(STEPS):
        at = column + s * STEP
        for h in (0, 1):
            row = low if first else low + 8 * h
            copy_of_line(
                T.access_ptr(ring[slot, s, h, thread, 0], "w", VECTOR),
                (gate, up)[h if first else 0][expert, row, at],
                T.And(row < gate.shape[1], at < gate.shape[2]),
            )


@T.macro
def load_next(
    ring,
    slot,
    first: bool,
    gate,
    up,
    column,
    blocks,
    stride,
    groups: T.Ref,
    rows_of_job,
    owned: int,
    split_bits,
    table,
    jobs: T.Ref,
    chunks: T.Ref,
    job: T.Ref,
    chunk: T.Ref,
    expert: T.Ref,
    low: T.Ref,
):
    """Load the next chunk of a thread, if there is one, and move on: to its next job at the end."""
    if job < jobs:
        load_weights(ring, slot, first, gate, up, expert, low, chunk * stride + column)
        chunk = chunk + 1
        if chunk == chunks:
            chunk = 0
            job = job + blocks
            if job < jobs:
                seek(job, groups, rows_of_job, owned, split_bits, table, expert, low)
    T.ptx_commit_group()


@T.macro
def load_operands(operands, rows, first: bool, top_k, members, group, column):
    """Load a chunk of the row of a route: of the one of eight that is a thread's."""
    route = T.alloc_var(T.int32)
    row = T.alloc_var(T.int32)
    route = members[group, T.get_thread_binding() % WARP // 4]
    row = route
    if first:
        row = T.truncdiv(route, top_k)
    for s in T.unroll(STEPS):
        at = column + s * STEP
        operands[s, 0:WORDS] = T.ldg128(rows[row, at], pred=T.And(route >= 0, at < rows.shape[1]))


@jit(pass_configs=CONFIG)
def build(dtype: str, activation: str, has_bias: bool):
    """Build the kernel that multiplies rows by the weights of their routes' experts.

    A warp owns 16 rows of weights: 8 of gate and the 8 of up that belong to them, or 16 of down.
    ``2**split_bits`` warps share them, each with its part of the columns, and add up in their
    order.

    T tokens, K routes a token, N routes, E experts with R rows of D columns of weights, ``out``
    rows of R columns.

    Args:
        dtype: Type of everything that is multiplied, and of the biases.
        activation: Of the first product: ``rows`` are the tokens, multiplied by gate and up, and
            ``inverse`` is written: each route's own number, -1 if it is dropped. ``"none"`` is the
            second: there is a row a route, multiplied by down, which stands in the place of gate.
        has_bias: Whether there are biases.

    The up weights and the biases are None where there are none; ``alpha``, ``beta`` and ``limit``
    are of ``swiglu``.
    """
    num_tokens, top_k, num_routes, num_experts = T.dynamic("T, K, N, E")
    num_rows, width, depth = T.dynamic("M, R, D")
    row_stride, id_stride, out_stride = T.dynamic("row_stride, id_stride, out_stride", T.int64)
    gate_expert, gate_row, up_expert, up_row = T.dynamic(
        "gate_expert, gate_row, up_expert, up_row", T.int64
    )
    gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row = T.dynamic(
        "gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row", T.int64
    )
    operand = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    first = activation in GATED
    owned = 8 if first else 16  # columns of the result that a warp's rows of weights give

    @T.prim_func
    def multiply_routes(
        rows: T.StridedTensor[(num_rows, depth), (row_stride, 1), dtype],
        gate: T.StridedTensor[(num_experts, width, depth), (gate_expert, gate_row, 1), dtype],
        up: T.StridedTensor[(num_experts, width, depth), (up_expert, up_row, 1), dtype],
        gate_bias: T.StridedTensor[(num_experts, width), (gate_bias_expert, gate_bias_row), dtype],
        up_bias: T.StridedTensor[(num_experts, width), (up_bias_expert, up_bias_row), dtype],
        ids: T.StridedTensor[(num_tokens, top_k), (id_stride, 1), T.int32],
        inverse: T.Tensor[(num_routes,), T.int32],
        out: T.StridedTensor[(num_routes, width), (out_stride, 1), dtype],
        blocks: T.int32,
        split_bits: T.int32,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(blocks, threads=THREADS, prelude=LINES) as block:
            T.annotate_min_blocks_per_sm(RESIDENT)
            ring = T.alloc_shared((RING, STEPS, 2, THREADS, VECTOR), dtype)
            partial = T.alloc_shared((2, WARPS, 4, WARP), T.float32)
            members = T.alloc_shared((THREADS, ROUTES), T.int16)
            table = T.alloc_shared((FIELDS, THREADS), T.int32)
            held = T.alloc_local((2, WORDS), T.uint32)
            vectors = T.view(held, (2, VECTOR), dtype)
            operands = T.alloc_local((STEPS, WORDS), T.uint32)
            tall = T.alloc_local((4,), T.uint32)
            narrow = T.alloc_local((2,), T.uint32)
            sums = T.alloc_local((2, 4), T.float32)
            total = T.alloc_local((4,), T.float32)
            bias = T.alloc_local((2,), T.float32)
            groups = T.alloc_var(T.int32)
            job = T.alloc_var(T.int32)
            jobs = T.alloc_var(T.int32)
            chunks = T.alloc_var(T.int32)
            group = T.alloc_var(T.int32)
            expert = T.alloc_var(T.int32)
            low = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            buffer = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            # of the chunk that is loaded next
            later_job = T.alloc_var(T.int32)
            later_chunk = T.alloc_var(T.int32)
            later_expert = T.alloc_var(T.int32)
            later_low = T.alloc_var(T.int32)
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            quad = lane % 4
            split = warp & ((1 << split_bits) - 1)
            column = split * CHUNK + quad * VECTOR
            rows_of_job = owned * (WARPS >> split_bits)
            stride = CHUNK << split_bits
            chunks = (depth + stride - 1) >> (CHUNK_BITS + split_bits)

            if first:
                # only then: the second product reads the ids before it waits for this one
                T.pdl_sync()
            T.pdl_trigger()
            list_groups(ids, num_routes, top_k, num_experts, table, members, groups)
            if first and block == 0 and thread < num_routes:
                inverse[thread] = T.Select(table[ID, thread] < 0, -1, thread)
            # Neighbouring blocks take the same rows of all groups, so that two groups of one expert
            # read its weights at about the same time, the second one from L2.
            jobs = groups * T.truncdiv(width + rows_of_job - 1, rows_of_job)
            sought = groups, rows_of_job, owned, split_bits, table
            weights = first, gate, up, column, blocks, stride
            later = jobs, chunks, later_job, later_chunk, later_expert, later_low

            later_job = block
            later_chunk = 0
            if later_job < jobs:
                seek(later_job, *sought, later_expert, later_low)
            for r in T.unroll(RING):
                load_next(ring, r, *weights, *sought, *later)
            if not first:
                T.pdl_sync()

            slot = 0
            buffer = 0
            job = block
            if job < jobs:
                load_operands(
                    operands, rows, first, top_k, members, T.truncmod(job, groups), column
                )
            while job < jobs:
                group = T.truncmod(job, groups)
                seek(job, *sought, expert, low)
                for i in T.unroll(2):
                    bias[i] = 0
                    if has_bias:
                        of = T.min(low + (0 if first else 8) * i, width - 1)
                        if first and i == 1:
                            bias[i] = up_bias[expert, of]
                        else:
                            bias[i] = gate_bias[expert, of]
                    for c in T.unroll(4):
                        sums[i, c] = 0
                for chunk in T.unroll(chunks, unroll_factor=1):
                    T.ptx_wait_group(RING - 1)
                    # A thread's eight columns stand for any eight of the tile's: the sum is over
                    # all of them, and both operands are loaded alike.
                    for s in T.unroll(STEPS):
                        for h in T.unroll(2):
                            for i in T.vectorized(VECTOR):
                                vectors[h, i] = ring[slot, s, h, thread, i]
                        for h in T.unroll(2):
                            for w in T.unroll(4):
                                tall[w] = held[w % 2, 2 * h + w // 2]
                            for w in T.unroll(2):
                                narrow[w] = operands[s, 2 * h + w]
                            T.ptx_mma(
                                *(T.float32, "m16n8k16", "row", "col", operand, operand, "fp32"),
                                *(tall.data, 0, narrow.data, 0, sums.data, 4 * h, T.bool(False)),
                            )
                    if chunk < chunks - 1:
                        at = (chunk + 1) * stride + column
                        load_operands(operands, rows, first, top_k, members, group, at)
                    elif job + blocks < jobs:
                        after = T.truncmod(job + blocks, groups)
                        load_operands(operands, rows, first, top_k, members, after, column)
                    load_next(ring, slot, *weights, *sought, *later)
                    slot = T.Select(slot == RING - 1, 0, slot + 1)

                # total: routes 2 * quad and 2 * quad + 1 by row low, then by the other one
                for c in T.unroll(4):
                    total[c] = sums[0, c] + sums[1, c]
                    partial[buffer, warp, c, lane] = total[c]
                T.sync_threads()
                if split == 0:
                    for s in T.serial((1 << split_bits) - 1):
                        for c in T.unroll(4):
                            total[c] = total[c] + partial[buffer, warp + 1 + s, c, lane]
                    for c in T.unroll(2):
                        row = members[group, 2 * quad + c]
                        if row >= 0:
                            for i in T.unroll(2):
                                total[2 * i + c] = total[2 * i + c] + bias[i]
                            if first:
                                if low < width:
                                    out[row, low] = gated(
                                        total[c], total[2 + c], activation, alpha, beta, limit
                                    )
                            else:
                                for i in T.unroll(2):
                                    if low + 8 * i < width:
                                        out[row, low + 8 * i] = total[2 * i + c]
                buffer = 1 - buffer
                job = job + blocks

    return multiply_routes


def _split_bits(depth: int) -> int:
    """Return how many warps share a row, as a power of two: each with two chunks if possible."""
    return min(max(depth // (2 * CHUNK), 1).bit_length() - 1, WARPS.bit_length() - 1)


def refuse(
    hidden_states: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    routed_scaling_factor: float,
    activation: str,
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
    if topk_ids.numel() > FEW_ROUTES:
        return f"takes at most {FEW_ROUTES} routes, got {topk_ids.numel()}"
    gate, up = gate_and_up(w_gate_up, activation)
    tensors = {
        "hidden_states": hidden_states,
        "gate rows of w_gate_up": gate,
        "up rows of w_gate_up": up,
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
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    routed_scaling_factor: float,
    activation: str,
    *,
    target: str,
    out: torch.Tensor,
) -> None:
    """Write what the experts of each token add up to; see ``FusedMoEExpertsFwdOp``."""
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
    gate, up = gate_and_up(w_gate_up, activation)
    biases = gate_and_up(b_gate_up, activation)
    with current(out.device):
        order = topk_ids, inverse
        formula = ACTIVATIONS[activation]
        _multiply(hidden_states, gate, up, *biases, *order, act, formula)
        _multiply(act, w_down, None, b_down, None, *order, down, Activation("none"))
    weights = topk_weights, inverse, None, routed_scaling_factor
    moe_post_permute_fwd(down, *weights, target=target, out=out)


def _multiply(rows, gate, up, gate_bias, up_bias, ids, inverse, out, formula: Activation) -> None:
    """Launch one of the two products."""
    build(dtype_name(rows), formula.name, gate_bias is not None)(
        *(rows, gate, up, gate_bias, up_bias, ids, inverse, out),
        *(RESIDENT * sm_count(out.device), _split_bits(rows.shape[1])),
        *(formula.alpha, formula.beta, formula.limit),
    )
