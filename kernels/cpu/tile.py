"""The register tile of the grouped GEMM: dot products of a few rows of ``a`` with a few of ``b``.

Both operands run along K, so nothing is packed: an accumulator is a vector whose lanes collect
every ``lanes``-th product, and neighbouring lanes are added up at the end. The order of the
additions is the same whatever the tile's height, and so are the bits of a row.

Narrow weights are read in 32-bit words, two or four elements each, and widened in registers. A row
of ``a`` is widened beforehand, once for all columns, into the order in which the lanes meet it.
"""

from dataclasses import dataclass
from functools import partial

import tilelang.cpu.language as T

from tileops.kernels.cpu.floats import E4M3, widen, widen_parts

PRELUDE = """\
extern "C" inline void tileops_prefetch(void* line) { __builtin_prefetch(line, 0, 2); }
"""
"""C code that a kernel with tiles starts with."""


BLOCK = 128
"""Elements of K that share a scale with FP8: a multiple of every step."""


@dataclass(frozen=True)
class Tile:
    """Shape of the tile.

    Attributes:
        fmt: Format of the operands, of ``floats``.
        words: Whether ``b`` is read in 32-bit words, which needs rows that start on a word.
        lanes: Float32 values in a vector.
        rows: Most rows of a tile, a power of two.
        columns: Columns of a tile, even.
    """

    fmt: int
    words: bool
    lanes: int
    rows: int
    columns: int

    @property
    def parts(self) -> int:
        """Elements that are read at a time."""
        return (4 if self.fmt == E4M3 else 2) if self.words else 1

    @property
    def step(self) -> int:
        """Elements of K in a turn of the inner loop: a cache line of ``b`` on x86-64-v4."""
        return self.lanes * self.parts

    @property
    def heights(self) -> list[int]:
        """Heights that tiles are built for, the highest first."""
        return [1 << i for i in reversed(range(self.rows.bit_length()))]

    def element(self, slot):
        """Return which of ``step`` consecutive elements a slot of a widened row holds."""
        return slot % self.lanes * self.parts + slot // self.lanes if self.words else slot


def _halvings(lanes: int, acc, fold):
    """Return, for each halving of the lanes, what it reads, what it writes, and the lanes left."""
    levels = range(lanes.bit_length() - 1)
    return [((acc, fold)[i % 2], (fold, acc)[i % 2], lanes >> (i + 1)) for i in levels]


def _fold_of(tile: Tile, height: int):
    """Return the macro that adds up the lanes of ``acc``, and which of its arrays the sums are in.

    They are in the order of rows, then columns.
    """
    halvings = partial(_halvings, tile.lanes)

    @T.macro
    def add_up(acc, fold):
        for source, target, remaining in halvings(acc, fold):
            for i in T.serial(height * tile.columns * remaining):
                target[i] = source[2 * i] + source[2 * i + 1]

    return add_up, lambda acc, fold: halvings(acc, fold)[-1][1]


def _products_of(tile: Tile, height: int):
    """Return the macro that adds the products of one step of K to ``acc``."""
    fmt, lanes, step, tile_n = tile.fmt, tile.lanes, tile.step, tile.columns
    half = tile_n // 2

    @T.macro
    def multiply(acc, first, second, starts, wide, row, k):
        # a block's rows end before the hardware has learnt where they lead
        for side, b in enumerate((first, second)):
            for j in T.unroll(side * half, side * half + half, explicit=True):
                line = T.address_of(b[starts[tile_n + j] + k * lanes])
                T.call_extern("void", "tileops_prefetch", line)
        for i in T.unroll(height, explicit=True):
            for side, b in enumerate((first, second)):
                for j in T.unroll(side * half, side * half + half, explicit=True):
                    if tile.words:
                        for part, widen_part in enumerate(widen_parts(fmt)):
                            for lane in T.serial(lanes):
                                acc[(i * tile_n + j) * lanes + lane] += wide[
                                    row + i, k * step + part * lanes + lane
                                ] * widen_part(b[starts[j] + k * lanes + lane])
                    else:
                        for lane in T.serial(lanes):
                            acc[(i * tile_n + j) * lanes + lane] += wide[
                                row + i, k * step + lane
                            ] * widen(b[starts[j] + k * lanes + lane], fmt)

    return multiply


def dot(tile: Tile, height: int):
    """Return a macro that computes a tile of ``height`` rows.

    Its arguments: ``acc`` and ``fold``, local arrays, a vector for each element of the tile and
    half as many floats; ``first`` and ``second``, each a vector of all the weights that hold the
    rows of this half of the columns, of 32-bit words where these are read; ``starts``, where in
    these the rows of this block begin, and then those of the next; ``tail``, the last, partial step
    of this block's; ``wide``, the widened rows, from ``row`` on; and ``sums`` of these rows, from
    ``left`` on and, for the second half of the columns, ``apart`` further on.
    """
    lanes, step, tile_n = tile.lanes, tile.step, tile.columns
    half = tile_n // 2
    multiply, (add_up, added) = _products_of(tile, height), _fold_of(tile, height)

    @T.macro
    def run(acc, fold, first, second, starts, tail, wide, row, sums, left, apart, K):
        for i in T.serial(height * tile_n * lanes):
            acc[i] = T.float32(0)
        for k in T.serial(K // step):
            multiply(acc, first, second, starts, wide, row, k)
        if K % step != 0:
            for i in T.serial(height):
                for j in T.serial(tile_n):
                    for h in T.serial(step // lanes):
                        for lane in T.serial(lanes):
                            acc[(i * tile_n + j) * lanes + lane] += (
                                wide[row + i, K // step * step + h * lanes + lane]
                                * tail[j, h * lanes + lane]
                            )
        add_up(acc, fold)
        total = added(acc, fold)
        for i in T.serial(height):
            for j in T.unroll(tile_n, explicit=True):
                sums[row + i, left + j // half * apart + j % half] = total[i * tile_n + j]

    return run


def scaled_dot(tile: Tile, height: int):
    """Return a macro like `dot` for operands whose blocks of K have scales.

    Its further arguments: ``a_scale``, the scales of the widened rows from ``a_scale_from`` on,
    with their distances from row to row and from block to block; and those of the two halves of the
    columns, ``scales_at`` where a column's begin, with their distances from block to block.
    """
    lanes, step, tile_n = tile.lanes, tile.step, tile.columns
    half = tile_n // 2
    multiply, (add_up, added) = _products_of(tile, height), _fold_of(tile, height)

    @T.macro
    def run(
        acc,
        fold,
        first,
        second,
        starts,
        wide,
        row,
        sums,
        left,
        apart,
        K,
        a_scale,
        a_scale_from,
        a_scale_row,
        a_scale_block,
        gate_scale,
        up_scale,
        scales_at,
        gate_scale_block,
        up_scale_block,
    ):
        for i in T.serial(height):
            for j in T.unroll(tile_n, explicit=True):
                sums[row + i, left + j // half * apart + j % half] = T.float32(0)
        for block in T.serial(K // BLOCK):
            for i in T.serial(height * tile_n * lanes):
                acc[i] = T.float32(0)
            for k in T.serial(BLOCK // step):
                multiply(acc, first, second, starts, wide, row, block * (BLOCK // step) + k)
            add_up(acc, fold)
            total = added(acc, fold)
            for i in T.serial(height):
                a_factor = a_scale[a_scale_from + (row + i) * a_scale_row + block * a_scale_block]
                for side, scales in enumerate(
                    ((gate_scale, gate_scale_block), (up_scale, up_scale_block))
                ):
                    for j in T.unroll(side * half, side * half + half, explicit=True):
                        factor = a_factor * scales[0][scales_at[j] + block * scales[1]]
                        sums[row + i, left + side * apart + j % half] += (
                            total[i * tile_n + j] * factor
                        )

    return run
