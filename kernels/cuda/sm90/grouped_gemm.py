"""Grouped GEMM for Hopper: one persistent kernel for every layout, fed by the list of row tiles.

A thread block keeps taking tiles: 64 or 128 rows of one expert by a block of columns. One warpgroup
loads both operands through TMA into a ring of shared-memory stages; each of the others multiplies
64 of the rows through wgmma, adds the bias and applies the activation in float32, and stores. The
loads of the next tile run while the last one is stored. TMA fills with zeros what lies past the end
of a dimension, so widths need not be multiples of a block.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda.activations import GATED, activated, gated
from tileops.kernels.cuda.device import current, dtype_name, jit, misplaced, sm_count, wrong_device
from tileops.kernels.cuda.grouped_gemm_tiles import END, EXPERT, FIELDS, FIRST, grouped_gemm_tiles
from tileops.kernels.cuda.sm90.configs import pick_gemm
from tileops.layouts import MGroupedLayoutSpec
from tileops.moe.grouped_gemm import Activation

WARP, WARPGROUP = 32, 128
ROWS = 64
"""Rows that one warpgroup multiplies."""

SWEEP = 16
"""Row tiles that go through all columns together: what they read stays in L2."""

VECTOR_BYTES = 16
CHUNK_BYTES = 128
"""How much of a row the epilogue stages at a time, so that whole cache lines are stored."""


def _locate(job, count, column_blocks):
    """Return the line in the list of tiles and the block of columns that a job stands for."""
    sweep = T.truncdiv(job, SWEEP * column_blocks) * SWEEP
    height = T.min(SWEEP, count - sweep)
    within = job - sweep * column_blocks
    return 1 + sweep + T.truncmod(within, height), T.truncdiv(within, height)


@jit
def build(
    dtype: str,
    out_dtype: str,
    activation: str,
    has_bias: bool,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
):
    """Build the kernel. All sizes and strides are run-time values.

    Args:
        dtype: Type of ``a``, the weights and the biases.
        out_dtype: Type of ``out``.
        activation: ``"none"`` or the name of an activation.
        has_bias: Whether there is a bias at all; without, None is passed in the place of both.
        block_m: Rows of a tile.
        block_n: Rows of weights for a tile.
        block_k: Columns loaded at a time.
        stages: Loads in flight.

    In the kernel: G slabs of M rows (one slab of all rows in a contiguous layout, one an expert in
    a masked one), E experts, N columns of ``out``, K columns of ``a``. ``up`` and ``up_bias`` are
    None unless the activation is gated. Of two biases one may be missing: its flag is 0, and any
    tensor of its shape stands in its place. ``alpha``, ``beta`` and ``limit`` are of ``swiglu``.
    """
    parts = 2 if activation in GATED else 1
    columns = block_n // parts
    math_groups = block_m // ROWS
    math_threads = math_groups * WARPGROUP
    vector = VECTOR_BYTES * 8 // T.dtype(out_dtype).bits
    chunk = CHUNK_BYTES * 8 // T.dtype(out_dtype).bits
    vectors = chunk // vector

    slabs, rows, num_experts, width, depth, lines = T.dynamic("G, M, E, N, K, lines")
    a_slab, a_row = T.dynamic("a_slab, a_row", T.int64)
    gate_expert, gate_row, up_expert, up_row = T.dynamic(
        "gate_expert, gate_row, up_expert, up_row", T.int64
    )
    gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row = T.dynamic(
        "gate_bias_expert, gate_bias_row, up_bias_expert, up_bias_row", T.int64
    )
    out_slab, out_row = T.dynamic("out_slab, out_row", T.int64)

    @T.macro
    def multiply(
        group: int,
        a_ring,
        b_ring,
        bias_tile,
        staged,
        full,
        empty,
        gate_bias,
        up_bias,
        out,
        tiles,
        count,
        start,
        step,
        gate_biased,
        up_biased,
        alpha,
        beta,
        limit,
    ):
        """Multiply rows ``64 * group`` and up of each tile, and store them."""
        thread = T.get_thread_binding() - group * WARPGROUP
        acc = T.alloc_fragment((ROWS, block_n), T.float32)
        job = T.alloc_var(T.int32)
        turn = T.alloc_var(T.int32)
        line = T.alloc_var(T.int32)
        block = T.alloc_var(T.int32)
        expert = T.alloc_var(T.int32)
        first = T.alloc_var(T.int32)
        left = T.alloc_var(T.int32)
        column = T.alloc_var(T.int32)
        added = T.alloc_var(T.float32)
        job = start
        turn = 0
        while job < count * T.ceildiv(width, columns):
            place = _locate(job, count, T.ceildiv(width, columns))
            line = place[0]
            block = place[1]
            expert = tiles[line, EXPERT]
            first = tiles[line, FIRST] + group * ROWS
            left = tiles[line, END] - first
            column = block * columns
            if left > 0:
                if has_bias:
                    for i in T.unroll(block_n // WARPGROUP):
                        at = i * WARPGROUP + thread
                        added = 0
                        if at < columns:
                            if gate_biased != 0:
                                added = gate_bias[expert, T.min(column + at, width - 1)]
                        elif up_biased != 0:
                            added = up_bias[expert, T.min(column + at - columns, width - 1)]
                        bias_tile[group, at] = added
                T.clear(acc)
                for k in T.serial(T.ceildiv(depth, block_k)):
                    T.barrier_wait(full[turn % stages], (turn // stages) & 1)
                    T.wgmma_gemm(
                        a_ring[turn % stages, group * ROWS : (group + 1) * ROWS, :],
                        b_ring[turn % stages, :, :],
                        acc,
                        transpose_B=True,
                    )
                    # one multiplication stays in flight: the stage before it is free
                    T.wait_wgmma(1)
                    if k > 0 and T.shuffle_elect(WARP):
                        T.barrier_arrive(empty[(turn + stages - 1) % stages])
                    turn = turn + 1
                T.wait_wgmma(0)
                if T.shuffle_elect(WARP):
                    T.barrier_arrive(empty[(turn + stages - 1) % stages])

                for c in T.unroll(columns // chunk):
                    value = T.alloc_fragment((ROWS, chunk), T.float32)
                    for i, j in T.Parallel(ROWS, chunk):
                        value[i, j] = acc[i, c * chunk + j]
                    if has_bias:
                        for i, j in T.Parallel(ROWS, chunk):
                            value[i, j] += bias_tile[group, c * chunk + j]
                    if parts == 2:
                        up = T.alloc_fragment((ROWS, chunk), T.float32)
                        for i, j in T.Parallel(ROWS, chunk):
                            up[i, j] = acc[i, columns + c * chunk + j]
                        if has_bias:
                            for i, j in T.Parallel(ROWS, chunk):
                                up[i, j] += bias_tile[group, columns + c * chunk + j]
                        for i, j in T.Parallel(ROWS, chunk):
                            value[i, j] = gated(
                                value[i, j], up[i, j], activation, alpha, beta, limit
                            )
                    elif activation != "none":
                        for i, j in T.Parallel(ROWS, chunk):
                            value[i, j] = activated(value[i, j], activation)
                    for i, j in T.Parallel(ROWS, chunk):
                        staged[group, i, j] = value[i, j]
                    for i, j in T.Parallel(ROWS, vectors):
                        if i < left and column + c * chunk + j * vector < width:
                            T.stg128(
                                out[
                                    T.min(expert, slabs - 1),
                                    first + i,
                                    column + c * chunk + j * vector,
                                ],
                                T.lds128(staged[group, i, j * vector]),
                            )
            else:
                for _ in T.serial(T.ceildiv(depth, block_k)):
                    T.barrier_wait(full[turn % stages], (turn // stages) & 1)
                    if T.shuffle_elect(WARP):
                        T.barrier_arrive(empty[turn % stages])
                    turn = turn + 1
            job = job + step

    @T.prim_func
    def grouped_gemm(
        a: T.StridedTensor[(slabs, rows, depth), (a_slab, a_row, 1), dtype],
        gate: T.StridedTensor[(num_experts, width, depth), (gate_expert, gate_row, 1), dtype],
        up: T.StridedTensor[(num_experts, width, depth), (up_expert, up_row, 1), dtype],
        gate_bias: T.StridedTensor[(num_experts, width), (gate_bias_expert, gate_bias_row), dtype],
        up_bias: T.StridedTensor[(num_experts, width), (up_bias_expert, up_bias_row), dtype],
        out: T.StridedTensor[(slabs, rows, width), (out_slab, out_row, 1), out_dtype],
        tiles: T.Tensor[(lines, FIELDS), T.int32],
        num_blocks: T.int32,
        gate_biased: T.int32,
        up_biased: T.int32,
        alpha: T.float32,
        beta: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(num_blocks, threads=math_threads + WARPGROUP) as start:
            a_ring = T.alloc_shared((stages, block_m, block_k), dtype)
            b_ring = T.alloc_shared((stages, block_n, block_k), dtype)
            # a row is one vector longer than its data, so that neighbours meet other banks
            staged = T.alloc_shared((math_groups, ROWS, chunk + vector), out_dtype)
            bias_tile = T.alloc_shared((math_groups, block_n), T.float32)
            full = T.alloc_barrier([WARPGROUP] * stages)
            # wgmma is waited for by whole warps, so one thread of each tells that a stage is free
            empty = T.alloc_barrier([math_threads // WARP] * stages)
            thread = T.get_thread_binding()
            count = T.alloc_var(T.int32)
            count = tiles[0, 0]

            if thread >= math_threads:
                if math_groups == 2:
                    T.set_max_nreg(40, 0)
                job = T.alloc_var(T.int32)
                turn = T.alloc_var(T.int32)
                line = T.alloc_var(T.int32)
                block = T.alloc_var(T.int32)
                expert = T.alloc_var(T.int32)
                first = T.alloc_var(T.int32)
                job = start
                turn = 0
                while job < count * T.ceildiv(width, columns):
                    place = _locate(job, count, T.ceildiv(width, columns))
                    line = place[0]
                    block = place[1]
                    expert = tiles[line, EXPERT]
                    first = tiles[line, FIRST]
                    for k in T.serial(T.ceildiv(depth, block_k)):
                        T.barrier_wait(empty[turn % stages], ((turn // stages) & 1) ^ 1)
                        T.tma_copy(
                            a[
                                T.min(expert, slabs - 1),
                                first : first + block_m,
                                k * block_k : (k + 1) * block_k,
                            ],
                            a_ring[turn % stages, :, :],
                            barrier=full[turn % stages],
                        )
                        T.tma_copy(
                            gate[
                                expert,
                                block * columns : (block + 1) * columns,
                                k * block_k : (k + 1) * block_k,
                            ],
                            b_ring[turn % stages, 0:columns, :],
                            barrier=full[turn % stages],
                        )
                        if parts == 2:
                            T.tma_copy(
                                up[
                                    expert,
                                    block * columns : (block + 1) * columns,
                                    k * block_k : (k + 1) * block_k,
                                ],
                                b_ring[turn % stages, columns:block_n, :],
                                barrier=full[turn % stages],
                            )
                        T.barrier_arrive(full[turn % stages])
                        turn = turn + 1
                    job = job + num_blocks
            elif thread < WARPGROUP:
                if math_groups == 2:
                    T.set_max_nreg(232, 1)
                multiply(
                    0,
                    a_ring,
                    b_ring,
                    bias_tile,
                    staged,
                    full,
                    empty,
                    gate_bias,
                    up_bias,
                    out,
                    tiles,
                    count,
                    start,
                    num_blocks,
                    gate_biased,
                    up_biased,
                    alpha,
                    beta,
                    limit,
                )
            elif math_groups == 2:
                T.set_max_nreg(232, 1)
                multiply(
                    1,
                    a_ring,
                    b_ring,
                    bias_tile,
                    staged,
                    full,
                    empty,
                    gate_bias,
                    up_bias,
                    out,
                    tiles,
                    count,
                    start,
                    num_blocks,
                    gate_biased,
                    up_biased,
                    alpha,
                    beta,
                    limit,
                )

    return grouped_gemm


def _view(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``; a dimension of size 1 gets a stride that a TMA descriptor takes."""
    steps = [8 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, (*steps[:-1], x.stride(-1)))


def _slabs(x: torch.Tensor) -> torch.Tensor:
    """View expert rows, a matrix or slabs, as slabs."""
    return _view(x if x.ndim == 3 else x.unsqueeze(0))


def moe_grouped_gemm_fwd(
    a: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    layout_metadata: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: Activation | None,
    *,
    target: str,
    out: torch.Tensor,
) -> None:
    """Run the kernel on ``a``'s device and its current stream; see ``MoEGroupedGemmFwdOp``."""
    num_experts, rows = gate.shape[0], a.shape[-2]
    if out.numel() == 0 or num_experts == 0:
        return
    activation = activation or Activation("none")
    # TileLang makes the device of the arguments current and leaves it so
    with current(a.device):
        if a.shape[-1] == 0:  # no TMA descriptor has an empty dimension
            a, gate = a.new_zeros(*a.shape[:-1], 8), gate.new_zeros(*gate.shape[:-1], 8)
            up = None if up is None else gate
        tile = pick_gemm(a.shape[:-1].numel(), num_experts)
        tiles = grouped_gemm_tiles(layout_metadata, layout, rows, num_experts, tile.block_m)
        some_bias = up_bias if gate_bias is None else gate_bias
        kernel = build(
            dtype_name(a),
            dtype_name(out),
            activation.name,
            some_bias is not None,
            tile.block_m,
            tile.block_n,
            tile.block_k,
            tile.stages,
        )
        kernel(
            _slabs(a),
            _view(gate),
            None if up is None else _view(up),
            some_bias,
            None if up is None else some_bias if up_bias is None else up_bias,
            _slabs(out),
            tiles,
            sm_count(a.device),
            int(gate_bias is not None),
            int(up_bias is not None),
            activation.alpha,
            activation.beta,
            activation.limit,
        )


def refuse(
    a: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    layout_metadata: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: Activation | None,
    *,
    target: str,
    out: torch.Tensor,
) -> str | None:
    """Return why the kernel cannot serve a call, or None."""
    if (reason := wrong_device(a)) is not None:
        return reason
    if a.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"takes bfloat16 and float16, got {a.dtype}; float32 would run as TF32: "
            "target='reference' takes it"
        )
    depth, width = a.shape[-1], out.shape[-1]
    if depth % 8 or width % 8:
        return (
            f"takes widths that are multiples of 8 (16 bytes), got K = {depth} and {width} columns "
            "of out"
        )
    weights = {"b": gate} if up is None else {"gate rows of b": gate, "up rows of b": up}
    for name, x in {"a": a, **weights, "out": out}.items():
        if (reason := misplaced(name, x)) is not None:
            return reason
        if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
            return f"{name}: expanded dimensions (of stride 0) are not taken, got {x.stride()}"
    return None
