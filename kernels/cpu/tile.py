"""The register tile of the grouped GEMM: dot products of a few rows of ``a`` with a few of ``b``.

Both operands run along K, so nothing is packed: an accumulator is a vector whose lanes collect
every ``lanes``-th product, and neighbouring lanes are added up at the end. The order of the
additions is the same whatever the tile's height, and so are the bits of a row.

Weights of 16 bits are read in pairs, as 32-bit words: the even element is the low half, the odd one
the high half, each widened in registers. A row of ``a`` is widened beforehand, once for all
columns, into the order in which the lanes meet it.
"""

from dataclasses import dataclass

import tilelang.cpu.language as T

from tileops.kernels.cpu.floats import widen, widen_high, widen_low

PRELUDE = """\
extern "C" inline void tileops_prefetch(void* line) { __builtin_prefetch(line, 0, 2); }
"""
"""C code that a kernel with tiles starts with."""


@dataclass(frozen=True)
class Tile:
    """Shape of the tile.

    Attributes:
        fmt: Format of the operands, of ``floats.FORMATS``.
        pairs: Whether ``b`` is read in 32-bit words, which needs rows that start on a word.
        lanes: Float32 values in a vector.
        rows: Most rows of a tile, a power of two.
        columns: Columns of a tile, even.
    """

    fmt: int
    pairs: bool
    lanes: int
    rows: int
    columns: int

    @property
    def step(self) -> int:
        """Elements of K in a turn of the inner loop: a cache line of ``b`` on x86-64-v4."""
        return self.lanes * (2 if self.pairs else 1)

    @property
    def heights(self) -> list[int]:
        """Heights that tiles are built for, the highest first."""
        return [1 << i for i in reversed(range(self.rows.bit_length()))]

    def element(self, slot):
        """Return which of ``step`` consecutive elements a slot of a widened row holds."""
        return slot % self.lanes * 2 + slot // self.lanes if self.pairs else slot


def _halvings(lanes: int, acc, fold):
    """Return, for each halving of the lanes, what it reads, what it writes, and the lanes left."""
    levels = range(lanes.bit_length() - 1)
    return [((acc, fold)[i % 2], (fold, acc)[i % 2], lanes >> (i + 1)) for i in levels]


def dot(tile: Tile, height: int):
    """Return a macro that computes a tile of ``height`` rows.

    Its arguments: ``acc`` and ``fold``, local arrays, a vector for each element of the tile and
    half as many floats; ``first`` and ``second``, each a vector of all the weights that hold the
    rows of this half of the columns, of 32-bit words with pairs; ``starts``, where in these the
    rows of this block begin, and then those of the next; ``tail``, the last, partial step of this
    block's; ``wide``, the widened rows, from ``row`` on; and ``sums`` of these rows, from ``left``
    on and, for the second half of the columns, ``apart`` further on.
    """
    fmt, pairs, lanes, step, tile_n = tile.fmt, tile.pairs, tile.lanes, tile.step, tile.columns
    half = tile_n // 2

    @T.macro
    def run(acc, fold, first, second, starts, tail, wide, row, sums, left, apart, K):
        for i in T.serial(height * tile_n * lanes):
            acc[i] = T.float32(0)
        for k in T.serial(K // step):
            # a block's rows end before the hardware has learnt where they lead
            for side, b in enumerate((first, second)):
                for j in T.unroll(side * half, side * half + half, explicit=True):
                    line = T.address_of(b[starts[tile_n + j] + k * lanes])
                    T.call_extern("void", "tileops_prefetch", line)
            for i in T.unroll(height, explicit=True):
                for side, b in enumerate((first, second)):
                    for j in T.unroll(side * half, side * half + half, explicit=True):
                        if pairs:
                            for lane in T.serial(lanes):
                                acc[(i * tile_n + j) * lanes + lane] += wide[
                                    row + i, k * step + lane
                                ] * widen_low(b[starts[j] + k * lanes + lane], fmt)
                            for lane in T.serial(lanes):
                                acc[(i * tile_n + j) * lanes + lane] += wide[
                                    row + i, k * step + lanes + lane
                                ] * widen_high(b[starts[j] + k * lanes + lane], fmt)
                        else:
                            for lane in T.serial(lanes):
                                acc[(i * tile_n + j) * lanes + lane] += wide[
                                    row + i, k * step + lane
                                ] * widen(b[starts[j] + k * lanes + lane], fmt)
        if K % step != 0:
            for i in T.serial(height):
                for j in T.serial(tile_n):
                    for h in T.serial(step // lanes):
                        for lane in T.serial(lanes):
                            acc[(i * tile_n + j) * lanes + lane] += (
                                wide[row + i, K // step * step + h * lanes + lane]
                                * tail[j, h * lanes + lane]
                            )
        for source, target, remaining in _halvings(lanes, acc, fold):
            for i in T.serial(height * tile_n * remaining):
                target[i] = source[2 * i] + source[2 * i + 1]
        total = _halvings(lanes, acc, fold)[-1][1]
        for i in T.serial(height):
            for j in T.unroll(tile_n, explicit=True):
                sums[row + i, left + j // half * apart + j % half] = total[i * tile_n + j]

    return run
