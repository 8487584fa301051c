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
from tileops.kernels.cuda.grouped_gemm_tiles import (
    COUNT,
    DONE,
    FIELDS,
    NEARLY_DONE,
)
from tileops.kernels.cuda.sm90 import jobs
from tileops.kernels.cuda.sm90.configs import GemmTile
from tileops.kernels.cuda.sm90.fp8_form import (
    DEPTH,
    HIGH,
    LOW,
    SCALES,
    VECTOR,
    Form,
)
from tileops.kernels.cuda.sm90.fp8_products import products
from tileops.kernels.cuda.sm90.fp8_results import results
from tileops.kernels.cuda.sm90.moves import (
    CUDA,
    FP8,
    count_up,
    load_number,
    load_rows,
    wait_for,
)
from tileops.kernels.cuda.sm90.tile import (
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
"""Bytes that the rows of a slab may span: an int32 counts them in vectors."""


@jit(pass_configs=jobs.CONFIG)
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
    form = Form(out_dtype, bias_dtype != "none", activation, role, stages)
    multiply, store = products(form), results(form)
    look_up = jobs.look_up(form.columns)
    bias_dtype = bias_dtype if form.has_bias else "float32"
    parts, columns, own = form.parts, form.columns, form.own
    passes = HIGH // STEP
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
    def find_rows(found, tile, sources, member):
        """Set ``found`` to the rows of ``a`` that a thread loads, -1 past the end of the tile.

        The last of them is the row whose scales it loads.
        """
        for i in T.unroll(passes):
            row = tile[2] + i * STEP + member // LINE
            found[i] = -1
            if row < tile[3]:
                found[i] = sources[row] if form.gathers else row
        found[passes] = -1
        if tile[2] + member < tile[3]:
            found[passes] = sources[tile[2] + member] if form.gathers else tile[2] + member

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
            scale = T.alloc_shared((stages, SCALES), T.float32)
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
            num_jobs = count * column_blocks

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
                if num_jobs > 0:
                    look_up(tile, T.min(job, num_jobs - 1), count, column_blocks, sweep, tiles)
                    find_rows(found, tile, sources, member)
                    look_up(
                        after,
                        T.min(job + num_blocks, num_jobs - 1),
                        count,
                        column_blocks,
                        sweep,
                        tiles,
                    )
                while job < num_jobs:
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
                    later = T.min(job + 2 * num_blocks, num_jobs - 1)
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
                            if job >= num_jobs and T.shuffle_elect(WARP):
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
                        if not form.gathers and height > LOW:
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
                after = T.alloc_local((5,), T.int32)
                number = T.alloc_var(T.int32)
                group = thread // WARPGROUP
                number = 0
                job = start
                if job < num_jobs:
                    look_up(after, job, count, column_blocks, sweep, tiles)
                while job < num_jobs:
                    expert = after[0]
                    column = after[1] + group * own
                    first = after[2]
                    height = T.Select(column < width, after[3] - first, 0)
                    slab = T.min(expert, slabs - 1)
                    rings = w_desc, a_desc, scale, full, empty
                    multiply(acc, height, *rings, number * steps, steps)
                    later = T.min(job + num_blocks, num_jobs - 1)
                    look_up(after, later, count, column_blocks, sweep, tiles)
                    place = expert, slab, column, first, height, width
                    biases = gate_bias, up_bias, gate_biased, up_biased
                    formula = alpha, beta, limit
                    result = out, out_scale, out_row
                    store(acc, number, group, place, biases, formula, result, tuple(shared))
                    if tells:
                        T.sync_warp()
                        if T.shuffle_elect(WARP):
                            T.barrier_arrive(stored[0])
                    job = job + num_blocks
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
    a, out = jobs.view(jobs.slabs(a)), jobs.view(jobs.slabs(out))
    sweep = jobs.sweep(tile.block_m, a.shape[-1])
    kernel = build(
        "uint8" if out_scale is not None else dtype_name(out),
        "none" if some_bias is None else dtype_name(some_bias),
        activation.name,
        role,
        tile.stages,
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
        sweep,
        *before,
        int(gate_bias is not None),
        int(up_bias is not None),
        activation.alpha,
        activation.beta,
        activation.limit,
    )
    return sweep, -(-out.shape[-1] // (WEIGHTS if up is None else WEIGHTS // 2))
