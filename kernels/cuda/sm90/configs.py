"""Tile sizes of the Hopper kernels, as plain data, and the rule that picks one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmTile:
    """How one thread block of a grouped GEMM works.

    Attributes:
        block_m: Rows of a tile, 64 for each warpgroup that multiplies.
        block_n: Rows of ``b`` that a tile multiplies with: with a gated activation half of them are
            gate rows and half up rows, and the tile is half as wide.
        block_k: Columns of ``a`` and ``b`` loaded at a time: 64 half-precision numbers are the
            128 bytes that one swizzled row of shared memory holds.
        stages: Loads in flight; a power of two.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int


# up to this many rows an expert, on average, and then the tile
_GEMM_TILES = (
    (64, GemmTile(block_m=64, block_n=128, block_k=64, stages=8)),
    (None, GemmTile(block_m=128, block_n=256, block_k=64, stages=4)),
)


def pick_gemm(rows: int, num_experts: int) -> GemmTile:
    """Choose the tile of a grouped GEMM from what the host knows.

    Args:
        rows: Rows of all experts together, an upper bound.
        num_experts: Experts they are spread over.
    """
    for limit, tile in _GEMM_TILES:
        if limit is None or rows <= limit * num_experts:
            return tile
    raise AssertionError("the last entry has no limit")
