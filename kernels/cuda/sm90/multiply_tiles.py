"""Rows by the weights of their experts, on Hopper: one persistent kernel, fed by a list of tiles.

It serves the grouped GEMM in every layout, and both products of the routed experts.

A tile is some rows of one expert by 256 rows of its weights. The weights are the tall operand of
the tensor cores and the rows the wide one, whose width is any multiple of 8: a tile is multiplied
as wide as it is. One warpgroup loads into a ring of shared-memory stages, and is as far ahead as
the ring is long, in the next tile too: one of its warps through TMA, weights and rows that lie
together, and the others rows from wherever they lie, in 16-byte pieces. The other two warpgroups
multiply 128 rows of the weights each, apply bias and activation in float32, and store. TMA fills
with zeros what lies past the end of a dimension, so widths need not be multiples of a block.
`tile_products` has the products, `tile_results` what follows.
"""

import tilelang.language as T
import torch
from tilelang.layout import make_full_bank_swizzled_layout

from tileops.kernels.cuda.activations import GATED
from tileops.kernels.cuda.device import dtype_name, jit, sm_count
from tileops.kernels.cuda.grouped_gemm_tiles import COUNT, FIELDS, GRAIN
from tileops.kernels.cuda.sm90 import jobs
from tileops.kernels.cuda.sm90.configs import GemmTile
from tileops.kernels.cuda.sm90.moves import CUDA, load_rows
from tileops.kernels.cuda.sm90.tile import (
    GATHERERS,
    HALF,
    LINE,
    MATH_GROUPS,
    MATH_THREADS,
    WARP,
    WARPGROUP,
    WEIGHTS,
)
from tileops.kernels.cuda.sm90.tile_products import products
from tileops.kernels.cuda.sm90.tile_results import VECTOR, results, staged_shape
from tileops.moe.grouped_gemm import Activation

DEPTH = 64
"""Columns loaded at a time: the 128 bytes of one swizzled row of shared memory."""
BOX = 64
"""Rows that are loaded through TMA at a time, at most."""
MAX_SPAN = 2**34
"""Elements that the rows of a slab may span: where they are gathered, an int32 counts vectors."""


@jit(pass_configs=jobs.CONFIG)
def build(
    dtype: str,
    out_dtype: str,
    activation: str,
    has_bias: bool,
    role: str,
    block_m: int,
    stages: int,
    together: int,
    streams: bool,
):
    """Build the kernel. All sizes and strides are run-time values.

    Args:
        dtype: Type of ``a``, the weights and the biases.
        out_dtype: Type of ``out``.
        activation: ``"none"`` or the name of an activation.
        has_bias: Whether there is a bias at all; without, None is passed in the place of both.
        role: ``"alone"``; or of two products, the second of which reads what the first one stores
            and has the same tiles, ``"first"`` or ``"second"``. In the first, ``sources`` has the
            row of ``a`` for each row of ``out``; it is None in others.
        block_m: Most rows of a tile, a multiple of 32.
        stages: Loads in flight.
        together: How many stages of weights are loaded at a time, 1 or 2.
        streams: Whether weights are the first to leave L2.

    In the kernel: G slabs of M rows (one slab of all rows in a contiguous layout, one an expert in
    a masked one), E experts, N columns of ``out``, K columns of ``a``. ``up`` and ``up_bias`` are
    None unless the activation is gated. Of two biases one may be missing: its flag is 0, and any
    tensor of its shape stands in its place. ``alpha``, ``beta`` and ``limit`` are of ``swiglu``.
    """
    jobs.check_stages(stages)
    parts = 2 if activation in GATED else 1
    columns = WEIGHTS // parts
    own = columns // MATH_GROUPS  # columns of the tile that a warpgroup has
    # from the one half of a warpgroup's weights to the other
    apart = HALF if parts == 1 else columns
    # of a gatherer, each of half of 8 rows
    passes = 2 * -(-block_m // (GRAIN * GATHERERS))
    half_word = out_dtype != "float32"
    gathers = role == "first"
    tells, waits = role == "first", role == "second"
    hint = {"eviction_policy": "evict_first"} if streams else {}
    look_up, look_ahead = jobs.finder(role, columns)
    dispatch = products(dtype, own, apart, block_m, stages, gathers)
    load_bias, store = results(activation, has_bias, out_dtype, own, apart, block_m)

    slabs, a_rows, out_rows, num_sources = T.dynamic("G, A, M, S")
    num_experts, width, depth, num_lines = T.dynamic("E, N, K, lines")
    a_slab, a_row = T.dynamic("a_slab, a_row", T.int64)
    gate_expert, gate_row, up_expert, up_row = T.dynamic(
        "gate_expert, gate_row, up_expert, up_row", T.int64
    )
    gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row = T.dynamic(
        "gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row", T.int64
    )
    out_slab, out_row = T.dynamic("out_slab, out_row", T.int64)

    @T.macro
    def find_rows(found, tile, sources, first):
        """Set ``found`` to the rows of ``a`` that a thread loads, -1 past the end of the tile."""
        for i in T.unroll(passes):
            row = tile[2] + first + i // 2 * (GRAIN * GATHERERS) + i % 2 * (GRAIN // 2)
            found[i] = -1
            if row < tile[3]:
                found[i] = sources[row]

    @T.macro
    def load_weights(k, steps, expert, column, weights, slots, w_ring, full):
        """Load the weights of step ``k`` of a job, and of the next if two are loaded together."""
        for part in tuple(range(parts)):
            for i in tuple(range(together)):
                if k + i < steps:
                    T.tma_copy(
                        weights[part][
                            expert, column : column + columns, (k + i) * DEPTH : (k + i + 1) * DEPTH
                        ],
                        w_ring[
                            jobs.within(slots[i], stages), part * columns : (part + 1) * columns, :
                        ],
                        barrier=full[slots[i]],
                        **hint,
                    )

    @T.prim_func
    def grouped_gemm(
        a: T.StridedTensor[(slabs, a_rows, depth), (a_slab, a_row, 1), dtype],
        sources: T.Tensor[(num_sources,), T.int32],
        gate: T.StridedTensor[(num_experts, width, depth), (gate_expert, gate_row, 1), dtype],
        up: T.StridedTensor[(num_experts, width, depth), (up_expert, up_row, 1), dtype],
        gate_bias: T.StridedTensor[(num_experts, width), (gate_bias_expert, gate_bias_row), dtype],
        up_bias: T.StridedTensor[(num_experts, width), (up_bias_expert, up_bias_row), dtype],
        out: T.StridedTensor[(slabs, out_rows, width), (out_slab, out_row, 1), out_dtype],
        tiles: T.Tensor[(num_lines, FIELDS), T.int32],
        row_vectors: T.int32,
        num_blocks: T.int32,
        gate_biased: T.int32,
        up_biased: T.int32,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(num_blocks, threads=MATH_THREADS + WARPGROUP, prelude=CUDA) as start:
            w_ring = T.alloc_shared((stages, WEIGHTS, DEPTH), dtype)
            a_ring = T.alloc_shared((stages, block_m, DEPTH), dtype)
            T.annotate_layout(
                {
                    w_ring: make_full_bank_swizzled_layout(w_ring),
                    a_ring: make_full_bank_swizzled_layout(a_ring),
                }
            )
            staged = None
            if half_word:
                staged = T.alloc_shared(staged_shape(own), out_dtype)
            full = T.alloc_barrier([1 + (GATHERERS * WARP if gathers else 0)] * stages)
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
            steps = T.ceildiv(depth, DEPTH)
            column_blocks = T.ceildiv(width, columns)
            if not waits:
                T.pdl_sync()
            T.pdl_trigger()
            num_jobs = tiles[0, COUNT] * column_blocks

            if thread >= MATH_THREADS:
                T.set_max_nreg(72, 0)
                tile = T.alloc_local((5,), T.int32)
                number = T.alloc_var(T.int32)
                slot = T.alloc_var(T.int32)
                phase = T.alloc_var(T.int32)
                member = thread - MATH_THREADS
                number = 0
                slot = 0
                phase = 1
                look_up(tile, start, num_jobs, column_blocks, tiles)
                if member < WARP:
                    ahead = T.alloc_local((6,), T.int32)
                    safe = T.alloc_local((1,), T.int32)
                    first = T.alloc_var(T.int32)
                    end = T.alloc_var(T.int32)
                    line = T.alloc_var(T.int32)
                    line = 0
                    if waits:
                        jobs.wait_nearly_done(tiles, num_blocks, safe)
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
                            # What is loaded of rows past the end gives results that nobody stores.
                            for row in () if gathers else tuple(range(0, block_m, BOX)):
                                if first + row < end:
                                    rows = min(BOX, block_m - row)
                                    T.tma_copy(
                                        a[
                                            slab,
                                            first + row : first + row + rows,
                                            k * DEPTH : (k + 1) * DEPTH,
                                        ],
                                        a_ring[jobs.within(slot, stages), row : row + rows, :],
                                        barrier=full[slot],
                                    )
                            if T.shuffle_elect(WARP):
                                T.barrier_arrive(full[slot])
                            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
                            slot = following
                        number = number + 1
                    if tells:
                        jobs.tell_stored(tiles, stored, number, line)
                elif gathers:
                    found = T.alloc_local((passes,), T.int32)
                    offset = T.alloc_local((passes,), T.int32)
                    lane = thread % LINE * VECTOR
                    place = member // WARP * GRAIN - GRAIN + thread % WARP // LINE
                    find_rows(found, tile, sources, place)
                    while tile[0] >= 0:
                        for i in T.unroll(passes):
                            # -1 stays: tokens of one row expanded are 0 vectors apart
                            offset[i] = T.Select(found[i] >= 0, found[i] * row_vectors, -1)
                        for k in T.unroll(steps, unroll_factor=1):
                            # Rows are looked up before they are needed, so that no load waits.
                            if k == jobs.told_at(steps):
                                jobs.next_job(tile, queue, told, number)
                                find_rows(found, tile, sources, place)
                            T.barrier_wait(empty[slot], phase)
                            # Nothing is loaded for rows past the end. Zeros stand for columns past
                            # the depth.
                            load_rows(
                                T.access_ptr(a_ring[slot, place, lane], "r", VECTOR),
                                T.access_ptr(a_ring[slot, place + GRAIN // 2, lane], "r", VECTOR),
                                a[0, 0, k * DEPTH + lane],
                                offset,
                                passes,
                                k * DEPTH + lane < depth,
                            )
                            T.cp_async_barrier_noinc(full[slot])
                            phase = phase ^ T.Select(slot == stages - 1, 1, 0)
                            slot = T.Select(slot == stages - 1, 0, slot + 1)
                        number = number + 1
            else:
                T.set_max_nreg(216, 1)
                w_desc = T.alloc_wgmma_desc()
                a_desc = T.alloc_wgmma_desc()
                T.initialize_wgmma_descriptor(w_desc, w_ring.access_ptr("r"), 1, 1, 8 * LINE)
                T.initialize_wgmma_descriptor(a_desc, a_ring.access_ptr("r"), 1, 1, 8 * LINE)
                acc = T.alloc_local((block_m,), T.float32)
                bias = T.alloc_local((4,), T.float32)
                after = T.alloc_local((5,), T.int32)
                first = T.alloc_var(T.int32)
                height = T.alloc_var(T.int32)
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
                    if has_bias:
                        biases = gate_bias, up_bias, gate_biased, up_biased
                        load_bias(bias, (expert, column, width), biases)
                    dispatch(0, height, acc, w_desc, a_desc, full, empty, number * steps, steps)
                    jobs.next_job(after, queue, told, number)
                    at = slab, column, first, height, width
                    store(acc, bias, at, (alpha, beta, limit), out, out_row, staged)
                    if tells:
                        T.sync_warp()
                        if T.shuffle_elect(WARP):
                            T.barrier_arrive(stored[number % 2])
                    number = number + 1
            if waits:  # no launch after this one may find the one before still at work
                T.pdl_sync()

    return grouped_gemm


def multiply_tiles(
    a: torch.Tensor,
    sources: torch.Tensor | None,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: Activation | None,
    tiles: torch.Tensor,
    tile: GemmTile,
    out: torch.Tensor,
    role: str = "alone",
) -> None:
    """Launch the kernel on a list of tiles of ``tile``'s height, on the current device.

    Args:
        a: Rows, a matrix or slabs.
        sources: The row of ``a`` for each row of ``out``, int32, in a first product.
        gate: ``[E, N, K]`` weights.
        up: Such weights, if the activation is gated.
        gate_bias: ``[E, N]``, or None.
        up_bias: Likewise.
        activation: What is applied to the products, or None.
        tiles: What ``grouped_gemm_tiles`` returns: a list for this call only, or for a first and a
            second one, as they count in it what they have done.
        tile: How the kernel works.
        out: Rows that are written.
        role: ``"first"`` of two products on the same tiles, or ``"second"``, whose ``a`` the call
            before this one writes; or ``"alone"``.
    """
    assert (sources is not None) == (role == "first"), role
    activation = activation or Activation("none")
    if a.shape[-1] == 0:  # no TMA descriptor has an empty dimension
        a, gate = a.new_zeros(*a.shape[:-1], 8), gate.new_zeros(*gate.shape[:-1], 8)
        up = None if up is None else gate
    some_bias = up_bias if gate_bias is None else gate_bias
    a = jobs.view(jobs.slabs(a))
    kernel = build(
        dtype_name(a),
        dtype_name(out),
        activation.name,
        some_bias is not None,
        role,
        tile.block_m,
        tile.stages,
        tile.together,
        tile.streams,
    )
    kernel(
        a,
        sources,
        jobs.view(gate),
        None if up is None else jobs.view(up),
        some_bias,
        None if up is None else some_bias if up_bias is None else up_bias,
        jobs.view(jobs.slabs(out)),
        tiles,
        a.stride(1) // VECTOR,
        sm_count(a.device),
        int(gate_bias is not None),
        int(up_bias is not None),
        activation.alpha,
        activation.beta,
        activation.limit,
    )
