"""FP8 rows by the FP8 weights of their experts, on Hopper, scaled block by block.

The schedule is that of `multiply_tiles`: a tile is some rows of one expert by 256 rows of its
weights, the weights are the tall operand, and one warpgroup loads for two that multiply. Three
things differ. A stage is one block of 128 columns, and its scales, one a row and one for 128 rows
of weights, come with it. Each block is multiplied into sums of its own, since the tensor cores keep
fewer bits of FP8 sums than float32 has, and those are scaled and added to the float32 sums, while
the other warpgroup multiplies. And the result may be FP8 rows again with a scale for each 128
columns: what the second of two products reads.
"""

import tilelang
import tilelang.language as T
import torch
from tilelang.layout import make_full_bank_swizzled_layout

from tileops.kernels.cuda.activations import GATED, activated, gated
from tileops.kernels.cuda.device import UNCHECKED, dtype_name, jit, sm_count
from tileops.kernels.cuda.grouped_gemm_tiles import (
    COUNT,
    DONE,
    END,
    EXPERT,
    FIELDS,
    FIRST,
    GRAIN,
    NEARLY_DONE,
)
from tileops.kernels.cuda.sm90.configs import GemmTile
from tileops.kernels.cuda.sm90.moves import (
    CUDA,
    FP8,
    add_scaled,
    count_up,
    largest_of_rows,
    load_number,
    load_rows,
    pair_of_bytes,
    read_number,
    store_rows,
    store_turned,
    turned_bytes,
    wait_for,
)
from tileops.moe.grouped_gemm import Activation

WARP, WARPGROUP = 32, 128
MATH_GROUPS = 2
MATH_THREADS = MATH_GROUPS * WARPGROUP
HALF = 64
"""Rows of the tall operand of one tensor core instruction."""
WEIGHTS = MATH_GROUPS * 2 * HALF
"""Rows of weights of a tile: see `multiply_tiles`."""
STEP = 16
"""Rows that are loaded, and whose results are turned, at a time; a warp's rows of a high tile."""
CHUNK = 2 * STEP
"""Rows of results of a low tile that are staged at a time."""
LOW, HIGH = 64, 128
"""Most rows of a low tile and of a high one."""
DEPTH = 128
"""Columns of a block, which share a scale: the bytes of one swizzled row of shared memory."""
VECTOR = 16
"""FP8 numbers of the 16 bytes that a thread moves at a time."""
LINE = DEPTH // VECTOR
"""Vectors in such a row: what descriptors of shared memory count in."""
LARGEST = 448.0
"""The largest E4M3 number."""
FLOAT32_MAX = 3.4028234663852886e38
MAX_SPAN = 2**35
"""Bytes that the rows of a slab may span: an int32 counts them in vectors."""

SWEEP_BYTES, MIN_SWEEP = 2**24, 4
"""As in `multiply_tiles`."""

CONFIG = {**UNCHECKED, tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def _locate(job, count, column_blocks, sweep):
    """Return the line in the list of tiles and the block of columns that a job stands for."""
    above = T.truncdiv(job, sweep * column_blocks) * sweep
    height = T.min(sweep, count - above)
    within = job - above * column_blocks
    return 1 + above + T.truncmod(within, height), T.truncdiv(within, height)


@jit(pass_configs=CONFIG)
def build(
    out_dtype: str,
    bias_dtype: str,
    activation: str,
    role: str,
    stages: int,
    streams: bool,
):
    """Build the kernel. All sizes and strides are run-time values; FP8 numbers are bytes.

    Args:
        out_dtype: Type of ``out``; ``"uint8"`` for FP8 rows with scales, of a gated activation.
        bias_dtype: Type of the biases; ``"none"`` without any, and None is passed for both.
        activation: ``"none"`` or the name of an activation.
        role: As in `multiply_tiles`: ``"alone"``, ``"first"`` or ``"second"``.
        stages: Loads in flight.
        streams: Whether weights are the first to leave L2.

    In the kernel: letters as in `multiply_tiles`; S rows of scales of the weights of an expert,
    each for ``scaled_rows`` rows of weights, and B blocks of K columns. ``out_scale`` is None
    unless ``out`` is FP8.
    """
    parts = 2 if activation in GATED else 1
    has_bias = bias_dtype != "none"
    bias_dtype = bias_dtype if has_bias else "float32"
    columns = WEIGHTS // parts
    own = columns // MATH_GROUPS  # columns of the tile that a warpgroup has
    spans = own // HALF  # of 64 columns
    passes = HIGH // STEP
    quantizes = out_dtype == "uint8"
    half_word = out_dtype in ("bfloat16", "float16")
    staged_out = half_word or quantizes
    if quantizes and parts == 1:
        raise ValueError(f"FP8 rows come from a gated activation, got {activation}")
    # Results are staged in lines that are one vector longer than their data, so that neighbours
    # meet other banks: those of a low tile as wide as a warpgroup's columns, others of 64.
    out_bytes = 1 if quantizes else 2
    packed = 16 // out_bytes
    low_line, high_line = own + packed, HALF + packed
    staged_size = max(CHUNK * low_line, WARPGROUP // WARP * STEP * high_line)
    gathers = role == "first"
    tells, waits = role == "first", role == "second"
    hint = {"eviction_policy": "evict_first"} if streams else {}
    scales = HIGH + 2 * MATH_GROUPS  # of a stage: of rows, and two for each warpgroup

    slabs, a_rows, out_rows, num_sources = T.dynamic("G, A, M, S0")
    num_experts, width, depth, num_lines = T.dynamic("E, N, K, lines")
    num_scales, blocks, out_blocks = T.dynamic("S, B, OB")
    a_slab, a_row = T.dynamic("a_slab, a_row", T.int64)
    a_scale_slab, a_scale_row, a_scale_col = T.dynamic(
        "a_scale_slab, a_scale_row, a_scale_col", T.int64
    )
    gate_expert, gate_row, up_expert, up_row = T.dynamic(
        "gate_expert, gate_row, up_expert, up_row", T.int64
    )
    gate_scale_expert, gate_scale_row, gate_scale_col = T.dynamic(
        "gate_scale_expert, gate_scale_row, gate_scale_col", T.int64
    )
    up_scale_expert, up_scale_row, up_scale_col = T.dynamic(
        "up_scale_expert, up_scale_row, up_scale_col", T.int64
    )
    gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row = T.dynamic(
        "gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row", T.int64
    )
    out_slab, out_row = T.dynamic("out_slab, out_row", T.int64)

    @T.macro
    def look_up(tile, job, count, column_blocks, sweep, tiles):
        """Set ``tile`` to a job's expert, first column, first row, end row and line of the list."""
        line = T.alloc_var(T.int32)
        place = _locate(job, count, column_blocks, sweep)
        line = place[0]
        tile[0] = tiles[line, EXPERT]
        tile[1] = place[1] * columns
        tile[2] = tiles[line, FIRST]
        tile[3] = tiles[line, END]
        tile[4] = line

    @T.macro
    def find_rows(found, tile, sources, member):
        """Set ``found`` to the rows of ``a`` that a thread loads, -1 past the end of the tile.

        The last of them is the row whose scales it loads.
        """
        for i in T.unroll(passes):
            row = tile[2] + i * STEP + member // LINE
            found[i] = -1
            if row < tile[3]:
                found[i] = sources[row] if gathers else row
        found[passes] = -1
        if tile[2] + member < tile[3]:
            found[passes] = sources[tile[2] + member] if gathers else tile[2] + member

    @T.macro
    def instruct(shape: str, block, at: int, tall_desc, tall, wide_desc, wide):
        """Start the product of a block of 128 columns into ``block``, from ``at`` on."""
        T.warpgroup_arrive()
        for ki in (0, 1, 2, 3):
            T.ptx_wgmma_ss(
                *(T.float32, shape, True, True, "e4m3", "e4m3", "fp32"),
                *(tall_desc.data, tall + ki * 2, wide_desc.data, wide + ki * 2),
                *(block.data, at, 1 if ki > 0 else 0, 1, 1),
            )
        T.warpgroup_commit_batch()

    @T.macro
    def multiply_high(acc, w_desc, a_desc, scale, full, empty, turn, steps):
        """Multiply a tile of up to 128 rows, whose first stage is number ``turn`` of all.

        The rows are the tall operand here, in two halves, and a warpgroup's 128 rows of weights
        the wide one: then a thread needs the scales of two rows a half, and no more.
        """
        group = T.get_thread_binding() // WARPGROUP
        lane = T.get_thread_binding() % WARP
        warp = T.get_thread_binding() % WARPGROUP // WARP
        slot = T.alloc_var(T.int32)
        phase = T.alloc_var(T.int32)
        block = T.alloc_local((HALF,), T.float32)
        of_rows = T.alloc_local((2,), T.float32)
        of_weights = T.alloc_local((2,), T.float32)
        by = T.alloc_local((4,), T.float32)
        slot = T.truncmod(turn, stages)
        phase = T.truncdiv(turn, stages) & 1
        for i in T.unroll(HIGH):
            acc[i] = 0
        for _ in T.unroll(steps, unroll_factor=1):
            T.barrier_wait(full[slot], phase)
            if gathers:
                T.fence_proxy_async()  # rows came through the other path to shared memory
            for half in (0, 1):
                T.warpgroup_fence_operand(block, 0, HALF)
                instruct(
                    f"m{HALF}n{2 * HALF}k32",
                    block,
                    0,
                    a_desc,
                    slot * (HIGH * LINE) + half * HALF * LINE,
                    w_desc,
                    slot * (WEIGHTS * LINE) + group * (2 * HALF * LINE),
                )
                T.warpgroup_fence_operand(block, 0, HALF)
                at = half * HALF + warp * STEP + lane // 8 * 4 + lane // 4 % 2
                for i in T.unroll(2):
                    of_rows[i] = read_number(T.access_ptr(scale[slot, at + i * 2], "r", 1))
                for i in T.unroll(parts):
                    of_weights[i] = read_number(
                        T.access_ptr(scale[slot, HIGH + i * MATH_GROUPS + group], "r", 1)
                    )
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(block, 0, HALF)
                for i in T.unroll(2 * parts):
                    by[i] = of_rows[i % 2] * of_weights[i // 2]
                for i in T.unroll(HALF):
                    factor = by[i // 2 % 2 + (i // (HALF // 2) * 2 if parts == 2 else 0)]
                    acc[half * HALF + i] = acc[half * HALF + i] + factor * block[i]
            if T.shuffle_elect(WARP):
                T.barrier_arrive(empty[slot])
            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
            slot = T.Select(slot == stages - 1, 0, slot + 1)

    @T.macro
    def multiply_low(wide: int, acc, w_desc, a_desc, scale, full, empty, turn, steps):
        """Multiply a tile of ``wide`` rows, the wide operand as in `multiply_tiles`.

        Of a tile of 0 rows the stages are only handed back.
        """
        group = T.get_thread_binding() // WARPGROUP
        lane = T.get_thread_binding() % WARP
        slot = T.alloc_var(T.int32)
        phase = T.alloc_var(T.int32)
        block = T.alloc_local((max(wide, 1),), T.float32)  # of both halves
        of_weights = T.alloc_local((2,), T.float32)
        of_rows = T.alloc_local((8,), T.float32)
        slot = T.truncmod(turn, stages)
        phase = T.truncdiv(turn, stages) & 1
        for i in T.unroll(wide // 2):
            acc[i] = 0
            acc[LOW // 2 + i] = 0
        for _ in T.unroll(steps, unroll_factor=1):
            T.barrier_wait(full[slot], phase)
            if wide > 0:
                T.fence_proxy_async()
                T.warpgroup_fence_operand(block, 0, wide)
            for half in (0, 1) if wide > 0 else ():
                instruct(
                    f"m{HALF}n{wide}k32",
                    block,
                    half * (wide // 2),
                    w_desc,
                    slot * (WEIGHTS * LINE) + (group * 2 + half) * HALF * LINE,
                    a_desc,
                    slot * (HIGH * LINE),
                )
            if wide > 0:
                T.warpgroup_fence_operand(block, 0, wide)
                for half in T.unroll(2):
                    part = half if parts == 2 else 0
                    of_weights[half] = read_number(
                        T.access_ptr(scale[slot, HIGH + part * MATH_GROUPS + group], "r", 1)
                    )
                for step in (0, 1):
                    for i in T.vectorized(4):
                        of_rows[step * 4 + i] = scale[slot, step * STEP + lane % 4 * 4 + i]
            for half in (0, 1) if wide > 0 else ():
                T.wait_wgmma(1 - half)
                T.warpgroup_fence_operand(block, half * (wide // 2), wide // 2)
                add_scaled(
                    acc[half * (LOW // 2)],
                    block[half * (wide // 2)],
                    T.access_ptr(scale[slot, lane % 4 * 4], "r", 4),
                    of_rows,
                    of_weights[half],
                    wide,
                )
            if T.shuffle_elect(WARP):
                T.barrier_arrive(empty[slot])
            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
            slot = T.Select(slot == stages - 1, 0, slot + 1)

    @T.macro
    def dispatch(wide: int, height, *args):
        """Multiply a low tile as wide as it is."""
        if wide < LOW:
            if height <= wide:
                multiply_low(wide, *args)
            else:
                dispatch(wide + GRAIN, height, *args)
        else:
            multiply_low(wide, *args)

    def activate(value, other, alpha, beta, limit):
        """Return the activation of a product and, if it is gated, of the up product with it."""
        if parts == 2:
            return gated(value, other, activation, alpha, beta, limit)
        return value if activation == "none" else activated(value, activation)

    @T.macro
    def finish_low(value, acc, bias, at, alpha, beta, limit):
        """Set ``value`` to what 8 sums of each half of ``acc``, from ``at`` on, give.

        They are two rows of weights by 4 rows of the tile; ``bias`` has a number for each row of
        weights of each half.
        """
        for r in T.unroll(8):
            value[r] = acc[at + r]
            value[8 + r] = acc[at + LOW // 2 + r]
            if has_bias:
                value[r] += bias[r // 2 % 2]
                value[8 + r] += bias[2 + r // 2 % 2]
            value[r] = activate(value[r], value[8 + r], alpha, beta, limit)
            if parts == 1:
                value[8 + r] = activate(value[8 + r], 0, alpha, beta, limit)

    @T.prim_func
    def grouped_gemm_fp8(
        a: T.StridedTensor[(slabs, a_rows, depth), (a_slab, a_row, 1), T.uint8],
        a_scale: T.StridedTensor[
            (slabs, a_rows, blocks), (a_scale_slab, a_scale_row, a_scale_col), T.float32
        ],
        sources: T.Tensor[(num_sources,), T.int32],
        gate: T.StridedTensor[(num_experts, width, depth), (gate_expert, gate_row, 1), T.uint8],
        gate_scale: T.StridedTensor[
            (num_experts, num_scales, blocks),
            (gate_scale_expert, gate_scale_row, gate_scale_col),
            T.float32,
        ],
        up: T.StridedTensor[(num_experts, width, depth), (up_expert, up_row, 1), T.uint8],
        up_scale: T.StridedTensor[
            (num_experts, num_scales, blocks),
            (up_scale_expert, up_scale_row, up_scale_col),
            T.float32,
        ],
        gate_bias: T.StridedTensor[
            (num_experts, width), (gate_bias_expert, gate_bias_row), bias_dtype
        ],
        up_bias: T.StridedTensor[(num_experts, width), (up_bias_expert, up_bias_row), bias_dtype],
        out: T.StridedTensor[(slabs, out_rows, width), (out_slab, out_row, 1), out_dtype],
        out_scale: T.Tensor[(out_rows, out_blocks), T.float32],
        tiles: T.Tensor[(num_lines, FIELDS), T.int32],
        row_vectors: T.int32,
        scaled_rows: T.int32,
        num_blocks: T.int32,
        sweep: T.int32,
        sweep_before: T.int32,
        blocks_before: T.int32,
        gate_biased: T.int32,
        up_biased: T.int32,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(num_blocks, threads=MATH_THREADS + WARPGROUP, prelude=CUDA + FP8) as start:
            w_ring = T.alloc_shared((stages, WEIGHTS, DEPTH), T.uint8)
            a_ring = T.alloc_shared((stages, HIGH, DEPTH), T.uint8)
            scale = T.alloc_shared((stages, scales), T.float32)
            T.annotate_layout(
                {
                    w_ring: make_full_bank_swizzled_layout(w_ring),
                    a_ring: make_full_bank_swizzled_layout(a_ring),
                }
            )
            if staged_out:
                staged = T.alloc_shared((MATH_GROUPS, staged_size), out_dtype)
            if quantizes:
                # what the warps found of the rows, of even tiles and of odd ones
                largest = T.alloc_shared((2, MATH_THREADS // WARP * LOW), T.float32)
                inverse = T.alloc_shared((MATH_GROUPS, LOW), T.float32)
            full = T.alloc_barrier([WARPGROUP] * stages)
            # wgmma is waited for by whole warps, so one thread of each tells that a stage is free
            empty = T.alloc_barrier([MATH_THREADS // WARP] * stages)
            if tells:
                stored = T.alloc_barrier([MATH_THREADS // WARP])
            thread = T.get_thread_binding()
            job = T.alloc_var(T.int32)
            expert = T.alloc_var(T.int32)
            slab = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            first = T.alloc_var(T.int32)
            height = T.alloc_var(T.int32)
            steps = T.truncdiv(depth, DEPTH)
            column_blocks = T.ceildiv(width, columns)
            if not waits:
                T.pdl_sync()
            T.pdl_trigger()
            count = tiles[0, COUNT]
            jobs = count * column_blocks

            if thread >= MATH_THREADS:
                T.set_max_nreg(56, 0)
                tile = T.alloc_local((5,), T.int32)
                after = T.alloc_local((5,), T.int32)
                found = T.alloc_local((passes + 1,), T.int32)
                offset = T.alloc_local((passes + 1,), T.int32)
                line = T.alloc_var(T.int32)
                safe = T.alloc_var(T.int32)
                number = T.alloc_var(T.int32)
                slot = T.alloc_var(T.int32)
                phase = T.alloc_var(T.int32)
                scaled = T.alloc_var(T.int32)
                member = thread - MATH_THREADS
                lane = member % LINE * VECTOR
                # among the scales of 16 rows, the 4 that one thread needs are neighbours
                place = member // STEP * STEP + member % 8 // 2 * 4 + member // 8 % 2 * 2
                place = place + member % 2
                number = 0
                slot = 0
                phase = 1
                job = start
                if waits:
                    # tiles up to this line have no last job of any block before
                    safe = T.max(count * blocks_before - num_blocks, 0)
                    safe = T.truncdiv(safe, sweep_before * blocks_before) * sweep_before
                    wait_for(tiles[0, NEARLY_DONE], num_blocks)
                # Rows are looked up one tile early and tiles two, so that no load waits for them.
                if jobs > 0:
                    look_up(tile, T.min(job, jobs - 1), count, column_blocks, sweep, tiles)
                    find_rows(found, tile, sources, member)
                    look_up(
                        after, T.min(job + num_blocks, jobs - 1), count, column_blocks, sweep, tiles
                    )
                while job < jobs:
                    expert = tile[0]
                    column = tile[1]
                    first = tile[2]
                    height = tile[3] - first
                    line = tile[4]
                    slab = T.min(expert, slabs - 1)
                    for i in T.unroll(passes):
                        offset[i] = found[i] * row_vectors
                    offset[passes] = found[passes]
                    for i in T.unroll(5):
                        tile[i] = after[i]
                    find_rows(found, tile, sources, member)
                    later = T.min(job + 2 * num_blocks, jobs - 1)
                    look_up(after, later, count, column_blocks, sweep, tiles)
                    job = job + num_blocks
                    scaled = T.truncdiv(column + member % MATH_GROUPS * own, scaled_rows)
                    scaled = T.min(scaled, num_scales - 1)
                    if waits and line > safe:
                        wait_for(tiles[0, DONE], num_blocks)
                        safe = count
                    for k in T.unroll(steps, unroll_factor=1):
                        # Each is waited for, as a barrier tells of its last phase only, and before
                        # the last load, as then the next cannot be over.
                        if tells and k == steps - 1 and member < WARP:
                            if number > 0:
                                T.barrier_wait(stored[0], (number - 1) & 1)
                            if job >= jobs and T.shuffle_elect(WARP):
                                count_up(tiles[0, NEARLY_DONE])
                        T.barrier_wait(empty[slot], phase)
                        # a warpgroup's weights are together: its gate rows, then their up rows
                        for group in tuple(range(MATH_GROUPS)) if parts == 2 else (0,):
                            for part in tuple(range(parts)):
                                to = (group * 2 + part) * HALF
                                rows = WEIGHTS if parts == 1 else HALF
                                T.tma_copy(
                                    (gate, up)[part][
                                        expert,
                                        column + group * own : column + group * own + rows,
                                        k * DEPTH : (k + 1) * DEPTH,
                                    ],
                                    w_ring[slot, to : to + rows, :],
                                    barrier=full[slot],
                                    **hint,
                                )
                        # What stands for rows past the end is not stored, whatever it is.
                        if not gathers and height > LOW:
                            T.tma_copy(
                                a[slab, first : first + HIGH, k * DEPTH : (k + 1) * DEPTH],
                                a_ring[slot, :, :],
                                barrier=full[slot],
                            )
                        else:
                            load_rows(
                                T.access_ptr(a_ring[slot, member // LINE, lane], "r", VECTOR),
                                a[slab, 0, k * DEPTH + lane],
                                offset,
                                passes,
                                True,
                            )
                        if offset[passes] >= 0:
                            load_number(
                                T.access_ptr(scale[slot, place], "w", 1),
                                a_scale[slab, offset[passes], k],
                            )
                        if member < MATH_GROUPS:
                            load_number(
                                T.access_ptr(scale[slot, HIGH + member], "w", 1),
                                gate_scale[expert, scaled, k],
                            )
                        elif member < MATH_GROUPS * parts:
                            load_number(
                                T.access_ptr(scale[slot, HIGH + member], "w", 1),
                                up_scale[expert, scaled, k],
                            )
                        T.cp_async_barrier_noinc(full[slot])
                        phase = phase ^ T.Select(slot == stages - 1, 1, 0)
                        slot = T.Select(slot == stages - 1, 0, slot + 1)
                    number = number + 1
                if tells and member < WARP:
                    if number > 0:
                        T.barrier_wait(stored[0], (number - 1) & 1)
                    if T.shuffle_elect(WARP):
                        if number == 0:
                            count_up(tiles[0, NEARLY_DONE])
                        count_up(tiles[0, DONE])
            else:
                T.set_max_nreg(224, 1)
                w_desc = T.alloc_wgmma_desc()
                a_desc = T.alloc_wgmma_desc()
                T.initialize_wgmma_descriptor(w_desc, w_ring.access_ptr("r"), 1, 1, 8 * LINE)
                T.initialize_wgmma_descriptor(a_desc, a_ring.access_ptr("r"), 1, 1, 8 * LINE)
                acc = T.alloc_local((HIGH,), T.float32)
                value = T.alloc_local((16,), T.float32)
                bias = T.alloc_local((4,), T.float32)
                most = T.alloc_local((4,), T.float32)
                if half_word:
                    words = T.alloc_local((4,), T.uint32)
                    result = T.view(words, (8,), out_dtype)
                after = T.alloc_local((5,), T.int32)
                number = T.alloc_var(T.int32)
                group = thread // WARPGROUP
                member = thread % WARPGROUP
                warp = member // WARP
                lane = thread % WARP
                # of the rows of weights of a half, those of a thread are this and the 8th after it
                tall = warp * STEP + lane // 4
                # where a warp's four blocks of 8 by 8 results go, turned: each thread gives one row
                turned_row = lane // 16 * 8 + lane % 8
                turned_col = warp * STEP + lane // 8 % 2 * 8
                number = 0
                job = start
                if job < jobs:
                    look_up(after, job, count, column_blocks, sweep, tiles)
                while job < jobs:
                    expert = after[0]
                    column = after[1] + group * own
                    first = after[2]
                    height = T.Select(column < width, after[3] - first, 0)
                    slab = T.min(expert, slabs - 1)
                    rings = w_desc, a_desc, scale, full, empty, number * steps, steps
                    if height > LOW:
                        multiply_high(acc, *rings)
                    else:
                        dispatch(0, height, acc, *rings)
                    later = T.min(job + num_blocks, jobs - 1)
                    look_up(after, later, count, column_blocks, sweep, tiles)
                    if height > LOW:
                        for half in T.unroll(2):
                            for i in T.unroll(2):
                                most[half * 2 + i] = 0
                            for i in T.unroll(HALF // parts):
                                at = half * HALF + i
                                col = column + i // 4 * 8 + lane % 4 * 2 + i % 2
                                if has_bias:
                                    if gate_biased != 0:
                                        acc[at] += gate_bias[expert, T.min(col, width - 1)]
                                    if parts == 2 and up_biased != 0:
                                        acc[at + HALF // 2] += up_bias[
                                            expert, T.min(col, width - 1)
                                        ]
                                acc[at] = activate(
                                    acc[at], acc[at + HALF // parts % HALF], alpha, beta, limit
                                )
                                if quantizes:
                                    size = T.abs(acc[at])
                                    size = T.Select(size <= FLOAT32_MAX, size, T.float32(0))
                                    i2 = half * 2 + i // 2 % 2
                                    most[i2] = T.max(most[i2], size)
                        if quantizes:
                            for i in T.unroll(4):
                                for apart in (1, 2):
                                    most[i] = T.max(most[i], T.shfl_xor(most[i], apart))
                                row = i // 2 * HALF + tall + i % 2 * 8
                                if lane % 4 == 0:
                                    largest[number & 1, group * HIGH + row] = most[i]
                            T.sync_threads(3, MATH_THREADS)
                            for i in T.unroll(4):
                                row = i // 2 * HALF + tall + i % 2 * 8
                                most[i] = T.max(
                                    largest[number & 1, row], largest[number & 1, HIGH + row]
                                ) / T.float32(LARGEST)
                                most[i] = T.Select(most[i] == 0, T.float32(1), most[i])
                                if group == 0 and lane % 4 == 0 and row < height:
                                    out_scale[first + row, T.truncdiv(column, DEPTH)] = most[i]
                                most[i] = T.min(T.float32(1) / most[i], T.float32(FLOAT32_MAX))
                        for half in T.unroll(2):
                            row = half * HALF + warp * STEP  # the warp's first
                            for span in T.unroll(spans):
                                col = column + span * HALF
                                if staged_out:
                                    T.sync_warp()
                                for i in T.unroll(HALF // 4):
                                    at = half * HALF + span * (HALF // 2) + i * 2
                                    down = lane // 4 + i % 2 * 8
                                    right = i // 2 * 8 + lane % 4 * 2
                                    if quantizes:
                                        pair_of_bytes(
                                            T.access_ptr(
                                                staged[
                                                    group,
                                                    (warp * STEP + down) * high_line + right,
                                                ],
                                                "w",
                                                2,
                                            ),
                                            acc[at] * most[half * 2 + i % 2],
                                            acc[at + 1] * most[half * 2 + i % 2],
                                        )
                                    elif half_word:
                                        for c in T.vectorized(2):
                                            staged[
                                                group,
                                                (warp * STEP + down) * high_line + right + c,
                                            ] = T.Cast(out_dtype, acc[at + c])
                                    elif row + down < height:
                                        for c in T.vectorized(2):
                                            out[slab, first + row + down, col + right + c] = acc[
                                                at + c
                                            ]
                                if staged_out:
                                    T.sync_warp()
                                    vectors = HALF // packed
                                    lines = WARP // vectors
                                    down = lane // vectors
                                    right = lane % vectors * packed
                                    store_rows(
                                        out[slab, first + row + down, col + right],
                                        T.access_ptr(
                                            staged[group, (warp * STEP + down) * high_line + right],
                                            "r",
                                            packed,
                                        ),
                                        (STEP // lines, lines * high_line * out_bytes, lines),
                                        out_row * (lines * out_bytes),
                                        T.Select(col + right < width, height - row - down, 0),
                                    )
                    else:
                        if has_bias:
                            for i in T.unroll(4):
                                at = column + tall + i % 2 * 8
                                bias[i] = 0
                                if parts == 1:
                                    if gate_biased != 0:
                                        bias[i] = gate_bias[
                                            expert, T.min(at + i // 2 * HALF, width - 1)
                                        ]
                                elif i < 2:
                                    if gate_biased != 0:
                                        bias[i] = gate_bias[expert, T.min(at, width - 1)]
                                elif up_biased != 0:
                                    bias[i] = up_bias[expert, T.min(at, width - 1)]
                        if quantizes:
                            # all results are needed before the first can be rounded
                            for s in T.unroll(LOW // STEP):
                                if s * STEP < height:
                                    finish_low(value, acc, bias, s * 8, alpha, beta, limit)
                                    for r in T.unroll(8):
                                        acc[s * 8 + r] = value[r]
                                else:
                                    for r in T.unroll(8):
                                        acc[s * 8 + r] = 0
                            largest_of_rows(
                                T.access_ptr(largest[number & 1, thread // WARP * LOW], "w", LOW),
                                acc,
                                LOW,
                            )
                            T.sync_threads(3, MATH_THREADS)
                            if member < LOW:
                                most[0] = 0
                                for i in T.unroll(MATH_THREADS // WARP):
                                    most[0] = T.max(most[0], largest[number & 1, i * LOW + member])
                                most[0] = most[0] / T.float32(LARGEST)
                                most[0] = T.Select(most[0] == 0, T.float32(1), most[0])
                                if group == 0 and member < height:
                                    out_scale[first + member, T.truncdiv(column, DEPTH)] = most[0]
                                inverse[group, member] = T.min(
                                    T.float32(1) / most[0], T.float32(FLOAT32_MAX)
                                )
                        for c in T.unroll(LOW // CHUNK):
                            if c * CHUNK < height:
                                if staged_out:
                                    T.sync_threads(1 + group, WARPGROUP)
                                for s in T.unroll(CHUNK // STEP):
                                    at = c * CHUNK + s * STEP
                                    if quantizes:
                                        row = s * STEP + lane % 4 * 2 + lane // 4 % 2
                                        turned_bytes(
                                            T.access_ptr(
                                                staged[
                                                    group, row * low_line + tall - lane // 4 % 2
                                                ],
                                                "w",
                                                2,
                                            ),
                                            T.access_ptr(inverse[group, at + lane % 4 * 2], "r", 2),
                                            acc[at // 2],
                                            low_line,
                                        )
                                    else:
                                        finish_low(value, acc, bias, at // 2, alpha, beta, limit)
                                    for half in T.unroll(0 if quantizes else spans):
                                        if half_word:
                                            for i in T.vectorized(8):
                                                result[i] = T.Cast(out_dtype, value[half * 8 + i])
                                            row = s * STEP + turned_row
                                            col = half * HALF + turned_col
                                            store_turned(
                                                T.access_ptr(
                                                    staged[group, row * low_line + col], "w", 8
                                                ),
                                                words,
                                            )
                                        elif not quantizes:
                                            for r in T.unroll(8):
                                                row = at + r // 4 * 8 + lane % 4 * 2 + r % 2
                                                col = column + half * HALF + tall + r // 2 % 2 * 8
                                                if row < height and col < width:
                                                    out[slab, first + row, col] = value[
                                                        half * 8 + r
                                                    ]
                                if staged_out:
                                    T.sync_threads(1 + group, WARPGROUP)
                                    vectors = own // packed
                                    lines = WARPGROUP // vectors
                                    row = member // vectors
                                    col = member % vectors * packed
                                    store_rows(
                                        out[slab, first + c * CHUNK + row, column + col],
                                        T.access_ptr(
                                            staged[group, row * low_line + col], "r", packed
                                        ),
                                        (CHUNK // lines, lines * low_line * out_bytes, lines),
                                        out_row * (lines * out_bytes),
                                        T.Select(column + col < width, height - c * CHUNK - row, 0),
                                    )
                    if tells:
                        T.sync_warp()
                        if T.shuffle_elect(WARP):
                            T.barrier_arrive(stored[0])
                    job = job + num_blocks
                    number = number + 1
            if waits:  # no launch after this one may find the one before still at work
                T.pdl_sync()

    return grouped_gemm_fp8


def _view(x: torch.Tensor, step: int = VECTOR) -> torch.Tensor:
    """Return ``x``; a dimension of size 1 gets a stride that a TMA descriptor takes."""
    if 1 not in x.shape:
        return x
    steps = [step if size == 1 else s for size, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, (*steps[:-1], x.stride(-1)))


def _slabs(x: torch.Tensor) -> torch.Tensor:
    """View expert rows, a matrix or slabs, as slabs."""
    return x if x.ndim == 3 else x.unsqueeze(0)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def multiply_tiles_fp8(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    sources: torch.Tensor | None,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: Activation | None,
    tiles: torch.Tensor,
    tile: GemmTile,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
    before: tuple[int, int] = (0, 0),
) -> tuple[int, int]:
    """Launch the kernel on a list of tiles of ``tile``'s height, on the current device.

    Args:
        a: FP8 rows, a matrix or slabs.
        a_scale: float32, one a row and 128 columns.
        sources: The row of ``a`` for each row of ``out``, int32; None if they are the same.
        gate: ``[E, N, K]`` FP8 weights.
        gate_scale: ``[E, S, K / 128]`` float32, one for ``N / S`` rows and 128 columns.
        up: Such weights, if the activation is gated.
        up_scale: Likewise.
        gate_bias: ``[E, N]``, or None.
        up_bias: Likewise.
        activation: What is applied to the products, or None.
        tiles: What ``grouped_gemm_tiles`` returns.
        tile: How the kernel works.
        out: Rows that are written.
        out_scale: If ``out`` is FP8, its scales, ``[M, N / 128]``.
        before: What the call that writes ``a`` has returned, if it is the one before this and has
            the same tiles.

    Returns:
        How many row tiles go through all columns together, and in how many blocks.
    """
    role = "second" if any(before) else "alone" if sources is None else "first"
    activation = activation or Activation("none")
    some_bias = up_bias if gate_bias is None else gate_bias
    a, out = _slabs(a), _slabs(out)
    sweep = max(MIN_SWEEP, SWEEP_BYTES // (tile.block_m * a.shape[-1]))
    kernel = build(
        "uint8" if out_scale is not None else dtype_name(out),
        "none" if some_bias is None else dtype_name(some_bias),
        activation.name,
        role,
        tile.stages,
        tile.streams,
    )
    kernel(
        _view(_bytes(a)),
        _slabs(a_scale),
        sources,
        _view(_bytes(gate)),
        gate_scale,
        None if up is None else _view(_bytes(up)),
        None if up is None else up_scale,
        some_bias,
        None if up is None else some_bias if up_bias is None else up_bias,
        _view(out if out_scale is None else _bytes(out)),
        out_scale,
        tiles,
        a.stride(1) // VECTOR,
        gate.shape[1] // gate_scale.shape[1],
        sm_count(a.device),
        sweep,
        *before,
        int(gate_bias is not None),
        int(up_bias is not None),
        activation.alpha,
        activation.beta,
        activation.limit,
    )
    return sweep, -(-out.shape[-1] // (WEIGHTS if up is None else WEIGHTS // 2))
