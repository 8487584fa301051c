"""Post-permute: every token gathers the rows of its routes and adds them up with their weights."""

import math

import tilelang.language as T

from tileops.kernels.cuda.device import current, dtype_name, jit, misplaced, wrong_device

THREADS = 128
COLUMNS = 8
"""Columns of a thread: a 16-byte vector in the half-precision dtypes, two of them in float32."""
LOADS = 8
"""Vectors that a thread has in flight: of so many rows, or of fewer and of more columns."""
BLOCKS = {4: 8, 8: 4}
"""Thread blocks on a multiprocessor, by the words of a thread's columns: as many as have registers
for all loads of a thread at once."""


@jit
def build(row_dtype: str, out_dtype: str, rows_at_once: int):
    """Build the kernel.

    T tokens, K routes a token, N routes, rows of H columns in E slabs of M rows (a contiguous
    layout is one slab). A row is ``2**lane_bits`` threads wide. ``vectors`` says that rows and
    weights of a token can be looked up several at a time. Row r starts after r steps of ``step``
    elements, and where there are slabs after ``r * row_steps + r // M * slab_steps``.

    Args:
        row_dtype: Type of the rows.
        out_dtype: Type of the result.
        rows_at_once: Rows of a token that a thread loads at once. If fewer than `LOADS`, K at
            least.
    """
    spans = LOADS // rows_at_once
    lookup, looked_up = (T.ldg128, 4) if rows_at_once >= 4 else (T.ldg64, 2)
    num_tokens, top_k, num_routes = T.dynamic("T, K, N")
    num_slabs, slab_rows, hidden = T.dynamic("E, M, H")
    slab_stride, row_stride, weight_stride, out_stride = (
        T.dynamic(f"{name}_stride", T.int64) for name in ("slab", "row", "weight", "out")
    )
    row_words = COLUMNS // 2 if row_dtype != "float32" else COLUMNS
    out_words = COLUMNS // 2 if out_dtype != "float32" else COLUMNS

    @T.prim_func
    def combine_rows(
        rows: T.StridedTensor[
            (num_slabs, slab_rows, hidden), (slab_stride, row_stride, 1), row_dtype
        ],
        weights: T.StridedTensor[(num_tokens, top_k), (weight_stride, 1), T.float32],
        inverse: T.Tensor[(num_routes,), T.int32],
        out: T.StridedTensor[(num_tokens, hidden), (out_stride, 1), out_dtype],
        blocks: T.int32,
        lane_bits: T.int32,
        vectors: T.int32,
        step: T.int64,
        row_steps: T.int32,
        slab_steps: T.int32,
        factor: T.float32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            T.annotate_min_blocks_per_sm(BLOCKS[row_words])
            thread = T.get_thread_binding()
            token = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            slab = T.alloc_var(T.int32)
            row = T.alloc_local((rows_at_once,), T.int32)
            weight_words = T.alloc_local((rows_at_once,), T.uint32)
            weight = T.view(weight_words, (rows_at_once,), T.float32)
            words = T.alloc_local((spans, rows_at_once, row_words), T.uint32)
            values = T.view(words, (spans, rows_at_once, COLUMNS), row_dtype)
            value = T.alloc_local((COLUMNS,), T.float32)
            total = T.alloc_local((spans, COLUMNS), T.float32)
            result_words = T.alloc_local((out_words,), T.uint32)
            result = T.view(result_words, (COLUMNS,), out_dtype)

            T.pdl_sync()
            T.pdl_trigger()
            slices = T.ceildiv(hidden, THREADS * COLUMNS * spans)
            token = T.truncdiv(block, slices)
            column = (block - token * slices) * THREADS * COLUMNS * spans
            column = column + (thread & ((1 << lane_bits) - 1)) * COLUMNS
            token = token * (THREADS >> lane_bits) + (thread >> lane_bits)
            next_span = COLUMNS << lane_bits
            if token < num_tokens and column < hidden:
                for s in T.unroll(spans):
                    for c in T.unroll(COLUMNS):
                        total[s, c] = 0
                for batch in T.serial(T.ceildiv(top_k, rows_at_once) if spans == 1 else 1):
                    # What is looked up stays as it is until all of it is asked for.
                    for j in range(0, rows_at_once, looked_up):
                        k = batch * rows_at_once + j
                        there = k < top_k
                        if vectors != 0:
                            row[j : j + looked_up] = lookup(inverse[token * top_k + k], pred=there)
                            weight_words[j : j + looked_up] = lookup(weights[token, k], pred=there)
                        else:
                            for i in range(looked_up):
                                there = k + i < top_k
                                row[j + i] = T.ldg32(inverse[token * top_k + k + i], pred=there)
                                weight_words[j + i] = T.ldg32(weights[token, k + i], pred=there)
                    for j in T.unroll(rows_at_once):
                        live = row[j] >= 0 and row[j] < num_slabs * slab_rows
                        row[j] = T.Select(live and batch * rows_at_once + j < top_k, row[j], -1)
                    if num_slabs > 1:
                        for j in T.unroll(rows_at_once):
                            if row[j] >= 0:
                                slab = T.truncdiv(row[j], slab_rows)
                                row[j] = row[j] * row_steps + slab * slab_steps
                    for s in T.unroll(spans):
                        for j in T.unroll(rows_at_once):
                            for w in range(0, row_words, 4):
                                at = column + s * next_span
                                words[s, j, w : w + 4] = T.ldg128(
                                    rows[0, 0, row[j] * step + at + w * COLUMNS // row_words],
                                    pred=row[j] >= 0 and at < hidden,
                                )
                    # A dropped route reads nothing and adds 0 * 0, whatever its weight is.
                    for j in T.unroll(rows_at_once):
                        weight[j] = T.Select(row[j] >= 0, weight[j] * factor, T.float32(0))
                    for s in T.unroll(spans):
                        for j in T.unroll(rows_at_once):
                            for c in T.vectorized(COLUMNS):
                                value[c] = T.Cast(T.float32, values[s, j, c])
                            for c in T.unroll(COLUMNS):
                                total[s, c] = total[s, c] + weight[j] * value[c]
                for s in T.unroll(spans):
                    for c in T.vectorized(COLUMNS):
                        result[c] = T.Cast(out_dtype, total[s, c])
                    for w in range(0, out_words, 4):
                        at = column + s * next_span
                        T.stg128(
                            out[token, at + w * COLUMNS // out_words],
                            result_words[w : w + 4],
                            pred=at < hidden,
                        )

    return combine_rows


def steps_of(rows) -> tuple[int, int, int]:
    """Return in which steps the rows of slabs lie: `build` says of what."""
    slab_stride, row_stride = rows.stride()[:2]
    if rows.shape[0] == 1:
        return row_stride, 1, 0
    step = max(math.gcd(slab_stride, row_stride), 1)
    return step, row_stride // step, (slab_stride - rows.shape[1] * row_stride) // step


def too_far(rows) -> str | None:
    """Say why rows are so far apart that an int32 does not count the steps to them."""
    if rows.ndim == 2:
        return None
    step, *others = steps_of(rows)
    span = sum((size - 1) * apart for size, apart in zip(rows.shape, rows.stride(), strict=True))
    if max(span // max(step, 1), *map(abs, others)) < 2**31:
        return None
    return (
        f"expert_output: takes rows less than 2**31 steps of {step} elements apart, got strides "
        f"{rows.stride()}: make it contiguous"
    )


def refuse(
    expert_output, topk_weights, inverse_indices, layout, routed_scaling_factor, target, out
) -> str | None:
    """Say why a call cannot be served: another GPU, or rows that are not runs of 16-byte words."""
    if (reason := wrong_device(out)) is not None:
        return reason
    if out.shape[1] % COLUMNS:
        return f"needs a hidden size that is a multiple of {COLUMNS}, got {out.shape[1]}"
    if (reason := too_far(expert_output)) is not None:
        return reason
    return misplaced("expert_output", expert_output) or misplaced("out", out)


def moe_post_permute_fwd(
    expert_output, topk_weights, inverse_indices, layout, routed_scaling_factor, target, out
) -> None:
    """Write the weighted sum of each token's rows to ``out``."""
    num_tokens, hidden = out.shape
    if out.numel() == 0:
        return
    rows = expert_output
    if rows.ndim == 2:
        rows = rows.unsqueeze(0)
    elif rows.stride(0) == rows.shape[1] * rows.stride(1):
        rows = rows.view(1, -1, hidden)
    steps = steps_of(rows)
    top_k = topk_weights.shape[1]
    rows_at_once = max(min(1 << (top_k - 1).bit_length(), LOADS), 2)
    columns = COLUMNS * (LOADS // rows_at_once)
    lane_bits = min((-(-hidden // columns) - 1).bit_length(), 7)
    slices = -(-hidden // (THREADS * columns))
    blocks = -(-num_tokens // (THREADS >> lane_bits)) * slices
    places = (
        top_k,
        topk_weights.stride(0),
        topk_weights.data_ptr() // 4,
        inverse_indices.data_ptr() // 4,
    )
    vectors = not any(place % min(rows_at_once, 4) for place in places)
    kernel = build(dtype_name(rows), dtype_name(out), rows_at_once)
    with current(out.device):
        kernel(
            rows,
            topk_weights,
            inverse_indices,
            out,
            blocks,
            lane_bits,
            int(vectors),
            *steps,
            routed_scaling_factor,
        )
