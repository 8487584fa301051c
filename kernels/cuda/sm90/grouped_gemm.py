"""Grouped GEMM for Hopper: one persistent kernel for every layout, fed by the list of row tiles.

A thread block keeps taking tiles: 64 or 128 rows of one expert by a block of columns. One warpgroup
loads both operands through TMA into a ring of shared-memory stages; each of the others multiplies
64 of the rows through wgmma, adds the bias and applies the activation in float32, and stores. The
loads of the next tile run while the last one is stored. TMA fills with zeros what lies past the end
of a dimension, so widths need not be multiples of a block.
"""

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.device import COMPILE_TARGET, capability, has_compiler, sm_count
from tileops.kernels.cuda.grouped_gemm_tiles import END, EXPERT, FIELDS, FIRST, grouped_gemm_tiles
from tileops.kernels.cuda.sm90.configs import pick_gemm
from tileops.layouts import MGroupedLayoutSpec

WARP, WARPGROUP = 32, 128
ROWS = 64
"""Rows that one warpgroup multiplies."""

SWEEP = 16
"""Row tiles that go through all columns together: what they read stays in L2."""

VECTOR_BYTES = 16
CHUNK_BYTES = 128
"""How much of a row the epilogue stages at a time, so that whole cache lines are stored."""

LIMIT, SLOPE = 7.0, 1.702
"""The constants of ``swigluoai``."""


def _swish(x, slope):
    """Return ``x * sigmoid(slope * x)``: no exponential overflows, and small values are kept."""
    small = T.exp(-T.abs(slope * x))
    return x * T.Select(x >= 0, T.float32(1), small) * T.fast_rcp(T.float32(1) + small)


def _gated(gate, up, activation: str):
    """Return the gated activation; comparisons, unlike min and max, let NaN through."""
    if activation == "silu_and_mul":
        return _swish(gate, 1.0) * up
    if activation == "gelu_and_mul":
        return 0.5 * gate * (1 + T.erf(gate * 0.5**0.5)) * up
    gate = T.Select(gate > LIMIT, T.float32(LIMIT), gate)
    up = T.Select(up > LIMIT, T.float32(LIMIT), T.Select(up < -LIMIT, T.float32(-LIMIT), up))
    return _swish(gate, SLOPE) * (up + 1)


def _locate(job, count, column_blocks):
    """Return the line in the list of tiles and the block of columns that a job stands for."""
    sweep = T.truncdiv(job, SWEEP * column_blocks) * SWEEP
    height = T.min(SWEEP, count - sweep)
    within = job - sweep * column_blocks
    return 1 + sweep + T.truncmod(within, height), T.truncdiv(within, height)


@tilelang.jit(
    target=COMPILE_TARGET,
    pass_configs={tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True},
)
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
        dtype: Type of ``a``, ``b`` and ``bias``.
        out_dtype: Type of ``out``.
        activation: ``"none"`` or the name of a gated activation.
        has_bias: Whether ``bias`` is added; without, None is passed in its place.
        block_m: Rows of a tile.
        block_n: Rows of ``b`` for a tile.
        block_k: Columns loaded at a time.
        stages: Loads in flight.

    In the kernel: G slabs of M rows (one slab of all rows in a contiguous layout, one an expert in
    a masked one), E experts, N columns of ``out``, K columns of ``a``. ``b`` and ``bias`` have a
    dimension of gate and up (of size 1 without an activation), so that their strides tell stacked
    from interleaved rows.
    """
    parts = 1 if activation == "none" else 2
    columns = block_n // parts
    math_groups = block_m // ROWS
    math_threads = math_groups * WARPGROUP
    vector = VECTOR_BYTES * 8 // T.dtype(out_dtype).bits
    chunk = CHUNK_BYTES * 8 // T.dtype(out_dtype).bits
    vectors = chunk // vector

    slabs, rows, num_experts, width, depth, lines = T.dynamic("G, M, E, N, K, lines")
    a_slab, a_row = T.dynamic("a_slab, a_row", T.int64)
    b_expert, b_part, b_row = T.dynamic("b_expert, b_part, b_row", T.int64)
    bias_expert, bias_part, bias_row = T.dynamic("bias_expert, bias_part, bias_row", T.int64)
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
        bias,
        out,
        tiles,
        count,
        start,
        step,
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
                        bias_tile[group, at] = T.Cast(
                            T.float32,
                            bias[
                                expert,
                                T.truncdiv(at, columns),
                                T.min(column + T.truncmod(at, columns), width - 1),
                            ],
                        )
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
                            value[i, j] = _gated(value[i, j], up[i, j], activation)
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
        b: T.StridedTensor[(num_experts, parts, width, depth), (b_expert, b_part, b_row, 1), dtype],
        bias: T.StridedTensor[
            (num_experts, parts, width), (bias_expert, bias_part, bias_row), dtype
        ],
        out: T.StridedTensor[(slabs, rows, width), (out_slab, out_row, 1), out_dtype],
        tiles: T.Tensor[(lines, FIELDS), T.int32],
        num_blocks: T.int32,
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
                        for part in T.unroll(parts):
                            T.tma_copy(
                                b[
                                    expert,
                                    part,
                                    block * columns : (block + 1) * columns,
                                    k * block_k : (k + 1) * block_k,
                                ],
                                b_ring[turn % stages, part * columns : (part + 1) * columns, :],
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
                    bias,
                    out,
                    tiles,
                    count,
                    start,
                    num_blocks,
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
                    bias,
                    out,
                    tiles,
                    count,
                    start,
                    num_blocks,
                )

    return grouped_gemm


def _view(x: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Reinterpret ``x``; a dimension of size 1 gets a stride that a TMA descriptor takes."""
    usable = [8 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)]
    return x.as_strided(sizes, usable)


def _slabs(x: torch.Tensor) -> torch.Tensor:
    """View expert rows, a matrix or slabs, as slabs."""
    if x.ndim == 3:
        return _view(x, x.shape, x.stride())
    return _view(x, (1, *x.shape), (0, *x.stride()))


def _parts(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """View ``b`` or ``bias`` with a dimension of gate and up after that of the experts."""
    num_experts, rows, *rest = x.shape
    expert, row, *inner = x.stride()
    if activation is None:
        return _view(x, (num_experts, 1, rows, *rest), (expert, 0, row, *inner))
    half = rows // 2
    part, row = (row, 2 * row) if activation == "swigluoai" else (half * row, row)
    return _view(x, (num_experts, 2, half, *rest), (expert, part, row, *inner))


def moe_grouped_gemm_fwd(
    a: torch.Tensor,
    b: torch.Tensor,
    layout_metadata: torch.Tensor,
    bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: str | None,
    *,
    target: str,
    out: torch.Tensor,
) -> None:
    """Run the kernel on ``a``'s device and its current stream; see ``MoEGroupedGemmFwdOp``."""
    num_experts, rows = b.shape[0], a.shape[-2]
    if out.numel() == 0 or num_experts == 0:
        return
    tile = pick_gemm(a.shape[:-1].numel(), num_experts)
    kernel = build(
        str(a.dtype).removeprefix("torch."),
        str(out.dtype).removeprefix("torch."),
        activation or "none",
        bias is not None,
        tile.block_m,
        tile.block_n,
        tile.block_k,
        tile.stages,
    )
    # TileLang makes the device of the arguments current and leaves it so
    with torch.cuda.device(a.device):
        tiles = grouped_gemm_tiles(layout_metadata, layout, rows, num_experts, tile.block_m)
        kernel(
            _slabs(a),
            _parts(b, activation),
            None if bias is None else _parts(bias, activation),
            _slabs(out),
            tiles,
            sm_count(a.device),
        )


def refuse(
    a: torch.Tensor,
    b: torch.Tensor,
    layout_metadata: torch.Tensor,
    bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: str | None,
    *,
    target: str,
    out: torch.Tensor,
) -> str | None:
    """Return why the kernel cannot serve a call, or None."""
    if a.device.type != "cuda":
        return f"takes tensors on a CUDA device, got {a.device}"
    if capability(a.device) != (9, 0):
        return f"needs compute capability (9, 0), {a.device} has {capability(a.device)}"
    if a.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"takes bfloat16 and float16, got {a.dtype}; float32 would run as TF32: "
            "target='reference' takes it"
        )
    if not has_compiler():
        return "finds no nvcc; install CUDA's compiler or set CUDA_HOME"
    depth, width = a.shape[-1], out.shape[-1]
    if depth % 8 or width % 8:
        return (
            f"takes widths that are multiples of 8 (16 bytes), got K = {depth} and {width} columns "
            "of out"
        )
    for name, x in (("a", a), ("b", b), ("out", out)):
        if x.data_ptr() % 16:
            return f"{name} must start at a multiple of 16 bytes, got address {x.data_ptr():#x}"
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size > 1 and (stride == 0 or stride * x.element_size() % 16):
                return (
                    f"{name} must have strides that are multiples of 16 bytes and not 0 (the last "
                    f"one apart), got strides {x.stride()} of {x.dtype}"
                )
    return None
