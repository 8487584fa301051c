"""SwiGLU as a kernel of its own: one pass over rows of any spacing, one launch."""

import math

import tilelang.language as T

from tileops.kernels.cuda.activations import swiglu
from tileops.kernels.cuda.device import aligned, current, dtype_name, jit, wrong_device

THREADS = 256
VECTOR_BYTES = 16
MAX_WIDTH = 2**30
"""Longest row: the column past the end that a thread may compute still is an int32."""


def step(dtype: str, vectors: bool) -> tuple[int, int]:
    """Return how many neighbouring columns a thread takes at a time, and how many times."""
    return (VECTOR_BYTES * 8 // T.dtype(dtype).bits, 2) if vectors else (1, 8)


@jit
def build(dtype: str, vectors: bool):
    """Build the kernel for R rows of n columns. A row is ``2**lane_bits`` threads wide.

    Args:
        dtype: Type of all three tensors.
        vectors: Whether every row is a run of 16-byte words; without, a thread moves one number at
            a time.
    """
    num_rows, width = T.dynamic("R, n")
    gate_stride, up_stride, out_stride = T.dynamic("gate_stride, up_stride, out_stride", T.int64)
    columns, times = step(dtype, vectors)
    words = VECTOR_BYTES // 4

    @T.prim_func
    def swiglu_rows(
        gate: T.StridedTensor[(num_rows, width), (gate_stride, 1), dtype],
        up: T.StridedTensor[(num_rows, width), (up_stride, 1), dtype],
        out: T.StridedTensor[(num_rows, width), (out_stride, 1), dtype],
        blocks: T.int32,
        lane_bits: T.int32,
        limit: T.float32,
        alpha: T.float32,
        beta: T.float32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            column = T.alloc_var(T.int32)
            gates = T.alloc_local((times, columns), dtype)
            ups = T.alloc_local((times, columns), dtype)
            result = T.alloc_local((columns,), dtype)
            g = T.alloc_local((columns,), T.float32)
            u = T.alloc_local((columns,), T.float32)

            run = (times * columns) << lane_bits
            slices = T.truncdiv(width + run - 1, run)
            row = T.truncdiv(block, slices)
            column = (block - row * slices) * run
            column = column + (thread & ((1 << lane_bits) - 1)) * columns
            row = row * (THREADS >> lane_bits) + (thread >> lane_bits)
            if row < num_rows:
                for i in T.unroll(times):
                    at = column + i * (columns << lane_bits)
                    if vectors:
                        gate_words = T.view(gates, (times, words), T.uint32)
                        up_words = T.view(ups, (times, words), T.uint32)
                        gate_words[i, 0:words] = T.ldg128(gate[row, at], pred=at < width)
                        up_words[i, 0:words] = T.ldg128(up[row, at], pred=at < width)
                    elif at < width:
                        gates[i, 0] = gate[row, at]
                        ups[i, 0] = up[row, at]
                for i in T.unroll(times):
                    at = column + i * (columns << lane_bits)
                    if at < width:
                        for c in T.vectorized(columns):
                            g[c] = T.Cast(T.float32, gates[i, c])
                            u[c] = T.Cast(T.float32, ups[i, c])
                        for c in T.unroll(columns):
                            g[c] = swiglu(g[c], u[c], alpha, beta, limit)
                        for c in T.vectorized(columns):
                            result[c] = T.Cast(dtype, g[c])
                        if vectors:
                            out_words = T.view(result, (words,), T.uint32)
                            T.stg128(out[row, at], out_words[0:words])
                        else:
                            out[row, at] = result[0]

    return swiglu_rows


def refuse(gate, up, limit, alpha, beta, *, target, out) -> str | None:
    """Say why a call cannot be served: another GPU, or rows too long for an int32 column."""
    if out.shape[1] > MAX_WIDTH:
        return f"takes rows of at most 2**30 elements, got {out.shape[1]}"
    return wrong_device(out)


def swiglu_fwd(gate, up, limit, alpha, beta, *, target, out) -> None:
    """Write the activation of every pair to ``out``; a ``limit`` of 0 turns the clamps off."""
    if out.numel() == 0:
        return
    tensors = gate, up, out
    if out.numel() <= MAX_WIDTH and all(x.is_contiguous() for x in tensors):
        tensors = tuple(x.view(1, -1) for x in tensors)
    num_rows, width = tensors[-1].shape
    vectors = width * out.element_size() % VECTOR_BYTES == 0 and aligned(*tensors)
    dtype = dtype_name(out)
    columns, times = step(dtype, vectors)
    lane_bits = min((-(-width // (columns * times)) - 1).bit_length(), THREADS.bit_length() - 1)
    slices = -(-width // ((columns * times) << lane_bits))
    blocks = -(-num_rows // (THREADS >> lane_bits)) * slices
    kernel = build(dtype, vectors)
    with current(out.device):
        kernel(*tensors, blocks, lane_bits, limit if limit > 0 else math.inf, alpha, beta)
