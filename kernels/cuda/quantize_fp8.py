"""Quantisation to FP8: one pass, in which the values stay in registers between amax and rounding.

A thread takes eight neighbouring columns of a row, 16 threads a row of a block: half of a warp if
blocks are rows, while 512 threads share a block of 128 rows.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda.device import aligned, current, dtype_name, jit, wrong_device
from tileops.moe.quantize import new_results

BLOCK = 128
THREADS = 256
SQUARE_THREADS = 512
"""Threads of a block of 128 rows."""
COLUMNS = 8
LANES = BLOCK // COLUMNS
"""Threads of a row of a block."""
ROWS = SQUARE_THREADS // LANES
"""Rows that these take at a time."""
WARP = 32
MAX_WIDTH = 2**30
"""Longest row: the column past the end that a thread may compute still is an int32."""

INFINITY = 0x7F800000
SMALL, LARGE = 2.0**-80, 2.0**80
"""Scales between these divide exactly in five operations; others take the slow division."""

CUDA = """
// To nearest even. What is too large, infinity included, becomes 448, and NaN 0x7f.
static __device__ __forceinline__ unsigned to_e4m3(float a, float b, float c, float d) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<unsigned>(high) << 16;
}
"""


def _magnitude(value):
    return T.reinterpret(value, T.int32) & 0x7FFFFFFF


def _words(dtype: str) -> int:
    return COLUMNS * T.dtype(dtype).bits // 32


@T.macro
def load(x, slab, row, column, inside, words, values, wide, at, vectors: bool):
    """Read columns of a thread, zeros where it is not inside, and widen them."""
    count = words.shape[0]
    if vectors:
        for w in range(0, count, 4):
            words[w : w + 4] = T.ldg128(x[slab, row, column + w * COLUMNS // count], pred=inside)
    else:
        for w in T.unroll(count):
            words[w] = T.uint32(0)
        if inside:
            for c in T.unroll(COLUMNS):
                values[c] = x[slab, row, column + c]
    for c in T.vectorized(COLUMNS):
        wide[at + c] = T.Cast(T.float32, values[c])


@T.macro
def find_largest(wide, at, amax: T.Ref, special: T.Ref):
    """Take the finite magnitudes of a thread's columns into ``amax``, and note any that is not."""
    for c in T.unroll(COLUMNS):
        if _magnitude(wide[at + c]) < INFINITY:
            amax = T.max(amax, _magnitude(wide[at + c]))
        else:
            special |= 1


@T.macro
def find_scale(amax, power_of_two, scale: T.Ref):
    """Make the bits of the largest finite magnitude of a block its scale."""
    small = T.alloc_var(T.bool)
    scale = T.ieee_fdiv(T.reinterpret(amax, T.float32), T.float32(448))
    if power_of_two != 0:
        # a subnormal becomes normal first: rounding its bits up would not give a power of two
        small = scale < 1
        scale = scale * T.Select(small, T.float32(2.0**64), T.float32(1))
        bits = (T.reinterpret(scale, T.int32) + 0x007FFFFF) & INFINITY
        scale = T.reinterpret(bits, T.float32)
        scale = scale * T.Select(small, T.float32(2.0**-64), T.float32(1))
    if scale == 0:
        scale = T.float32(1)


@T.macro
def store(wide, at, scale, special, q, row, word, inside):
    """Divide columns of a thread by the scale, rounded to nearest, and write them as e4m3.

    With a reciprocal rounded to nearest, and a quotient at most a unit away, a step of Newton's
    method rounds rightly (Markstein, 1990) where nothing overflows and no rest is subnormal. What
    is too small for that rounds to a zero of e4m3.
    """
    value = T.alloc_local((COLUMNS,), T.float32)
    packed = T.alloc_local((COLUMNS // 4,), T.uint32)
    reciprocal = T.alloc_var(T.float32)
    rest = T.alloc_var(T.float32)
    # all threads of a warp take one way
    if T.any_sync(T.Cast(T.int32, special != 0 or scale < SMALL or scale > LARGE)) != 0:
        for c in T.unroll(COLUMNS):
            value[c] = T.ieee_fdiv(wide[at + c], scale)
    else:
        reciprocal = T.ieee_frcp(scale)
        for c in T.unroll(COLUMNS):
            value[c] = T.ieee_mul(wide[at + c], reciprocal)
            for _ in T.unroll(2):
                rest = T.ieee_fmaf(-value[c], scale, wide[at + c])
                value[c] = T.ieee_fmaf(rest, reciprocal, value[c])
            # the steps lose the sign of a zero
            sign = T.reinterpret(wide[at + c], T.int32) & T.int32(-0x80000000)
            value[c] = T.reinterpret(_magnitude(value[c]) | sign, T.float32)
    for w in T.unroll(COLUMNS // 4):
        packed[w] = T.call_extern(T.uint32, "to_e4m3", *(value[4 * w + part] for part in range(4)))
    T.stg64(q[row, word], packed[0:2], pred=inside)


@jit
def build_rows(dtype: str, vectors: bool):
    """Build the kernel that quantises row-wise, S slabs of N rows of K columns.

    A row is ``2**lane_bits`` threads wide, at least 16; a block of the grid has a slice of one row,
    or of a few short ones.

    Args:
        dtype: Type of the values.
        vectors: Whether every row is a run of 16-byte words; without, a thread reads one number at
            a time.
    """
    num_slabs, slab_rows, width, num_rows = T.dynamic("S, N, K, R")
    num_words, num_blocks = T.dynamic("W, G")
    slab_stride, row_stride = T.dynamic("slab_stride, row_stride", T.int64)
    q_stride, scale_stride = T.dynamic("q_stride, scale_stride", T.int64)

    @T.prim_func
    def quantize_rows(
        x: T.StridedTensor[(num_slabs, slab_rows, width), (slab_stride, row_stride, 1), dtype],
        q: T.StridedTensor[(num_rows, num_words), (q_stride, 1), T.uint32],
        scales: T.StridedTensor[(num_rows, num_blocks), (scale_stride, 1), T.float32],
        blocks: T.int32,
        lane_bits: T.int32,
        power_of_two: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS, prelude=CUDA) as block:
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            slab = T.alloc_var(T.int32)
            amax = T.alloc_var(T.int32, init=0)
            special = T.alloc_var(T.int32, init=0)
            scale = T.alloc_var(T.float32)
            words = T.alloc_local((_words(dtype),), T.uint32)
            values = T.view(words, (COLUMNS,), dtype)
            wide = T.alloc_local((COLUMNS,), T.float32)

            T.pdl_sync()
            T.pdl_trigger()
            run = COLUMNS << lane_bits
            slices = T.truncdiv(width + run - 1, run)
            row = T.truncdiv(block, slices)
            column = (block - row * slices) * run + (thread & ((1 << lane_bits) - 1)) * COLUMNS
            row = row * (THREADS >> lane_bits) + (thread >> lane_bits)
            slab = T.truncdiv(row, slab_rows)
            inside = row < num_rows and column < width
            load(x, slab, row - slab * slab_rows, column, inside, words, values, wide, 0, vectors)
            find_largest(wide, 0, amax, special)
            for i in T.unroll(4):
                amax = T.max(amax, T.shfl_xor(amax, 1 << i))
            find_scale(amax, power_of_two, scale)
            if inside and thread % LANES == 0:
                scales[row, T.truncdiv(column, BLOCK)] = scale
            store(wide, 0, scale, special, q, row, T.truncdiv(column, 4), inside)

    return quantize_rows


@jit
def build_blocks(dtype: str, vectors: bool):
    """Build the kernel that quantises block-wise, S slabs of N rows of K columns.

    Args:
        dtype: Type of the values.
        vectors: As of `build_rows`.
    """
    num_slabs, slab_rows, width = T.dynamic("S, N, K")
    num_rows, num_words, block_rows, num_blocks = T.dynamic("R, W, B, G")
    slab_stride, row_stride = T.dynamic("slab_stride, row_stride", T.int64)
    q_stride, scale_stride = T.dynamic("q_stride, scale_stride", T.int64)
    times = BLOCK // ROWS

    @T.prim_func
    def quantize_blocks(
        x: T.StridedTensor[(num_slabs, slab_rows, width), (slab_stride, row_stride, 1), dtype],
        q: T.StridedTensor[(num_rows, num_words), (q_stride, 1), T.uint32],
        scales: T.StridedTensor[(block_rows, num_blocks), (scale_stride, 1), T.float32],
        blocks: T.int32,
        power_of_two: T.int32,
    ):
        with T.Kernel(blocks, threads=SQUARE_THREADS, prelude=CUDA) as block:
            thread = T.get_thread_binding()
            warp_max = T.alloc_shared((SQUARE_THREADS // WARP,), T.int32)
            block_row = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            slab = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            amax = T.alloc_var(T.int32, init=0)
            special = T.alloc_var(T.int32, init=0)
            scale = T.alloc_var(T.float32)
            words = T.alloc_local((_words(dtype),), T.uint32)
            values = T.view(words, (COLUMNS,), dtype)
            wide = T.alloc_local((times * COLUMNS,), T.float32)

            T.pdl_sync()
            T.pdl_trigger()
            block_row = T.truncdiv(block, num_blocks)
            column = (block - block_row * num_blocks) * BLOCK + thread % LANES * COLUMNS
            row = block_row * BLOCK + thread // LANES
            slab = T.truncdiv(block_row, T.truncdiv(slab_rows, BLOCK))
            for i in T.unroll(times):
                slab_row = row - slab * slab_rows + i * ROWS
                load(x, slab, slab_row, column, True, words, values, wide, i * COLUMNS, vectors)
            for i in T.unroll(times):
                find_largest(wide, i * COLUMNS, amax, special)
            for i in T.unroll(5):
                amax = T.max(amax, T.shfl_xor(amax, 1 << i))
            if thread % WARP == 0:
                warp_max[thread // WARP] = amax
            T.sync_threads()
            for i in T.unroll(SQUARE_THREADS // WARP):
                amax = T.max(amax, warp_max[i])
            find_scale(amax, power_of_two, scale)
            if thread == 0:
                scales[block_row, T.truncdiv(column, BLOCK)] = scale
            for i in T.unroll(times):
                at = i * COLUMNS
                store(wide, at, scale, special, q, row + i * ROWS, T.truncdiv(column, 4), True)

    return quantize_blocks


def refuse(x, power_of_two, target) -> str | None:
    """Say why a call cannot be served: another GPU, or rows too long for an int32 column."""
    if x.shape[-1] > MAX_WIDTH:
        return f"takes rows of at most 2**30 elements, got {x.shape[-1]}"
    return wrong_device(x)


def quantize_fp8_rowwise_fwd(x, power_of_two, target):
    """Return the bytes, and a scale for each row and 128 columns."""
    q, scale = new_results(x, 1)
    if x.numel() == 0:
        return q, scale
    if x.numel() <= MAX_WIDTH and x.is_contiguous():
        x = x.view(1, 1, -1)
    num_rows, width = x.shape[0] * x.shape[1], x.shape[2]
    lane_bits = min((width // COLUMNS - 1).bit_length(), THREADS.bit_length() - 1)
    slices = -(-width // (COLUMNS << lane_bits))
    blocks = -(-num_rows // (THREADS >> lane_bits)) * slices
    kernel = build_rows(dtype_name(x), aligned(x))
    words, scales = q.view(torch.uint32).view(num_rows, -1), scale.view(num_rows, -1)
    with current(x.device):
        kernel(x, words, scales, blocks, lane_bits, int(power_of_two))
    return q, scale


def quantize_fp8_blockwise_fwd(x, power_of_two, target):
    """Return the bytes, and a scale for each 128 rows and 128 columns."""
    q, scale = new_results(x, BLOCK)
    if x.numel() == 0:
        return q, scale
    kernel = build_blocks(dtype_name(x), aligned(x))
    words = q.view(torch.uint32).flatten(0, 1)
    scales = scale.flatten(0, 1)
    with current(x.device):
        kernel(x, words, scales, scale.numel(), int(power_of_two))
    return q, scale
