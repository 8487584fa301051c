"""The order of the jobs of a persistent grouped GEMM, and its operands as its kernel takes them.

A job is a row tile of the list by a block of columns. Some row tiles go through all columns
together, so that what they read stays in L2.
"""

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.device import UNCHECKED
from tileops.kernels.cuda.grouped_gemm_tiles import END, EXPERT, FIRST

SWEEP_BYTES, MIN_SWEEP = 2**24, 4
"""Of the row tiles that go through all columns together: their size, and how many at least."""

# Barriers are placed by hand: the automatic ones would join warps that never meet.
CONFIG = {**UNCHECKED, tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}


def _locate(job, count, column_blocks, sweep):
    """Return the line in the list of tiles and the block of columns that a job stands for."""
    above = T.truncdiv(job, sweep * column_blocks) * sweep
    height = T.min(sweep, count - above)
    within = job - above * column_blocks
    return 1 + above + T.truncmod(within, height), T.truncdiv(within, height)


def look_up(columns: int):
    """Make the macro that sets ``tile`` to a job's tile, of so many columns.

    They are its expert, first column, first row, end row, and line in the list.
    """

    @T.macro
    def look_up(tile, job, count, column_blocks, sweep, tiles):
        line = T.alloc_var(T.int32)
        place = _locate(job, count, column_blocks, sweep)
        line = place[0]
        tile[0] = tiles[line, EXPERT]
        tile[1] = place[1] * columns
        tile[2] = tiles[line, FIRST]
        tile[3] = tiles[line, END]
        tile[4] = line

    return look_up


def sweep(rows: int, row_bytes: int) -> int:
    """Return how many tiles of so many rows go through all columns together."""
    return max(MIN_SWEEP, SWEEP_BYTES // (rows * row_bytes))


def view(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``; a dimension of size 1 gets a stride that a TMA descriptor takes."""
    if 1 not in x.shape:
        return x
    step = 16 // x.element_size()
    steps = [step if size == 1 else s for size, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, (*steps[:-1], x.stride(-1)))


def slabs(x: torch.Tensor) -> torch.Tensor:
    """View expert rows, a matrix or slabs, as slabs."""
    return x if x.ndim == 3 else x.unsqueeze(0)
