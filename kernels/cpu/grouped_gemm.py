"""Grouped GEMM on the CPU: chunks of an expert's rows against the columns of a thread.

A kernel call takes a range of columns and all experts, so skewed routing costs no balance. For
each chunk of rows it widens ``a`` once, into a workspace that stays in the second-level cache, and
passes over the weights of its columns once, in the tiles of ``tile.py``. Bias, activation and the
rounding follow while the sums are in the first-level cache.
"""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import ACTIVATIONS, GATED
from tileops.kernels.cpu.floats import (
    FLOAT32,
    FORMATS,
    floats,
    narrow,
    strides,
    view,
    widen,
)
from tileops.kernels.cpu.threads import parallel
from tileops.kernels.cpu.tile import PRELUDE, Tile, dot
from tileops.layouts import MaskedLayoutSpec

_GROUP = 16  # blocks of columns between two epilogues
_CHUNK_ROWS = 64  # most rows that are widened at a time
_CHUNK_BYTES = 1 << 19  # of them: half of a second-level cache of the smaller kind
_THREAD_FLOPS = 1 << 20  # least work that pays for a thread

_PSUM, _PER_ROW, _MASKED = 0, 1, 2


@compiler.jit
def build(fmt: int, pairs: bool, level: str, lanes: int, tile_m: int, tile_n: int):
    """Build the kernel of one operand format; everything else is an argument of the call.

    Letters: E experts, M rows (of one expert in a slab), N columns of ``out``, K reduction.

    A block is ``tile_n`` rows of ``b``, in two halves. Without an activation the second follows the
    first; with one, the first half is gate rows and the second the up rows that belong to them.

    Args:
        fmt: Format of the operands, of ``floats.FORMATS``.
        pairs: Read ``b`` in 32-bit words, which needs rows that start on a word.
        level: Name of the vector level.
        lanes: Float32 values in a vector.
        tile_m: Rows of the tile, a power of two.
        tile_n: Columns of the tile, even.
    """
    tile = Tile(fmt, pairs, lanes, tile_m, tile_n)
    tiles = {height: dot(tile, height) for height in tile.heights}
    step, half, width = tile.step, tile_n // 2, _GROUP * tile_n

    @T.macro
    def widen_last(source, x, y, target, row, left, K):
        """Widen the elements past the last whole step, and fill up with zeros."""
        for s in T.serial(step):
            target[row, left + s] = T.float32(0)
            if K // step * step + tile.element(s) < K:
                target[row, left + s] = widen(source[x, y, K // step * step + tile.element(s)], fmt)

    @T.prim_func
    def kernel(
        a_address: T.Tensor[(1,), T.uint8],
        b_address: T.Tensor[(1,), T.uint8],
        bias_address: T.Tensor[(1,), T.uint8],
        metadata_address: T.Tensor[(1,), T.uint8],
        out_address: T.Tensor[(1,), T.uint8],
        tail_address: T.Tensor[(1,), T.uint8],
        sums_address: T.Tensor[(1,), T.uint8],
        wide_address: T.Tensor[(1,), T.uint8],
        E: T.int64,
        M: T.int64,
        N: T.int64,
        K: T.int64,
        a_expert: T.int64,
        a_row: T.int64,
        b_expert: T.int64,
        b_row: T.int64,
        bias_expert: T.int64,
        out_expert: T.int64,
        out_row: T.int64,
        units: T.int64,
        spread: T.int64,
        spacing: T.int64,
        up: T.int64,
        layout: T.int32,
        activation: T.int32,
        has_bias: T.int32,
        is_full: T.int32,
        chunk: T.int64,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags())
        padded = (K + step - 1) // step * step
        a = floats(a_address, (E, M, K), fmt, (a_expert, a_row, 1))
        b = floats(b_address, (E, N * 2, K), fmt, (b_expert, b_row, 1))
        words = view(b_address, (E, N * 2, K // 2), T.int32, (b_expert // 2, b_row // 2, 1))
        bias = floats(bias_address, (E, N * 2), fmt, (bias_expert, 1))
        metadata = view(metadata_address, (T.max(E, M),), T.int32)
        out = floats(out_address, (E, M, N), fmt, (out_expert, out_row, 1))
        full = floats(out_address, (E, M, N), FLOAT32, (out_expert, out_row, 1))
        tail = floats(tail_address, (tile_n, step), FLOAT32)
        sums = floats(sums_address, (_CHUNK_ROWS, width), FLOAT32)
        wide = floats(wide_address, (chunk, padded), FLOAT32)
        with T.Kernel(1, prelude=PRELUDE) as _:
            acc = T.alloc_local((tile_m * tile_n * lanes,), T.float32)
            fold = T.alloc_local((tile_m * tile_n * lanes // 2,), T.float32)
            scratch = T.alloc_local((4,), T.float64)
            columns = T.alloc_local((tile_n,), T.int64)
            end = T.alloc_var(T.int64, init=0)
            expert = T.alloc_var(T.int64)
            first = T.alloc_var(T.int64)
            count = T.alloc_var(T.int64)
            row = T.alloc_var(T.int64)
            # where the second half of a block's columns goes among the sums
            second = T.if_then_else(activation == 0, T.int64(half), T.int64(width // 2))
            for g in T.serial(T.if_then_else(layout == _PER_ROW, M, E)):
                expert = g
                if layout == _PSUM:
                    first = end
                    end = T.max(end, T.min(T.cast(metadata[g], "int64"), M))
                    count = end - first
                elif layout == _MASKED:
                    first = 0
                    count = T.max(T.int64(0), T.min(T.cast(metadata[g], "int64"), M))
                else:
                    # a run of equal labels starts here, or nothing does
                    expert = metadata[g]
                    first = g
                    count = 0
                    before = metadata[T.max(g - 1, T.int64(0))]
                    if expert >= 0 and expert < E and (g == 0 or before != metadata[g]):
                        count = 1
                        while first + count < M and metadata[first + count] == metadata[g]:
                            count += 1
                for c in T.serial((count + chunk - 1) // chunk):
                    top = first + c * chunk
                    rows = T.min(chunk, count - c * chunk)
                    for i in T.serial(rows):
                        for k in T.serial(K // step):
                            for s in T.serial(step):
                                wide[i, k * step + s] = widen(
                                    a[expert, top + i, k * step + tile.element(s)], fmt
                                )
                        if K % step != 0:
                            widen_last(a, expert, top + i, wide, i, K // step * step, K)
                    for group in T.serial((hi - lo + _GROUP - 1) // _GROUP):
                        block = lo + group * _GROUP
                        blocks = T.min(T.int64(_GROUP), hi - block)
                        for q in T.serial(blocks):
                            for j in T.unroll(tile_n, explicit=True):
                                # past the last column: compute that one again, and drop it
                                column = (block + q) * units + j // half * spread + j % half
                                columns[j] = T.min(column, N - 1) * spacing + j // half * up
                            if K % step != 0:
                                for j in T.serial(tile_n):
                                    widen_last(b, expert, columns[j], tail, j, 0, K)
                            row = 0
                            for height, dot_products in tiles.items():
                                while row + height <= rows:
                                    dot_products(
                                        *(acc, fold, b, words, expert, columns, units * spacing),
                                        *(tail, wide, row, sums, q * units, second, K),
                                    )
                                    row += height
                        left = block * units
                        ready = T.min(blocks * units, N - left)
                        for i in T.serial(rows):
                            if has_bias != 0:
                                for u in T.serial(ready):
                                    sums[i, u] += widen(bias[expert, (left + u) * spacing], fmt)
                                if activation != 0:
                                    for u in T.serial(ready):
                                        sums[i, width // 2 + u] += widen(
                                            bias[expert, (left + u) * spacing + up], fmt
                                        )
                            for code, activate in GATED.items():
                                if activation == code:
                                    for u in T.serial(ready):
                                        activate(
                                            T.cast(sums[i, u], "float64"),
                                            T.cast(sums[i, width // 2 + u], "float64"),
                                            scratch,
                                        )
                                        sums[i, u] = T.cast(scratch[0], "float32")
                            if is_full != 0:
                                for u in T.serial(ready):
                                    full[expert, top + i, left + u] = sums[i, u]
                            else:
                                for u in T.serial(ready):
                                    out[expert, top + i, left + u] = narrow(sums[i, u], fmt)

    return kernel


def refuse(a, b, layout_metadata, bias, layout, activation, target, out) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def moe_grouped_gemm_fwd(a, b, layout_metadata, bias, layout, activation, target, out) -> None:
    """Multiply each expert's rows of ``a`` by its weights into ``out``; leave other rows alone.

    Every size and stride is read here and passed on: a dtype has one kernel, and a second one for
    16-bit weights whose rows do not all start on a 32-bit word.
    """
    if out.numel() == 0:
        return
    fmt, level = FORMATS[a.dtype], compiler.level()
    (E, rows_of_b, K), M, N = b.shape, a.shape[-2], out.shape[-1]
    if isinstance(layout, MaskedLayoutSpec):
        kind, lead = _MASKED, (*strides(a), *strides(b))
    else:
        kind = _PSUM if layout.metadata == "physical_psum" else _PER_ROW
        lead = (0, *strides(a), *strides(b))
    # strides that no index reaches may be anything
    words = [s for s, n in zip(strides(b), (E, rows_of_b), strict=True) if n > 1]
    pairs = fmt != FLOAT32 and b.data_ptr() % 4 == 0 and not any(s % 2 for s in words)
    tile = Tile(fmt, pairs, level.lanes, level.tile_m, level.tile_n)
    kernel = build(fmt, pairs, level.name, level.lanes, level.tile_m, level.tile_n)

    # columns of out that a block serves, and how far its second half is from the first in them;
    # then rows of b: from one column to the next, and from a gate to its up
    half = tile.columns // 2
    units, spread, spacing, up = tile.columns, half, 1, 0
    if activation is not None:
        units, spread, spacing, up = (
            (half, 0, 2, 1) if activation == "swigluoai" else (half, 0, 1, N)
        )

    padded = -(-K // tile.step) * tile.step
    chunk = min(_CHUNK_ROWS, max(tile.rows, _CHUNK_BYTES // (4 * max(padded, 1))))
    chunk -= chunk % tile.rows
    sizes = [tile.columns * n for n in (tile.step, _CHUNK_ROWS * _GROUP)] + [min(chunk, M) * padded]
    is_full = fmt != FLOAT32 and out.dtype == torch.float32
    addresses = (
        *(a.data_ptr(), b.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(layout_metadata.data_ptr(), out.data_ptr()),
    )
    numbers = (
        *(E, M, N, K, *lead, 0 if bias is None else bias.stride(0)),
        *((0, *strides(out)) if kind != _MASKED else strides(out)),
        *(units, spread, spacing, up, kind, ACTIVATIONS[activation]),
        *(int(bias is not None), int(is_full), chunk),
    )

    def columns(lo: int, hi: int) -> None:
        workspace = [torch.empty(size, dtype=torch.float32) for size in sizes]
        kernel(*addresses, *(part.data_ptr() for part in workspace), *numbers, lo, hi)

    flops = 2 * max(K, 1) * tile.columns * (out.numel() // N)
    parallel(-(-N // units), -(-_THREAD_FLOPS // flops), columns)
