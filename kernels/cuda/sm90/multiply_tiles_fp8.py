"""FP8 rows by the FP8 weights of their experts, on Hopper, scaled block by block.

The schedule is that of `multiply_tiles`: a tile is some rows of one expert by 256 rows of its
weights, and one warpgroup loads for two that multiply. A stage is one block of 128 columns, and its
scales, one a row and one for 128 rows of weights, come with it.

Of a low tile the weights are the tall operand of the tensor cores, so that it is multiplied as wide
as it is. Of a high one the rows are, in two halves: a thread then has two rows a half, and needs no
scale of others. `fp8_products` has both, `fp8_results` what follows.
"""

import tilelang.language as T
import torch
from tilelang.layout import make_full_bank_swizzled_layout

from tileops.kernels.cuda.device import dtype_name, jit, sm_count
from tileops.kernels.cuda.grouped_gemm_tiles import COUNT, FIELDS, GRAIN
from tileops.kernels.cuda.sm90 import jobs
from tileops.kernels.cuda.sm90.configs import GemmTile
from tileops.kernels.cuda.sm90.fp8_form import (
    DEPTH,
    HIGH,
    LOW,
    VECTOR,
    Form,
)
from tileops.kernels.cuda.sm90.fp8_moves import FP8, load_number
from tileops.kernels.cuda.sm90.fp8_products import products
from tileops.kernels.cuda.sm90.fp8_results import results
from tileops.kernels.cuda.sm90.moves import CUDA, load_rows
from tileops.kernels.cuda.sm90.tile import (
    GATHERERS,
    HALF,
    LINE,
    MATH_GROUPS,
    MATH_THREADS,
    STEP,
    WARP,
    WARPGROUP,
    WEIGHTS,
)
from tileops.moe.grouped_gemm import Activation

MAX_SPAN = 2**35
"""Bytes that the rows of a slab may span: where they are gathered, an int32 counts vectors."""


@jit(pass_configs=jobs.CONFIG)
def build(
    out_dtype: str,
    bias_dtype: str,
    activation: str,
    role: str,
    block_m: int,
    stages: int,
    together: int,
    streams: bool,
):
    """Build the kernel. All sizes and strides are run-time values; FP8 numbers are bytes.

    Args:
        out_dtype: Type of ``out``; ``"uint8"`` for FP8 rows with scales, of a gated activation.
        bias_dtype: Type of the biases; ``"none"`` without any, and None is passed for both.
        activation: ``"none"`` or the name of an activation.
        role: As in `multiply_tiles`: ``"alone"``, ``"first"`` or ``"second"``.
        block_m: Most rows of a tile: as `Form` takes them.
        stages: Loads in flight.
        together: How many stages of weights are loaded at a time, 1 or 2.
        streams: Whether weights are the first to leave L2.

    In the kernel: letters as in `multiply_tiles`; S rows of scales of the weights of an expert,
    each for ``scaled_rows`` rows of weights, and B blocks of K columns. ``out_scale`` is None
    unless ``out`` is FP8.
    """
    jobs.check_stages(stages)
    form = Form(out_dtype, bias_dtype != "none", activation, role, block_m, stages)
    multiply, store = products(form), results(form)
    look_up, look_ahead = jobs.finder(role, form.columns)
    bias_dtype = bias_dtype if form.has_bias else "float32"
    parts, columns, own = form.parts, form.columns, form.own
    # of a gatherer, each of half of 8 rows; and for scales, each of a row a thread
    passes = 2 * -(-block_m // (GRAIN * GATHERERS))
    gatherers = GATHERERS * WARP
    scale_passes = -(-block_m // gatherers)
    tells, waits = role == "first", role == "second"
    hint = {"eviction_policy": "evict_first"} if streams else {}

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
    def find_rows(offset, scaled_row, tile, sources, first, member, row_vectors):
        """Find the rows of ``a`` that a thread loads, and those whose scales it loads.

        ``offset`` is in vectors from row 0 on; both are -1 past the end of the tile.
        """
        for i in T.unroll(passes if form.gathers else 0):
            row = tile[2] + first + i // 2 * (GRAIN * GATHERERS) + i % 2 * (GRAIN // 2)
            offset[i] = -1
            if row < tile[3]:
                offset[i] = sources[row] * row_vectors
        for i in T.unroll(scale_passes):
            row = tile[2] + i * gatherers + member
            scaled_row[i] = -1
            if row < tile[3]:
                scaled_row[i] = sources[row] if form.gathers else row

    @T.macro
    def load_weights(k, steps, expert, column, weights, slots, w_ring, full):
        """Load the weights of step ``k`` of a job, and of the next if two are loaded together.

        A warpgroup's are together: its gate rows, then their up rows.
        """
        for group in tuple(range(MATH_GROUPS)) if parts == 2 else (0,):
            for part in tuple(range(parts)):
                to = (group * 2 + part) * HALF
                rows = WEIGHTS if parts == 1 else HALF
                at = column + group * own
                for i in tuple(range(together)):
                    if k + i < steps:
                        T.tma_copy(
                            weights[part][
                                expert, at : at + rows, (k + i) * DEPTH : (k + i + 1) * DEPTH
                            ],
                            w_ring[jobs.within(slots[i], stages), to : to + rows, :],
                            barrier=full[slots[i]],
                            **hint,
                        )

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
        gate_biased: T.int32,
        up_biased: T.int32,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(num_blocks, threads=MATH_THREADS + WARPGROUP, prelude=CUDA + FP8) as start:
            w_ring = T.alloc_shared((stages, WEIGHTS, DEPTH), T.uint8)
            a_ring = T.alloc_shared((stages, block_m, DEPTH), T.uint8)
            scale = T.alloc_shared((stages, form.scales), T.float32)
            T.annotate_layout(
                {
                    w_ring: make_full_bank_swizzled_layout(w_ring),
                    a_ring: make_full_bank_swizzled_layout(a_ring),
                }
            )
            shared = [None, None, None]
            if form.staged:
                staged = T.alloc_shared((MATH_GROUPS, form.staged_size), out_dtype)
                shared[0] = staged
            if form.quantizes:
                # what the warps found of the rows, of even tiles and of odd ones
                largest = T.alloc_shared((2, MATH_THREADS // WARP * LOW), T.float32)
                inverse = T.alloc_shared((MATH_GROUPS, LOW), T.float32)
                shared[1:] = largest, inverse
            full = T.alloc_barrier([1 + gatherers] * stages)
            # wgmma is waited for by whole warps, so one thread of each tells that a stage is free
            empty = T.alloc_barrier([MATH_THREADS // WARP] * stages)
            queue = T.alloc_shared((jobs.QUEUE, 5), T.int32)
            told = T.alloc_barrier([1] * jobs.QUEUE)
            if tells:
                stored = T.alloc_barrier([MATH_THREADS // WARP] * 2)
            thread = T.get_thread_binding()
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
            num_jobs = tiles[0, COUNT] * column_blocks

            if thread >= MATH_THREADS:
                T.set_max_nreg(56, 0)
                tile = T.alloc_local((5,), T.int32)
                number = T.alloc_var(T.int32)
                slot = T.alloc_var(T.int32)
                phase = T.alloc_var(T.int32)
                member = thread - MATH_THREADS
                number = 0
                slot = 0
                phase = 1
                safe = T.alloc_local((1,), T.int32)
                if waits:
                    jobs.wait_nearly_done(tiles, num_blocks, safe)
                look_up(tile, start, num_jobs, column_blocks, tiles)
                if member < WARP:
                    ahead = T.alloc_local((6,), T.int32)
                    end = T.alloc_var(T.int32)
                    line = T.alloc_var(T.int32)
                    line = 0
                    while tile[0] >= 0:
                        expert = tile[0]
                        column = tile[1]
                        first = tile[2]
                        end = tile[3]
                        line = tile[4]
                        slab = T.min(expert, slabs - 1)
                        if waits:
                            jobs.wait_done(tiles, num_blocks, line, safe)
                        for k in T.unroll(steps, unroll_factor=1):
                            at = k, steps, tile, ahead, queue, told, number
                            look_ahead(*at, num_blocks, num_jobs, column_blocks, tiles)
                            if tells:
                                jobs.wait_stored(k, steps, stored, number)
                            T.barrier_wait(empty[slot], phase)
                            following = T.Select(slot == stages - 1, 0, slot + 1)
                            if k % together == 0:
                                if together == 2:
                                    jobs.wait_together(k, steps, empty, following, phase)
                                slots, weights = (slot, following), (gate, up)
                                load_weights(k, steps, expert, column, weights, slots, w_ring, full)
                            # What stands for rows past the end is not stored, whatever it is.
                            for rows in () if form.gathers else (LOW, HIGH)[: 1 + form.high]:
                                if (end - first > LOW) == (rows == HIGH):
                                    T.tma_copy(
                                        a[
                                            slab,
                                            first : first + rows,
                                            k * DEPTH : (k + 1) * DEPTH,
                                        ],
                                        a_ring[jobs.within(slot, stages), 0:rows, :],
                                        barrier=full[slot],
                                    )
                            if T.shuffle_elect(WARP):
                                T.barrier_arrive(full[slot])
                            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
                            slot = following
                        number = number + 1
                    if tells:
                        jobs.tell_stored(tiles, stored, number, line)
                else:
                    # Rows are looked up when they are needed: the registers for those of the next
                    # tile besides would not be there, and the stages hide the wait.
                    offset = T.alloc_local((passes,), T.int32)
                    scaled_row = T.alloc_local((scale_passes,), T.int32)
                    scaled = T.alloc_var(T.int32)
                    lane = thread % LINE * VECTOR
                    row = member // WARP * GRAIN - GRAIN + thread % WARP // LINE
                    other = member - WARP
                    # among the scales of 16 rows, the 4 that one thread needs are neighbours
                    place = other // STEP * STEP + other % 8 // 2 * 4 + other // 8 % 2 * 2
                    place = place + other % 2
                    while tile[0] >= 0:
                        expert = tile[0]
                        slab = T.min(expert, slabs - 1)
                        find_rows(offset, scaled_row, tile, sources, row, other, row_vectors)
                        scaled = T.truncdiv(tile[1] + other % MATH_GROUPS * own, scaled_rows)
                        scaled = T.min(scaled, num_scales - 1)
                        if waits:
                            jobs.wait_done(tiles, num_blocks, tile[4], safe)
                        for k in T.unroll(steps, unroll_factor=1):
                            if k == jobs.told_at(steps):
                                jobs.next_job(tile, queue, told, number)
                            T.barrier_wait(empty[slot], phase)
                            if form.gathers:
                                load_rows(
                                    T.access_ptr(a_ring[slot, row, lane], "r", VECTOR),
                                    T.access_ptr(a_ring[slot, row + GRAIN // 2, lane], "r", VECTOR),
                                    a[0, 0, k * DEPTH + lane],
                                    offset,
                                    passes,
                                    True,
                                )
                            for i in T.unroll(scale_passes):
                                if scaled_row[i] >= 0:
                                    load_number(
                                        T.access_ptr(scale[slot, place + i * gatherers], "w", 1),
                                        a_scale[slab, scaled_row[i], k],
                                    )
                            if other < MATH_GROUPS:
                                load_number(
                                    T.access_ptr(scale[slot, block_m + other], "w", 1),
                                    gate_scale[expert, scaled, k],
                                )
                            elif other < MATH_GROUPS * parts:
                                load_number(
                                    T.access_ptr(scale[slot, block_m + other], "w", 1),
                                    up_scale[expert, scaled, k],
                                )
                            T.cp_async_barrier_noinc(full[slot])
                            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
                            slot = T.Select(slot == stages - 1, 0, slot + 1)
                        number = number + 1
            else:
                T.set_max_nreg(224, 1)
                w_desc = T.alloc_wgmma_desc()
                a_desc = T.alloc_wgmma_desc()
                T.initialize_wgmma_descriptor(w_desc, w_ring.access_ptr("r"), 1, 1, 8 * LINE)
                T.initialize_wgmma_descriptor(a_desc, a_ring.access_ptr("r"), 1, 1, 8 * LINE)
                acc = T.alloc_local((HIGH,), T.float32)
                after = T.alloc_local((5,), T.int32)
                number = T.alloc_var(T.int32)
                group = thread // WARPGROUP
                number = 0
                look_up(after, start, num_jobs, column_blocks, tiles)
                while after[0] >= 0:
                    expert = after[0]
                    column = after[1] + group * own
                    first = after[2]
                    height = T.Select(column < width, after[3] - first, 0)
                    slab = T.min(expert, slabs - 1)
                    rings = w_desc, a_desc, scale, full, empty
                    multiply(acc, height, *rings, number * steps, steps)
                    jobs.next_job(after, queue, told, number)
                    place = expert, slab, column, first, height, width
                    biases = gate_bias, up_bias, gate_biased, up_biased
                    formula = alpha, beta, limit
                    result = out, out_scale, out_row
                    store(acc, number, group, place, biases, formula, result, tuple(shared))
                    if tells:
                        T.sync_warp()
                        if T.shuffle_elect(WARP):
                            T.barrier_arrive(stored[number % 2])
                    number = number + 1
            if waits:  # no launch after this one may find the one before still at work
                T.pdl_sync()

    return grouped_gemm_fp8


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
    role: str = "alone",
) -> None:
    """Launch the kernel on a list of tiles of ``tile``'s height, on the current device.

    Args:
        a: FP8 rows, a matrix or slabs.
        a_scale: float32, one a row and 128 columns.
        sources: The row of ``a`` for each row of ``out``, int32, in a first product.
        gate: ``[E, N, K]`` FP8 weights.
        gate_scale: ``[E, S, K / 128]`` float32, one for ``N / S`` rows and 128 columns.
        up: Such weights, if the activation is gated.
        up_scale: Likewise.
        gate_bias: ``[E, N]``, or None.
        up_bias: Likewise.
        activation: What is applied to the products, or None.
        tiles: As in `multiply_tiles`.
        tile: How the kernel works.
        out: Rows that are written.
        out_scale: If ``out`` is FP8, its scales, ``[M, N / 128]``.
        role: As in `multiply_tiles`.
    """
    assert (sources is not None) == (role == "first"), role
    activation = activation or Activation("none")
    some_bias = up_bias if gate_bias is None else gate_bias
    a, out = jobs.view(jobs.slabs(a)), jobs.view(jobs.slabs(out))
    kernel = build(
        "uint8" if out_scale is not None else dtype_name(out),
        "none" if some_bias is None else dtype_name(some_bias),
        activation.name,
        role,
        tile.block_m,
        tile.stages,
        tile.together,
        tile.streams,
    )
    kernel(
        _bytes(a),
        jobs.slabs(a_scale),
        sources,
        jobs.view(_bytes(gate)),
        gate_scale,
        None if up is None else jobs.view(_bytes(up)),
        None if up is None else up_scale,
        some_bias,
        None if up is None else some_bias if up_bias is None else up_bias,
        out if out_scale is None else _bytes(out),
        out_scale,
        tiles,
        a.stride(1) // VECTOR,
        gate.shape[1] // gate_scale.shape[1],
        sm_count(a.device),
        int(gate_bias is not None),
        int(up_bias is not None),
        activation.alpha,
        activation.beta,
        activation.limit,
    )
