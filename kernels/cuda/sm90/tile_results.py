"""Results of a tile of half-precision operands: bias, activation, rounding, and the store."""

import tilelang.language as T

from tileops.kernels.cuda.activations import GATED, activated, gated
from tileops.kernels.cuda.sm90.moves import store_rows, store_turned
from tileops.kernels.cuda.sm90.tile import CHUNK, HALF, MATH_GROUPS, STEP, WARP, WARPGROUP

VECTOR = 8
"""Half-precision numbers of the 16 bytes that a thread moves at a time."""


def staged_shape(own: int) -> tuple[int, int, int]:
    """Return the shape of the results in half precision that both warpgroups stage at a time.

    A line, of a warpgroup's ``own`` columns, is one vector longer than its data, so that neighbours
    meet other banks.
    """
    return MATH_GROUPS, CHUNK, own + VECTOR


def results(activation: str, has_bias: bool, out_dtype: str, own: int, apart: int, block_m: int):
    """Make the macros that turn the sums of a tile into results.

    Args:
        activation: ``"none"`` or the name of an activation.
        has_bias: Whether there is a bias at all.
        out_dtype: Type of the results.
        own: Columns of the tile that a warpgroup has.
        apart: From the one half of a warpgroup's rows of weights to the other.
        block_m: Most rows of a tile.

    Returns:
        ``load_bias(bias, place, biases)``, which sets the four numbers that a thread adds to its
        sums, for each of a half's two rows of weights, of gate and up if there are both. ``place``
        is expert, the warpgroup's first column, and columns of ``out``; ``biases`` are of gate and
        of up, and for each whether it is there.

        ``store(acc, bias, place, formula, out, out_row, staged)``, where ``place`` is slab, the
        warpgroup's first column, first row, rows, and columns of ``out``, ``formula`` alpha, beta
        and limit of the activation, and ``staged`` shared memory, or None for float32.
    """
    parts = 2 if activation in GATED else 1
    halves = own // HALF
    half_word = out_dtype != "float32"
    # A warpgroup stores so many lines at a time, of so many vectors.
    vectors = own // VECTOR
    lines = WARPGROUP // vectors

    def first_of_half():
        """Of the rows of weights of a half, a thread has this and the 8th after it."""
        thread = T.get_thread_binding()
        return thread % WARPGROUP // WARP * 16 + thread % WARP // 4

    # Parts of `place` are used where they stand: names for them would be copies in registers.

    @T.macro
    def load_bias(bias, place, biases):
        tall = first_of_half()
        for i in T.unroll(4):
            at = place[1] + tall + i % 2 * 8
            bias[i] = 0
            if parts == 1:
                if biases[2] != 0:
                    bias[i] = biases[0][place[0], T.min(at + i // 2 * HALF, place[2] - 1)]
            elif i < 2:
                if biases[2] != 0:
                    bias[i] = biases[0][place[0], T.min(at, place[2] - 1)]
            elif biases[3] != 0:
                bias[i] = biases[1][place[0], T.min(at, place[2] - 1)]

    @T.macro
    def finish(value, acc, bias, at, formula):
        """Set ``value`` to what 8 sums of each half of ``acc``, from ``at`` on, give.

        They are two rows of weights by 4 rows of the tile; ``bias`` has a number for each row of
        weights of each half.
        """
        for r in T.unroll(8):
            value[r] = acc[at + r]
            value[8 + r] = acc[at + block_m // 2 + r]
            if has_bias:
                value[r] += bias[r // 2 % 2]
                value[8 + r] += bias[2 + r // 2 % 2]
            if parts == 2:
                value[r] = gated(value[r], value[8 + r], activation, *formula)
            elif activation != "none":
                value[r] = activated(value[r], activation)
                value[8 + r] = activated(value[8 + r], activation)

    @T.macro
    def store(acc, bias, place, formula, out, out_row, staged):
        group = T.get_thread_binding() // WARPGROUP
        member = T.get_thread_binding() % WARPGROUP
        lane = T.get_thread_binding() % WARP
        tall = first_of_half()
        # where a warp's four blocks of 8 by 8 results go, turned: each thread gives one row
        turned_row = lane // 16 * 8 + lane % 8
        turned_col = member // WARP * 16 + lane // 8 % 2 * 8
        value = T.alloc_local((16,), T.float32)
        if half_word:
            words = T.alloc_local((4,), T.uint32)
            result = T.view(words, (8,), out_dtype)
        for c in T.unroll(block_m // CHUNK):
            if c * CHUNK < place[3]:
                if half_word:
                    T.sync_threads(1 + group, WARPGROUP)
                for s in T.unroll(CHUNK // STEP):
                    at = c * CHUNK + s * STEP
                    finish(value, acc, bias, at // 2, formula)
                    for half in T.unroll(halves):
                        if half_word:
                            for i in T.vectorized(8):
                                result[i] = T.Cast(out_dtype, value[half * 8 + i])
                            col = half * HALF + turned_col
                            store_turned(
                                T.access_ptr(
                                    staged[group, s * STEP + turned_row, col], "w", VECTOR
                                ),
                                words,
                            )
                        else:
                            for r in T.unroll(8):
                                row = at + r // 4 * 8 + lane % 4 * 2 + r % 2
                                col = place[1] + half * HALF + tall + r // 2 % 2 * 8
                                if row < place[3] and col < place[4]:
                                    out[place[0], place[2] + row, col] = value[half * 8 + r]
                if half_word:
                    T.sync_threads(1 + group, WARPGROUP)
                    row = member // vectors
                    col = member % vectors * VECTOR
                    store_rows(
                        out[place[0], place[2] + c * CHUNK + row, place[1] + col],
                        T.access_ptr(staged[group, row, col], "r", VECTOR),
                        (CHUNK // lines, lines * (own + VECTOR) * 2, lines),
                        out_row * (lines * 2),
                        T.Select(place[1] + col < place[4], place[3] - c * CHUNK - row, 0),
                    )

    return load_bias, store
