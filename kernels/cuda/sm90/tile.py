"""Sizes of the tiles of the Hopper grouped GEMMs that are the same for every type."""

WARP, WARPGROUP = 32, 128
MATH_GROUPS = 2
MATH_THREADS = MATH_GROUPS * WARPGROUP
GATHERERS = WARPGROUP // WARP - 1
"""Warps that load rows from wherever they lie, 8 rows each in turn; one more loads through TMA."""
HALF = 64
"""Rows of the tall operand of one tensor core instruction."""
WEIGHTS = MATH_GROUPS * 2 * HALF
"""Rows of weights of a tile, all of one matrix, or half of them gate rows and half up rows. Each
math warpgroup has two halves: the one gate rows and the other their up rows, if there are any."""
STEP = 16
"""Rows whose results are turned at a time."""
CHUNK = 2 * STEP
"""Rows of results that are staged at a time, so that whole lines are stored."""
LINE = 8
"""Vectors of 16 bytes in a swizzled row of shared memory of 128: what descriptors count in."""
