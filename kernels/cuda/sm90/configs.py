"""Tile sizes of the Hopper kernels, as plain data, and the rule that picks one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmTile:
    """How one thread block of a grouped GEMM works.

    Attributes:
        block_m: Most rows of a tile, a multiple of 32: they are multiplied by 256 rows of weights,
            in as many accumulators a thread.
        stages: Loads in flight, of 128 bytes of each row: as `jobs.check_stages` takes them.
        together: How many stages of weights are loaded at a time, 1 or 2: of two, memory is asked
            for 256 bytes of a row at about the same time.
        streams: Whether weights are the first to leave L2.
    """

    block_m: int
    stages: int
    together: int
    streams: bool


# up to this many rows an expert, on average, and then the tile
_GEMM_TILES = (
    (32, GemmTile(block_m=64, stages=5, together=2, streams=True)),
    # most weights are read by one tile only: they need not push out the rows, which all read
    (160, GemmTile(block_m=160, stages=4, together=1, streams=True)),
    (None, GemmTile(block_m=160, stages=4, together=1, streams=False)),
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


# as above; a tile is lower, since a thread has the sums of one block besides
_GEMM_FP8_TILES = (
    (32, GemmTile(block_m=64, stages=5, together=2, streams=True)),
    (128, GemmTile(block_m=128, stages=4, together=1, streams=True)),
    (None, GemmTile(block_m=128, stages=4, together=1, streams=False)),
)


def pick_gemm_fp8(rows: int, num_experts: int) -> GemmTile:
    """Choose the tile of an FP8 grouped GEMM: as ``pick_gemm``."""
    for limit, tile in _GEMM_FP8_TILES:
        if limit is None or rows <= limit * num_experts:
            return tile
    raise AssertionError("the last entry has no limit")
