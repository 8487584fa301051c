"""Grouped GEMM on the CPU: chunks of an expert's rows against the columns of a thread.

A kernel call takes a range of columns and all experts, so skewed routing costs no balance. For
each chunk of rows it widens ``a`` once, into a workspace that stays in the second-level cache, and
passes over the weights of its columns once, in the tiles of ``tile.py``. Bias, activation and the
rounding follow while the sums are in the first-level cache. With FP8, the sum of each block of K
gets its scales before it is added.
"""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import ACTIVATIONS, CODES, as_arguments
from tileops.kernels.cpu.floats import (
    E4M3,
    FLOAT32,
    FORMATS,
    any_floats,
    floats,
    narrow,
    strides,
    view,
    widen,
)
from tileops.kernels.cpu.threads import parallel
from tileops.kernels.cpu.tile import PRELUDE, Tile, dot, scaled_dot
from tileops.layouts import MaskedLayoutSpec

_GROUP = 16  # blocks of columns between two epilogues
_CHUNK_ROWS = 64  # most rows that are widened at a time
_CHUNK_BYTES = 1 << 19  # of them: half of a second-level cache of the smaller kind
_THREAD_FLOPS = 1 << 20  # least work that pays for a thread

_PSUM, _PER_ROW, _MASKED = 0, 1, 2


@compiler.jit
def build(fmt: int, words: bool, level: str, lanes: int, tile_m: int, tile_n: int):
    """Build the kernel of one operand format; everything else is an argument of the call.

    Letters: E experts, M rows (of one expert in a slab), N columns of ``out``, K reduction.

    A block is ``tile_n`` weight rows, in two halves. Without a gate, the second half follows the
    first, and ``up`` is ``gate``; with one, it is the up rows that belong to the gate rows.

    Args:
        fmt: Format of the operands, of ``floats``. With e4m3 they have scales.
        words: Read weights in 32-bit words, which needs rows that start on a word.
        level: Name of the vector level.
        lanes: Float32 values in a vector.
        tile_m: Rows of the tile, a power of two.
        tile_n: Columns of the tile, even.
    """
    tile = Tile(fmt, words, lanes, tile_m, tile_n)
    scaled = fmt == E4M3
    tiles = {height: (scaled_dot if scaled else dot)(tile, height) for height in tile.heights}
    bias_formats = FORMATS.values() if scaled else (fmt,)
    out_formats = FORMATS.values() if scaled else {fmt, FLOAT32}
    step, half, width = tile.step, tile_n // 2, _GROUP * tile_n

    @T.macro
    def widen_last(source, start, target, row, left, K):
        """Widen the elements past the last whole step, and fill up with zeros."""
        for s in T.serial(step):
            target[row, left + s] = T.float32(0)
            if K // step * step + tile.element(s) < K:
                target[row, left + s] = widen(
                    source[start + K // step * step + tile.element(s)], fmt
                )

    @T.prim_func
    def kernel(
        a_address: T.Tensor[(1,), T.uint8],
        gate_address: T.Tensor[(1,), T.uint8],
        up_address: T.Tensor[(1,), T.uint8],
        gate_bias_address: T.Tensor[(1,), T.uint8],
        up_bias_address: T.Tensor[(1,), T.uint8],
        metadata_address: T.Tensor[(1,), T.uint8],
        out_address: T.Tensor[(1,), T.uint8],
        a_scale_address: T.Tensor[(1,), T.uint8],
        gate_scale_address: T.Tensor[(1,), T.uint8],
        up_scale_address: T.Tensor[(1,), T.uint8],
        tail_address: T.Tensor[(1,), T.uint8],
        sums_address: T.Tensor[(1,), T.uint8],
        wide_address: T.Tensor[(1,), T.uint8],
        E: T.int64,
        M: T.int64,
        N: T.int64,
        K: T.int64,
        a_expert: T.int64,
        a_row: T.int64,
        gate_expert: T.int64,
        gate_row: T.int64,
        up_expert: T.int64,
        up_row: T.int64,
        gate_bias_expert: T.int64,
        gate_bias_column: T.int64,
        up_bias_expert: T.int64,
        up_bias_column: T.int64,
        out_expert: T.int64,
        out_row: T.int64,
        S: T.int64,
        a_scale_expert: T.int64,
        a_scale_row: T.int64,
        a_scale_block: T.int64,
        gate_scale_expert: T.int64,
        gate_scale_row: T.int64,
        gate_scale_block: T.int64,
        up_scale_expert: T.int64,
        up_scale_row: T.int64,
        up_scale_block: T.int64,
        has_gate_bias: T.int32,
        has_up_bias: T.int32,
        layout: T.int32,
        activation: T.int32,
        alpha: T.float64,
        beta: T.float64,
        limit: T.float64,
        units: T.int64,
        bias_fmt: T.int32,
        out_fmt: T.int32,
        chunk: T.int64,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        padded = (K + step - 1) // step * step
        a = floats(a_address, (E * M * K,), fmt)
        # strides of weights count elements, or words
        gate = floats(gate_address, (E * N * K,), fmt)
        up = floats(up_address, (E * N * K,), fmt)
        first = view(gate_address, (E * N * K,), T.int32) if words else gate
        second = view(up_address, (E * N * K,), T.int32) if words else up
        gate_bias = any_floats(gate_bias_address, (E, N), (gate_bias_expert, gate_bias_column))
        up_bias = any_floats(up_bias_address, (E, N), (up_bias_expert, up_bias_column))
        metadata = view(metadata_address, (T.max(E, M),), T.int32)
        out = any_floats(out_address, (E, M, N), (out_expert, out_row, 1))
        a_scale = floats(a_scale_address, (E * M * K,), FLOAT32)
        gate_scale = floats(gate_scale_address, (E * S * K,), FLOAT32)
        up_scale = floats(up_scale_address, (E * S * K,), FLOAT32)
        tail = floats(tail_address, (tile_n, step), FLOAT32)
        sums = floats(sums_address, (_CHUNK_ROWS, width), FLOAT32)
        wide = floats(wide_address, (chunk, padded), FLOAT32)
        with T.Kernel(1, prelude=PRELUDE) as _:
            acc = T.alloc_local((tile_m * tile_n * lanes,), T.float32)
            fold = T.alloc_local((tile_m * tile_n * lanes // 2,), T.float32)
            scratch = T.alloc_local((4,), T.float64)
            starts = T.alloc_local((2 * tile_n,), T.int64)
            scales_at = T.alloc_local((tile_n,), T.int64)
            end = T.alloc_var(T.int64, init=0)
            expert = T.alloc_var(T.int64)
            top = T.alloc_var(T.int64)
            count = T.alloc_var(T.int64)
            row = T.alloc_var(T.int64)
            # where the second half of a block's columns goes among the sums
            apart = T.if_then_else(units == half, T.int64(width // 2), T.int64(half))
            for g in T.serial(T.if_then_else(layout == _PER_ROW, M, E)):
                expert = g
                if layout == _PSUM:
                    top = end
                    end = T.max(end, T.min(T.cast(metadata[g], "int64"), M))
                    count = end - top
                elif layout == _MASKED:
                    top = 0
                    count = T.max(T.int64(0), T.min(T.cast(metadata[g], "int64"), M))
                else:
                    # a run of equal labels starts here, or nothing does
                    expert = metadata[g]
                    top = g
                    count = 0
                    before = metadata[T.max(g - 1, T.int64(0))]
                    if expert >= 0 and expert < E and (g == 0 or before != metadata[g]):
                        count = 1
                        while top + count < M and metadata[top + count] == metadata[g]:
                            count += 1
                for c in T.serial((count + chunk - 1) // chunk):
                    rows = T.min(chunk, count - c * chunk)
                    for i in T.serial(rows):
                        start = expert * a_expert + (top + i) * a_row
                        for k in T.serial(K // step):
                            for s in T.serial(step):
                                wide[i, k * step + s] = widen(
                                    a[start + k * step + tile.element(s)], fmt
                                )
                        if K % step != 0:
                            widen_last(a, start, wide, i, K // step * step, K)
                    for group in T.serial((hi - lo + _GROUP - 1) // _GROUP):
                        block = lo + group * _GROUP
                        blocks = T.min(T.int64(_GROUP), hi - block)
                        for q in T.serial(blocks):
                            for side, strides_of in enumerate(
                                ((gate_expert, gate_row), (up_expert, up_row))
                            ):
                                for j in T.unroll(side * half, side * half + half, explicit=True):
                                    # past the last column: compute that one again, and drop it
                                    column = (block + q) * units + side * (units - half) + j % half
                                    start = expert * strides_of[0]
                                    starts[j] = start + T.min(column, N - 1) * strides_of[1]
                                    starts[tile_n + j] = starts[j] + units * strides_of[1]
                            if scaled:
                                for side, strides_of in enumerate(
                                    (
                                        (gate_scale_expert, gate_scale_row),
                                        (up_scale_expert, up_scale_row),
                                    )
                                ):
                                    for j in T.serial(side * half, side * half + half):
                                        column = (block + q) * units + side * (units - half)
                                        column = T.min(column + j % half, N - 1)
                                        start = expert * strides_of[0]
                                        scales_at[j] = start + column * S // N * strides_of[1]
                            elif K % step != 0:
                                for side, source in enumerate((gate, up)):
                                    for j in T.serial(side * half, side * half + half):
                                        start = starts[j] * tile.parts
                                        widen_last(source, start, tail, j, 0, K)
                            row = 0
                            for height, dot_products in tiles.items():
                                while row + height <= rows:
                                    if scaled:
                                        dot_products(
                                            *(acc, fold, first, second, starts, wide, row),
                                            *(sums, q * units, apart, K, a_scale),
                                            expert * a_scale_expert + top * a_scale_row,
                                            *(a_scale_row, a_scale_block),
                                            *(gate_scale, up_scale, scales_at),
                                            *(gate_scale_block, up_scale_block),
                                        )
                                    else:
                                        dot_products(
                                            *(acc, fold, first, second, starts, tail, wide, row),
                                            *(sums, q * units, apart, K),
                                        )
                                    row += height
                        left = block * units
                        ready = T.min(blocks * units, N - left)
                        for i in T.serial(rows):
                            for f in bias_formats:
                                if has_gate_bias != 0 and bias_fmt == f:
                                    for u in T.serial(ready):
                                        sums[i, u] += widen(gate_bias[f][expert, left + u], f)
                                if has_up_bias != 0 and bias_fmt == f:
                                    for u in T.serial(ready):
                                        value = widen(up_bias[f][expert, left + u], f)
                                        sums[i, width // 2 + u] += value
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
                            for f in out_formats:
                                if out_fmt == f:
                                    for u in T.serial(ready):
                                        value = narrow(sums[i, u], f)
                                        out[f][expert, top + i, left + u] = value
                    top += rows

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def _in_words(weights: torch.Tensor) -> bool:
    """Say whether each row of narrow weights starts on a 32-bit word."""
    # strides that no index reaches may be anything
    reached = [s for s, n in zip(strides(weights), weights.shape, strict=False) if n > 1]
    size = weights.element_size()
    return weights.data_ptr() % 4 == 0 and not any(s * size % 4 for s in reached)


def moe_grouped_gemm_fwd(
    a, gate, up, layout_metadata, gate_bias, up_bias, layout, activation, *, target, out
) -> None:
    """Multiply each expert's rows of ``a`` by its weights into ``out``; leave other rows alone.

    Every size and stride is read here and passed on: a dtype has one kernel, and a second one for
    narrow weights whose rows do not all start on a 32-bit word.
    """
    operands = a, gate, up, layout_metadata, gate_bias, up_bias
    _multiply(FORMATS[a.dtype], operands, (None, None, None), layout, activation, out)


def moe_grouped_gemm_fp8_fwd(
    a,
    a_scale,
    gate,
    gate_scale,
    up,
    up_scale,
    layout_metadata,
    gate_bias,
    up_bias,
    layout,
    activation,
    *,
    target,
    out,
) -> None:
    """Multiply FP8 operands whose blocks of K have scales, as ``moe_grouped_gemm_fwd`` does."""
    operands = a, gate, up, layout_metadata, gate_bias, up_bias
    scales = a_scale, gate_scale, gate_scale if up is None else up_scale
    _multiply(E4M3, operands, scales, layout, activation, out)


def _multiply(fmt: int, operands, scales, layout, activation, out: torch.Tensor) -> None:
    """Run the kernel of a format of ``floats`` on the threads."""
    if out.numel() == 0:
        return
    a, gate, up, layout_metadata, *biases = operands
    level = compiler.level()
    (E, N, K), M = gate.shape, a.shape[-2]
    weights = (gate, gate if up is None else up)
    words = fmt != FLOAT32 and all(_in_words(x) for x in weights)
    tile = Tile(fmt, words, level.lanes, level.tile_m, level.tile_n)
    kernel = build(fmt, words, level.name, level.lanes, level.tile_m, level.tile_n)

    kind, lead = _MASKED, ()
    if not isinstance(layout, MaskedLayoutSpec):
        kind, lead = (_PSUM if layout.metadata == "physical_psum" else _PER_ROW), (0,)
    units = tile.columns if up is None else tile.columns // 2  # columns of ``out`` in a block
    padded = -(-K // tile.step) * tile.step
    chunk = min(_CHUNK_ROWS, max(tile.rows, _CHUNK_BYTES // (4 * max(padded, 1))))
    chunk -= chunk % tile.rows
    sizes = [tile.columns * n for n in (tile.step, _CHUNK_ROWS * _GROUP)] + [min(chunk, M) * padded]
    addresses = [0 if x is None else x.data_ptr() for x in (a, *weights, *biases)]
    addresses += layout_metadata.data_ptr(), out.data_ptr()
    addresses += [0 if x is None else x.data_ptr() for x in scales]
    scale_numbers = [0] * 10
    if scales[0] is not None:
        a_scale, gate_scale, up_scale = scales
        scale_numbers = [gate_scale.shape[1], *lead, *a_scale.stride()]
        scale_numbers += *gate_scale.stride(), *up_scale.stride()
    bias_fmt = next((FORMATS[x.dtype] for x in biases if x is not None), FLOAT32)
    numbers = (
        *(E, M, N, K, *lead, *strides(a)),
        *(s // tile.parts for x in weights for s in strides(x)),
        *(s for x in biases for s in ((0, 0) if x is None else x.stride())),
        *(*lead, *strides(out), *scale_numbers),
        *(int(x is not None) for x in biases),
        *(kind, *as_arguments(activation)),
        *(units, bias_fmt, FORMATS[out.dtype], chunk),
    )

    def columns(lo: int, hi: int) -> None:
        workspace = [torch.empty(size, dtype=torch.float32) for size in sizes]
        kernel(*addresses, *(part.data_ptr() for part in workspace), *numbers, lo, hi)

    flops = 2 * max(K, 1) * tile.columns * (out.numel() // N)
    parallel(-(-N // units), -(-_THREAD_FLOPS // flops), columns)
