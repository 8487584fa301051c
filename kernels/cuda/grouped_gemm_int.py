"""Grouped GEMM with packed integer weights on Hopper: codes go from memory to the tensor cores.

A thread block takes some rows of one expert, from the list of ``grouped_gemm_tiles``, and 128 rows
of its weights, of which each of four warps has 32. Packed weights and rows come through a ring in
shared memory, 128 columns at a time. In registers a warp turns codes into whole numbers of the
rows' dtype, code minus zero point, which is exact; they are the tall operand of the tensor cores,
and the rows the wide one. The float32 sums of the columns that share a scale are multiplied by it
and added up.

With few rows an expert has one tile, and its packed weights are read once.
"""

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.activations import GATED, activated, gated
from tileops.kernels.cuda.device import (
    UNCHECKED,
    current,
    dtype_name,
    jit,
    unfit,
    wrong_device,
)
from tileops.kernels.cuda.grouped_gemm_tiles import COUNT, END, EXPERT, FIELDS, FIRST
from tileops.kernels.cuda.grouped_gemm_tiles import grouped_gemm_tiles as list_tiles
from tileops.kernels.cuda.integers import CUDA, codes_of, copy, load_matrices, load_words, offset_of
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe.grouped_gemm import Activation

LAYOUT = ContiguousLayoutSpec.tight_physical_psum()
WARP, WARPS = 32, 4
THREADS = WARPS * WARP
WEIGHTS = 128
"""Rows of weights of a block: 32 a warp, with a gate 16 gate rows and their 16 up rows."""
DEPTH = 128
"""Columns loaded at a time."""
PART = 32
"""Columns multiplied at a time: no block of columns that shares a scale is smaller."""
VECTOR = 16
"""Bytes that a thread moves at a time."""
ROW_VECTORS = DEPTH * 2 // VECTOR
"""Vectors of the columns of a row that are loaded at a time."""
FEW, MANY = (16, 4, 3), (64, 3, 2)
"""Most rows of a tile, loads in flight, and blocks that an SM holds at once: for no more rows an
expert than the first has, on average, and for more."""

# Barriers are placed by hand: one for each load.
CONFIG = {**UNCHECKED, tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


@jit(pass_configs=CONFIG)
def build(
    dtype: str,
    scale_dtype: str,
    bits: int,
    block_size: int,
    has_points: bool,
    activation: str,
    has_bias: bool,
    block_m: int,
    stages: int,
    resident: int,
):
    """Build the kernel. All sizes and strides are run-time values.

    Args:
        dtype: Type of ``a``, ``bias`` and ``out``.
        scale_dtype: Type of ``scales``.
        bits: Of a weight.
        block_size: Columns that share a scale, a multiple of 32; 0 for whole rows.
        has_points: Whether there are zero points; without, None is passed in their place.
        activation: ``"none"`` or the name of an activation.
        has_bias: Whether there is a bias; without, None is passed in its place.
        block_m: Most rows of a tile, a multiple of 8.
        stages: Loads in flight.
        resident: Blocks that an SM must have registers for.

    In the kernel: M rows, E experts, N columns of ``out``, K columns of ``a``, R rows of weights of
    B bytes with G scales. Column n of ``out`` is made of row ``n * row_step`` of the weights and,
    with a gate, of the row ``row_apart`` further on. ``points`` are ``[E, R, P]``, or ``[E, 1, P]``
    with a point a row.
    """
    is_gated = activation in GATED
    columns = WEIGHTS // 2 if is_gated else WEIGHTS
    own = columns // WARPS  # columns of a warp
    per_byte = 8 // bits
    row_bytes = DEPTH // per_byte
    vectors = row_bytes // VECTOR  # of a row of weights
    tiles_n = block_m // 8
    span = block_size or DEPTH
    groups = DEPTH // span  # scales of a row in a load
    sums = 2 * tiles_n * 4
    operand = {"bfloat16": "bf16", "float16": "fp16"}[dtype]

    num_rows, num_experts, width, depth = T.dynamic("M, E, N, K")
    weight_rows, num_bytes, num_groups, point_rows, num_points, num_lines = T.dynamic(
        "R, B, G, PR, P, lines"
    )
    (
        a_row,
        out_row,
        b_expert,
        b_row,
        scale_expert,
        scale_row,
        point_expert,
        point_row,
        bias_expert,
    ) = T.dynamic(
        "a_row, out_row, b_expert, b_row, scale_expert, scale_row, point_expert, point_row,"
        " bias_expert",
        T.int64,
    )

    def place(row, vector):
        """Return where in a line of shared memory a vector is: neighbours meet other banks."""
        if vectors == 8:
            return (vector ^ (row % 8)) * 4
        return (vector ^ (row // 2 % 4)) * 4

    @T.macro
    def load(k, w_ring, a_ring, a, b, expert, column, first, end, row_step, row_apart, thread):
        """Start the load of columns ``k * DEPTH`` on into their stage of the ring."""
        slot = T.truncmod(k, stages)
        for i in T.unroll(WEIGHTS * vectors // THREADS):
            line = i * (THREADS // vectors) + thread // vectors
            vector = thread % vectors
            at = column + (line // 32 * 16 + line % 16 if is_gated else line)
            # past the last column that one again: what it gives is not stored
            row = T.min(at, width - 1) * row_step + (line // 16 % 2 * row_apart if is_gated else 0)
            byte = k * row_bytes + vector * VECTOR
            copy(
                T.access_ptr(w_ring[slot, line, place(line, vector)], "w", 4),
                b[expert, row, byte],
                num_bytes - byte,
            )
        for i in T.unroll(block_m * ROW_VECTORS // THREADS):
            line = i * (THREADS // ROW_VECTORS) + thread // ROW_VECTORS
            vector = thread % ROW_VECTORS
            at = k * DEPTH + vector * 8
            copy(
                T.access_ptr(a_ring[slot, line, (vector ^ (line % 8)) * 4], "w", 4),
                a[T.min(first + line, end - 1), at],
                T.Select(first + line < end, (depth - at) * 2, 0),
            )

    @T.macro
    def look_up(k, rows, expert, scales, points, scale, offset):
        """Read the scales and zero points of a thread's four rows for one load."""
        for r in T.unroll(4):
            for g in T.unroll(groups):
                group = T.min(k * groups + g, num_groups - 1) if block_size else 0
                scale[r * groups + g] = T.Cast(T.float32, scales[expert, rows[r], group])
                if has_points:
                    if block_size:
                        byte = points[expert, rows[r], group // per_byte]
                        shift = group % per_byte * bits
                        offset[r * groups + g] = offset_of(byte, shift, bits, dtype)
                    else:
                        byte = points[expert, 0, rows[r] // per_byte]
                        shift = rows[r] % per_byte * bits
                        offset[r * groups + g] = offset_of(byte, shift, bits, dtype)
                else:
                    offset[r * groups + g] = offset_of(1 << (bits - 1), 0, bits, dtype)

    @T.prim_func
    def grouped_gemm_int(
        a: T.StridedTensor[(num_rows, depth), (a_row, 1), dtype],
        b: T.StridedTensor[(num_experts, weight_rows, num_bytes), (b_expert, b_row, 1), T.uint8],
        scales: T.StridedTensor[
            (num_experts, weight_rows, num_groups), (scale_expert, scale_row, 1), scale_dtype
        ],
        points: T.StridedTensor[
            (num_experts, point_rows, num_points), (point_expert, point_row, 1), T.uint8
        ],
        bias: T.StridedTensor[(num_experts, weight_rows), (bias_expert, 1), dtype],
        out: T.StridedTensor[(num_rows, width), (out_row, 1), dtype],
        tiles: T.Tensor[(num_lines, FIELDS), T.int32],
        blocks: T.int32,
        row_step: T.int32,
        row_apart: T.int32,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(blocks, threads=THREADS, prelude=CUDA) as block:
            T.annotate_min_blocks_per_sm(resident)
            w_ring = T.alloc_shared((stages, WEIGHTS, row_bytes // 4), T.uint32)
            a_ring = T.alloc_shared((stages, block_m, DEPTH // 2), T.uint32)
            rows = T.alloc_local((4,), T.int32)
            scale = T.alloc_local((4 * groups,), T.float32)
            offset = T.alloc_local((4 * groups,), T.uint32)
            next_scale = T.alloc_local((4 * groups,), T.float32)
            next_offset = T.alloc_local((4 * groups,), T.uint32)
            words = T.alloc_local((4,), T.uint32)
            tall = T.alloc_local((2, 2, 4), T.uint32)
            wide = T.alloc_local((4,), T.uint32)
            acc = T.alloc_local((sums,), T.float32)
            total = T.alloc_local((sums,), T.float32)
            value = T.alloc_local((2,), T.float32)
            expert = T.alloc_var(T.int32)
            first = T.alloc_var(T.int32)
            end = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            quad = lane % 4
            column_blocks = T.ceildiv(width, columns)
            line = 1 + T.truncdiv(block, column_blocks)
            column = T.truncmod(block, column_blocks) * columns
            steps = T.ceildiv(depth, DEPTH)
            T.pdl_sync()
            T.pdl_trigger()
            if line <= tiles[0, COUNT]:
                expert = tiles[line, EXPERT]
                first = tiles[line, FIRST]
                end = tiles[line, END]
                where = w_ring, a_ring, a, b, expert, column, first, end, row_step, row_apart
                for k in T.unroll(stages - 1):
                    if k < steps:
                        load(k, *where, thread)
                    T.ptx_commit_group()
                # rows 2 * t and 2 * t + 1 are of tile t of the warp's two, 8 apart
                for r in T.unroll(4):
                    at = column + warp * own + (r % 2 * 8 if is_gated else r * 8) + lane // 4
                    rows[r] = T.min(at, width - 1) * row_step + (
                        r // 2 * row_apart if is_gated else 0
                    )
                if block_size:
                    look_up(0, rows, expert, scales, points, next_scale, next_offset)
                else:
                    look_up(0, rows, expert, scales, points, scale, offset)
                for i in T.unroll(sums):
                    acc[i] = 0
                    total[i] = 0
                for k in T.unroll(steps, unroll_factor=1):
                    T.ptx_wait_group(stages - 2)
                    # all have their part of this load, and are done with the one before
                    T.sync_threads()
                    if k + stages - 1 < steps:
                        load(k + stages - 1, *where, thread)
                    T.ptx_commit_group()
                    if block_size:
                        for i in T.unroll(4 * groups):
                            scale[i] = next_scale[i]
                            offset[i] = next_offset[i]
                        look_up(k + 1, rows, expert, scales, points, next_scale, next_offset)
                    slot = T.truncmod(k, stages)
                    for s in T.unroll(DEPTH // PART):
                        for r in T.unroll(4):
                            at = warp * 32 + r * 8 + lane // 4
                            of = r * groups + (s * PART // span if block_size else 0)
                            for h in T.unroll(2):
                                if bits == 8 or h == 0:
                                    vector = s * 2 + h if bits == 8 else s
                                    load_words(
                                        words,
                                        T.access_ptr(w_ring[slot, at, place(at, vector)], "r", 4),
                                    )
                                for half in T.unroll(2):
                                    if bits == 8:
                                        word = T.Select(
                                            quad < 2, words[2 * half], words[2 * half + 1]
                                        )
                                        tall[r // 2, h, r % 2 + 2 * half] = codes_of(
                                            word, quad, offset[of], bits, dtype
                                        )
                                    else:
                                        tall[r // 2, h, r % 2 + 2 * half] = codes_of(
                                            words[2 * h + half], quad, offset[of], bits, dtype
                                        )
                        for n in T.unroll(tiles_n):
                            if first + n * 8 < end:
                                vector = s * 4 + lane // 8
                                load_matrices(
                                    wide,
                                    T.access_ptr(
                                        a_ring[slot, n * 8 + lane % 8, (vector ^ (lane % 8)) * 4],
                                        "r",
                                        4,
                                    ),
                                )
                                for h in T.unroll(2):
                                    for t in T.unroll(2):
                                        T.ptx_mma(
                                            T.float32,
                                            "m16n8k16",
                                            "row",
                                            "col",
                                            operand,
                                            operand,
                                            "fp32",
                                            tall.data,
                                            (t * 2 + h) * 4,
                                            wide.data,
                                            2 * h,
                                            acc.data,
                                            (t * tiles_n + n) * 4,
                                            T.bool(False),
                                        )
                        if block_size > 0 and (s + 1) * PART % span == 0:
                            for i in T.unroll(sums):
                                of = i // 2 % 2 + i // (sums // 2) * 2
                                total[i] += scale[of * groups + s * PART // span] * acc[i]
                                acc[i] = 0
                if not block_size:
                    for i in T.unroll(sums):
                        total[i] = scale[i // 2 % 2 + i // (sums // 2) * 2] * acc[i]
                for i in T.unroll(sums // 2):
                    c = i % 4
                    row = first + i // 4 * 8 + quad * 2 + c % 2
                    for t in T.unroll(2):
                        value[t] = total[t * (sums // 2) + i]
                        if has_bias:
                            value[t] += T.Cast(T.float32, bias[expert, rows[t * 2 + c // 2]])
                    if is_gated:
                        value[0] = gated(value[0], value[1], activation, alpha, beta, limit)
                    elif activation != "none":
                        for t in T.unroll(2):
                            value[t] = activated(value[t], activation)
                    for t in T.unroll(1 if is_gated else 2):
                        at = column + warp * own + t * 16 + c // 2 * 8 + lane // 4
                        if row < end and at < width:
                            out[row, at] = T.Cast(dtype, value[t])

    return grouped_gemm_int


def _lines(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``; a last dimension of size 1, whatever its stride, gets a stride of 1."""
    return x.as_strided(x.shape, (*x.stride()[:-1], 1))


def refuse(
    a, b, scales, zero_points, ends, bias, order, activation, bits, block_size, *, target, out
) -> str | None:
    """Return why the kernel cannot serve a call, or None."""
    if (reason := wrong_device(a)) is not None:
        return reason
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {a.dtype}: target='reference' takes it"
    if a.shape[1] == 0:
        return "takes weights with a column at least, got none"
    return unfit({"rows": a, "packed weights": b})


def moe_grouped_gemm_int_fwd(
    a, b, scales, zero_points, ends, bias, order, activation, bits, block_size, *, target, out
) -> None:
    """Multiply each expert's rows of ``a`` by its weights into ``out``, on ``a``'s device."""
    if out.numel() == 0:
        return
    (rows, _), (num_experts, width) = a.shape, (b.shape[0], out.shape[1])
    row_step, row_apart = {"plain": (1, 0), "interleaved": (2, 1), "halves": (1, width)}[order]
    activation = activation or Activation("none")
    columns = WEIGHTS if order == "plain" else WEIGHTS // 2
    block_m, stages, resident = FEW if rows <= FEW[0] * num_experts else MANY
    points = zero_points
    if points is not None:
        points = _lines(points if block_size else points[:, None])
    kernel = build(
        dtype_name(a),
        dtype_name(scales),
        bits,
        block_size,
        points is not None,
        activation.name,
        bias is not None,
        block_m,
        stages,
        resident,
    )
    with current(a.device):
        tiles = list_tiles(ends, LAYOUT, rows, num_experts, block_m)
        blocks = (tiles.shape[0] - 1) * -(-width // columns)
        numbers = blocks, row_step, row_apart, activation.alpha, activation.beta, activation.limit
        kernel(a, b, _lines(scales), points, bias, out, tiles, *numbers)
