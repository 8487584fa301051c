"""Results of a tile's products: bias, activation, rounding to halves or to FP8, and the store.

Both kinds of tiles end in the same steps, with other places for a thread's sums. Of a high tile a
thread has two rows a half, two neighbouring columns of every eight; of a low one, two columns a
half, 16 rows apart, and two neighbouring rows of every eight.
"""

import tilelang.language as T

from tileops.kernels.cuda.activations import activated, gated
from tileops.kernels.cuda.sm90.fp8_form import (
    DEPTH,
    HIGH,
    LOW,
    Form,
)
from tileops.kernels.cuda.sm90.fp8_moves import largest_of_rows, pair_of_bytes, turned_bytes
from tileops.kernels.cuda.sm90.moves import store_rows, store_turned
from tileops.kernels.cuda.sm90.tile import (
    CHUNK,
    HALF,
    MATH_THREADS,
    STEP,
    WARP,
    WARPGROUP,
)

LARGEST = 448.0
"""The largest E4M3 number."""
FLOAT32_MAX = 3.4028234663852886e38
BOTH_GROUPS = 3
"""The named barrier of both math warpgroups; 1 and 2 are those of one."""


def results(form: Form):
    """Make the macro that stores what the sums of a tile in ``acc`` give.

    ``store(acc, number, group, place, biases, formula, out, shared)``:

    - ``number`` of the tile among those of the thread block, and of the warpgroup;
    - ``place``: expert, slab, the warpgroup's first column, first row, rows, columns of ``out``;
    - ``biases``: of gate and of up, and for each whether it is there;
    - ``formula``: alpha, beta and limit of the activation;
    - ``out``: the results, their scales, the elements from one row to the next;
    - ``shared``: the staged results, the largest magnitudes that warps have found in rows, and the
      inverse scales; None where there are none.
    """
    spans = form.own // HALF
    packed, out_bytes = form.packed, form.out_bytes

    def activate(value, other, formula):
        if form.parts == 2:
            return gated(value, other, form.activation, *formula)
        return value if form.activation == "none" else activated(value, form.activation)

    @T.macro
    def add_bias(acc, at, expert, column, biases, width):
        """Add the bias of a column to a sum, and to the up sum half the sums of a half later."""
        gate_bias, up_bias, gate_biased, up_biased = biases
        if gate_biased != 0:
            acc[at] += gate_bias[expert, T.min(column, width - 1)]
        if form.parts == 2 and up_biased != 0:
            acc[at + HALF // 2] += up_bias[expert, T.min(column, width - 1)]

    @T.macro
    def scale_of(most: T.Ref):
        """Turn the largest magnitude of a row into its scale."""
        most = most / T.float32(LARGEST)
        most = T.Select(most == 0, T.float32(1), most)

    @T.macro
    def finish_high(acc, lane, place, biases, formula):
        """Apply bias and activation to the sums of a high tile, in place."""
        expert, _, column, _, _, width = place
        for half in T.unroll(2):
            for i in T.unroll(HALF // form.parts):
                at = half * HALF + i
                if form.has_bias:
                    col = column + i // 4 * 8 + lane % 4 * 2 + i % 2
                    add_bias(acc, at, expert, col, biases, width)
                acc[at] = activate(acc[at], acc[at + HALF // 2 * (form.parts - 1)], formula)

    @T.macro
    def scale_high(by, acc, number, group, lane, tall, place, out_scale, largest):
        """Store the scales of the rows of a high tile, and set ``by`` to their inverses."""
        _, _, column, first, height, _ = place
        for i in T.unroll(4):
            by[i] = 0
            for j in T.unroll(HALF // 4):
                at = i // 2 * HALF + j // 2 * 4 + i % 2 * 2 + j % 2
                size = T.abs(acc[at])
                by[i] = T.max(by[i], T.Select(size <= FLOAT32_MAX, size, T.float32(0)))
            for apart in (1, 2):
                by[i] = T.max(by[i], T.shfl_xor(by[i], apart))
            if lane % 4 == 0:
                largest[number & 1, group * HIGH + i // 2 * HALF + tall + i % 2 * 8] = by[i]
        T.sync_threads(BOTH_GROUPS, MATH_THREADS)
        for i in T.unroll(4):
            row = i // 2 * HALF + tall + i % 2 * 8
            by[i] = T.max(largest[number & 1, row], largest[number & 1, HIGH + row])
            scale_of(by[i])
            if group == 0 and lane % 4 == 0 and row < height:
                out_scale[first + row, T.truncdiv(column, DEPTH)] = by[i]
            by[i] = T.min(T.float32(1) / by[i], T.float32(FLOAT32_MAX))

    @T.macro
    def store_high(acc, by, group, warp, lane, place, out, out_row, staged):
        """Store a high tile: a warp stages its rows, a span of columns at a time."""
        _, slab, column, first, height, width = place
        line, vectors = form.high_line, HALF // packed
        lines = WARP // vectors
        if form.staged:  # warps of the group may still read what they staged of the last tile
            T.sync_threads(1 + group, WARPGROUP)
        for half in T.unroll(2):
            for span in T.unroll(spans):
                row = half * HALF + warp * STEP
                col = column + span * HALF
                if form.staged:
                    T.sync_warp()
                for i in T.unroll(HALF // 4):
                    at = half * HALF + span * (HALF // 2) + i * 2
                    down = lane // 4 + i % 2 * 8
                    right = i // 2 * 8 + lane % 4 * 2
                    staged_at = (warp * STEP + down) * line + right
                    if form.quantizes:
                        pair_of_bytes(
                            T.access_ptr(staged[group, staged_at], "w", 2),
                            acc[at] * by[half * 2 + i % 2],
                            acc[at + 1] * by[half * 2 + i % 2],
                        )
                    elif form.staged:
                        for c in T.vectorized(2):
                            staged[group, staged_at + c] = T.Cast(form.out_dtype, acc[at + c])
                    elif row + down < height and col < width:
                        for c in T.unroll(2):
                            out[slab, first + row + down, col + right + c] = acc[at + c]
                if form.staged:
                    T.sync_warp()
                    down = lane // vectors
                    right = lane % vectors * packed
                    store_rows(
                        out[slab, first + row + down, col + right],
                        T.access_ptr(
                            staged[group, (warp * STEP + down) * line + right], "r", packed
                        ),
                        (STEP // lines, lines * line * out_bytes, lines),
                        out_row * (lines * out_bytes),
                        T.Select(col + right < width, height - row - down, 0),
                    )

    @T.macro
    def finish_low(acc, tall, place, biases, formula):
        """Apply bias and activation to the sums of a low tile, in place."""
        expert, _, column, _, height, width = place
        for s in T.unroll(LOW // STEP):
            if s * STEP < height:
                for i in T.unroll(16 // form.parts):
                    at = i // 8 * (LOW // 2) + s * 8 + i % 8
                    if form.has_bias:
                        col = column + i // 8 * HALF + tall + i // 2 % 2 * 8
                        add_bias(acc, at, expert, col, biases, width)
                    acc[at] = activate(acc[at], acc[at + LOW // 2 * (form.parts - 1)], formula)

    @T.macro
    def scale_low(acc, number, group, member, place, out_scale, largest, inverse):
        """Store the scales of the rows of a low tile, and their inverses in shared memory."""
        _, _, column, first, height, _ = place
        most = T.alloc_var(T.float32)
        warp = group * (WARPGROUP // WARP) + member // WARP
        largest_of_rows(T.access_ptr(largest[number & 1, warp * LOW], "w", LOW), acc, LOW)
        T.sync_threads(BOTH_GROUPS, MATH_THREADS)
        if member < LOW:
            most = 0
            for i in T.unroll(MATH_THREADS // WARP):
                most = T.max(most, largest[number & 1, i * LOW + member])
            scale_of(most)
            if group == 0 and member < height:
                out_scale[first + member, T.truncdiv(column, DEPTH)] = most
            inverse[group, member] = T.min(T.float32(1) / most, T.float32(FLOAT32_MAX))

    @T.macro
    def store_low(acc, group, member, place, out, out_row, staged, inverse):
        """Store a low tile: a warpgroup turns and stages some rows at a time."""
        _, slab, column, first, height, width = place
        line, vectors = form.low_line, form.own // packed
        lines = WARPGROUP // vectors
        lane = member % WARP
        tall = member // WARP * STEP + lane // 4
        # where a warp's four blocks of 8 by 8 results go, turned: each thread gives one row
        turned_row = lane // 16 * 8 + lane % 8
        turned_col = member // WARP * STEP + lane // 8 % 2 * 8
        if form.staged and not form.quantizes:
            words = T.alloc_local((4,), T.uint32)
            result = T.view(words, (8,), form.out_dtype)
        for c in T.unroll(LOW // CHUNK):
            if c * CHUNK < height:
                if form.staged:
                    T.sync_threads(1 + group, WARPGROUP)
                for s in T.unroll(CHUNK // STEP):
                    at = c * CHUNK + s * STEP
                    if form.quantizes:
                        row = s * STEP + lane % 4 * 2 + lane // 4 % 2
                        turned_bytes(
                            T.access_ptr(staged[group, row * line + tall - lane // 4 % 2], "w", 2),
                            T.access_ptr(inverse[group, at + lane % 4 * 2], "r", 2),
                            acc[at // 2],
                            line,
                        )
                    for half in () if form.quantizes else tuple(range(spans)):
                        sums = half * (LOW // 2) + at // 2
                        if form.staged:
                            for i in T.vectorized(8):
                                result[i] = T.Cast(form.out_dtype, acc[sums + i])
                            row = s * STEP + turned_row
                            col = half * HALF + turned_col
                            store_turned(
                                T.access_ptr(staged[group, row * line + col], "w", 8), words
                            )
                        else:
                            for i in T.unroll(8):
                                row = at + i // 4 * 8 + lane % 4 * 2 + i % 2
                                col = column + half * HALF + tall + i // 2 % 2 * 8
                                if row < height and col < width:
                                    out[slab, first + row, col] = acc[sums + i]
                if form.staged:
                    T.sync_threads(1 + group, WARPGROUP)
                    row = member // vectors
                    col = member % vectors * packed
                    store_rows(
                        out[slab, first + c * CHUNK + row, column + col],
                        T.access_ptr(staged[group, row * line + col], "r", packed),
                        (CHUNK // lines, lines * line * out_bytes, lines),
                        out_row * (lines * out_bytes),
                        T.Select(column + col < width, height - c * CHUNK - row, 0),
                    )

    @T.macro
    def store(acc, number, group, place, biases, formula, out, shared):
        """Finish and store a tile."""
        rows, out_scale, out_row = out
        staged, largest, inverse = shared
        member = T.get_thread_binding() % WARPGROUP
        lane = member % WARP
        tall = member // WARP * STEP + lane // 4
        by = T.alloc_local((4,), T.float32)
        if form.high and place[4] > LOW:
            finish_high(acc, lane, place, biases, formula)
            if form.quantizes:
                scale_high(by, acc, number, group, lane, tall, place, out_scale, largest)
            store_high(acc, by, group, member // WARP, lane, place, rows, out_row, staged)
        else:
            finish_low(acc, tall, place, biases, formula)
            if form.quantizes:
                scale_low(acc, number, group, member, place, out_scale, largest, inverse)
            store_low(acc, group, member, place, rows, out_row, staged, inverse)

    return store
