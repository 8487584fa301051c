"""Grouped GEMM with packed integer weights on the CPU: dequantised a few columns at a time.

The schedule is that of ``grouped_gemm.py``: a call takes a range of columns and all experts, in
chunks of an expert's rows. The weights of a block of columns are dequantised once for a chunk, into
a workspace that stays in the first-level cache, and multiplied from there. Of 4-bit codes a byte
holds two neighbours: the workspace has the even ones of a step first and then the odd ones, and so
have the widened rows of ``a``.
"""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import ACTIVATIONS, CODES, as_arguments
from tileops.kernels.cpu.floats import FLOAT32, FORMATS, floats, narrow, view, widen
from tileops.kernels.cpu.threads import parallel
from tileops.kernels.cpu.tile import PRELUDE, Tile, dot

_GROUP = 16  # blocks of columns between two epilogues
_CHUNK_ROWS = 64  # most rows that are widened at a time
_CHUNK_BYTES = 1 << 19  # of them: half of a second-level cache of the smaller kind
_THREAD_FLOPS = 1 << 20  # least work that pays for a thread

_NOTHING, _ROWS, _BLOCKS = 0, 1, 2  # what zero points are packed along


@compiler.jit
def build(fmt: int, bits: int, level: str, lanes: int, tile_m: int, tile_n: int):
    """Build the kernel of one operand format and weight width; the rest are run-time values.

    Letters: E experts, M rows, N columns of ``out``, K reduction, G blocks of a row that share a
    scale, each of ``size`` columns.

    Column n of ``out`` is made of row ``n * row_step`` of the weights and, with a gate, of the row
    ``row_apart`` further on.

    Args:
        fmt: Format of ``a``, the biases and ``out``, of ``floats.FORMATS``.
        bits: Of a weight.
        level: Name of the vector level.
        lanes: Float32 values in a vector.
        tile_m: Rows of the tile, a power of two.
        tile_n: Columns of the tile, even.
    """
    tile = Tile(FLOAT32, False, lanes, tile_m, tile_n)
    tiles = {height: dot(tile, height) for height in tile.heights}
    order = Tile(FLOAT32, bits == 4, lanes, tile_m, tile_n)
    step, half, width = order.step, tile_n // 2, _GROUP * tile_n
    per_byte = 8 // bits

    def code(byte, place):
        """Return the code at a place in a byte."""
        return (T.cast(byte, "int32") >> T.cast(place * bits, "int32")) & ((1 << bits) - 1)

    @T.macro
    def dequantise(b, start, weights, j, g, lo, hi, point, scale):
        """Write the whole steps of columns ``[lo, hi)`` of a row to line ``j``."""
        for k in T.serial(lo // step, hi // step):
            for place in T.unroll(per_byte, explicit=True):
                for lane in T.serial(lanes):
                    byte = b[start + k * lanes + lane]
                    weights[j, k * step + place * lanes + lane] = (
                        T.cast(code(byte, place) - point, "float32") * scale
                    )

    @T.prim_func
    def kernel(
        a_address: T.Tensor[(1,), T.uint8],
        b_address: T.Tensor[(1,), T.uint8],
        scales_address: T.Tensor[(1,), T.uint8],
        points_address: T.Tensor[(1,), T.uint8],
        ends_address: T.Tensor[(1,), T.uint8],
        bias_address: T.Tensor[(1,), T.uint8],
        out_address: T.Tensor[(1,), T.uint8],
        weights_address: T.Tensor[(1,), T.uint8],
        sums_address: T.Tensor[(1,), T.uint8],
        wide_address: T.Tensor[(1,), T.uint8],
        E: T.int64,
        M: T.int64,
        N: T.int64,
        K: T.int64,
        G: T.int64,
        size: T.int64,
        row_step: T.int64,
        row_apart: T.int64,
        a_row: T.int64,
        b_expert: T.int64,
        b_row: T.int64,
        scale_expert: T.int64,
        scale_row: T.int64,
        scale_group: T.int64,
        point_expert: T.int64,
        point_row: T.int64,
        bias_expert: T.int64,
        out_row: T.int64,
        points_along: T.int32,
        has_bias: T.int32,
        full_scales: T.int32,
        activation: T.int32,
        alpha: T.float64,
        beta: T.float64,
        limit: T.float64,
        units: T.int64,
        chunk: T.int64,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        whole = K // step * step
        padded = (K + step - 1) // step * step
        rows_of_b = (N - 1) * row_step + row_apart + 1
        a = floats(a_address, (M, K), fmt, (a_row, 1))
        b = view(b_address, (E * rows_of_b * K,), T.uint8)
        scale_strides = scale_expert, scale_row, scale_group
        scales = floats(scales_address, (E, rows_of_b, G), FLOAT32, scale_strides)
        narrow_scales = floats(scales_address, (E, rows_of_b, G), fmt, scale_strides)
        points = view(points_address, (E * rows_of_b * G,), T.uint8)
        ends = view(ends_address, (E,), T.int32)
        bias = floats(bias_address, (E, rows_of_b), fmt, (bias_expert, 1))
        out = floats(out_address, (M, N), fmt, (out_row, 1))
        weights = floats(weights_address, (tile_n, padded), FLOAT32)
        flat = floats(weights_address, (tile_n * padded,), FLOAT32)
        sums = floats(sums_address, (_CHUNK_ROWS, width), FLOAT32)
        wide = floats(wide_address, (chunk, padded), FLOAT32)
        with T.Kernel(1, prelude=PRELUDE) as _:
            acc = T.alloc_local((tile_m * tile_n * lanes,), T.float32)
            fold = T.alloc_local((tile_m * tile_n * lanes // 2,), T.float32)
            scratch = T.alloc_local((4,), T.float64)
            starts = T.alloc_local((2 * tile_n,), T.int64)
            end = T.alloc_var(T.int64, init=0)
            top = T.alloc_var(T.int64)
            row = T.alloc_var(T.int64)
            start = T.alloc_var(T.int64)
            point = T.alloc_var(T.int32)
            scale = T.alloc_var(T.float32)
            # where the second half of a block's columns goes among the sums
            apart = T.if_then_else(units == half, T.int64(width // 2), T.int64(half))
            for j in T.unroll(tile_n, explicit=True):
                starts[j] = j * padded
                starts[tile_n + j] = j * padded
            for expert in T.serial(E):
                top = end
                end = T.max(end, T.min(T.cast(ends[expert], "int64"), M))
                count = end - top
                for c in T.serial((count + chunk - 1) // chunk):
                    rows = T.min(chunk, count - c * chunk)
                    for i in T.serial(rows):
                        for k in T.serial(K // step):
                            for s in T.serial(step):
                                wide[i, k * step + s] = widen(
                                    a[top + i, k * step + order.element(s)], fmt
                                )
                        if whole < K:
                            for s in T.serial(step):
                                wide[i, whole + s] = T.float32(0)
                                if whole + order.element(s) < K:
                                    wide[i, whole + s] = widen(
                                        a[top + i, whole + order.element(s)], fmt
                                    )
                    for group in T.serial((hi - lo + _GROUP - 1) // _GROUP):
                        block = lo + group * _GROUP
                        blocks = T.min(T.int64(_GROUP), hi - block)
                        for q in T.serial(blocks):
                            for j in T.serial(tile_n):
                                # past the last column: compute that one again, and drop it
                                column = T.min(
                                    (block + q) * units + j // half * (units - half) + j % half,
                                    N - 1,
                                )
                                row = column * row_step + j // half * row_apart
                                start = expert * b_expert + row * b_row
                                for g in T.serial(G):
                                    scale = T.float32(0)
                                    if full_scales != 0:
                                        scale = scales[expert, row, g]
                                    else:
                                        scale = widen(narrow_scales[expert, row, g], fmt)
                                    point = 1 << (bits - 1)
                                    if points_along != _NOTHING:
                                        at = T.if_then_else(
                                            points_along == _ROWS, row, T.cast(g, "int64")
                                        )
                                        point = code(
                                            points[
                                                expert * point_expert
                                                + row * point_row
                                                + at // per_byte
                                            ],
                                            at % per_byte,
                                        )
                                    dequantise(
                                        *(b, start, weights, j, g, g * size),
                                        *(T.min(K, (g + 1) * size), point, scale),
                                    )
                                if whole < K:  # in the last block, of the last scale
                                    for s in T.serial(step):
                                        weights[j, whole + s] = T.float32(0)
                                        column_of = whole + order.element(s)
                                        if column_of < K:
                                            weights[j, whole + s] = (
                                                T.cast(
                                                    code(
                                                        b[start + column_of // per_byte],
                                                        column_of % per_byte,
                                                    )
                                                    - point,
                                                    "float32",
                                                )
                                                * scale
                                            )
                            row = 0
                            for height, dot_products in tiles.items():
                                while row + height <= rows:
                                    dot_products(
                                        *(acc, fold, flat, flat, starts, weights, wide, row),
                                        *(sums, q * units, apart, padded),
                                    )
                                    row += height
                        left = block * units
                        ready = T.min(blocks * units, N - left)
                        for i in T.serial(rows):
                            if has_bias != 0:
                                for u in T.serial(ready):
                                    sums[i, u] += widen(bias[expert, (left + u) * row_step], fmt)
                                if units == half:
                                    for u in T.serial(ready):
                                        sums[i, width // 2 + u] += widen(
                                            bias[expert, (left + u) * row_step + row_apart], fmt
                                        )
                            for name, activate in ACTIVATIONS.items():
                                if activation == CODES[name]:
                                    for u in T.serial(ready):
                                        activate(
                                            T.cast(sums[i, u], "float64"),
                                            T.cast(sums[i, width // 2 + u], "float64"),
                                            (alpha, beta, limit),
                                            scratch,
                                        )
                                        sums[i, u] = T.cast(scratch[0], "float32")
                            for u in T.serial(ready):
                                out[top + i, left + u] = narrow(sums[i, u], fmt)
                    top += rows

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def moe_grouped_gemm_int_fwd(
    a, b, scales, zero_points, ends, bias, order, activation, bits, block_size, *, target, out
) -> None:
    """Multiply each expert's rows of ``a`` by its dequantised weights into ``out``."""
    if out.numel() == 0:
        return
    level, (M, K), (E, N) = compiler.level(), a.shape, (b.shape[0], out.shape[1])
    kernel = build(FORMATS[a.dtype], bits, level.name, level.lanes, level.tile_m, level.tile_n)
    gated = order != "plain"
    row_step, row_apart = {"plain": (1, 0), "interleaved": (2, 1), "halves": (1, N)}[order]
    units = level.tile_n // 2 if gated else level.tile_n  # columns of ``out`` in a block
    step = level.lanes * (8 // bits)
    padded = -(-K // step) * step
    chunk = min(_CHUNK_ROWS, max(level.tile_m, _CHUNK_BYTES // (4 * max(padded, 1))))
    chunk -= chunk % level.tile_m
    sizes = level.tile_n * padded, _CHUNK_ROWS * _GROUP * level.tile_n, min(chunk, M) * padded
    along = _NOTHING if zero_points is None else _BLOCKS if block_size else _ROWS
    tensors = a, b, scales, zero_points, ends, bias, out
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    numbers = (
        *(E, M, N, K, scales.shape[-1], block_size or K, row_step, row_apart),
        *(a.stride(0), *b.stride()[:2], *scales.stride()),
        *((0, 0) if zero_points is None else (*zero_points.stride()[:-1], 0)[:2]),
        *(0 if bias is None else bias.stride(0), out.stride(0)),
        *(along, int(bias is not None)),
        *(int(scales.dtype == torch.float32), *as_arguments(activation), units, chunk),
    )

    def columns(lo: int, hi: int) -> None:
        workspace = [torch.empty(size, dtype=torch.float32) for size in sizes]
        kernel(*addresses, *(part.data_ptr() for part in workspace), *numbers, lo, hi)

    flops = 2 * max(K, 1) * level.tile_n * (out.numel() // N)
    parallel(-(-N // units), -(-_THREAD_FLOPS // flops), columns)
