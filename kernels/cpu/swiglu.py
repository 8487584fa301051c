"""SwiGLU on the CPU: one pass over strips of rows of any spacing."""

import math

import tilelang.cpu.language as T

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import swiglu
from tileops.kernels.cpu.floats import FORMATS, any_floats, narrow, widen
from tileops.kernels.cpu.threads import parallel

_STRIP = 1024  # columns that a thread takes at a time
_THREAD_ELEMENTS = 1 << 15  # least work that pays for a thread


@compiler.jit
def build(level: str):
    """Build the kernel of all dtypes, for R rows of n columns.

    Args:
        level: Name of the vector level.
    """

    @T.prim_func
    def kernel(
        gate_address: T.Tensor[(1,), T.uint8],
        up_address: T.Tensor[(1,), T.uint8],
        out_address: T.Tensor[(1,), T.uint8],
        R: T.int64,
        n: T.int64,
        gate_row: T.int64,
        up_row: T.int64,
        out_row: T.int64,
        fmt: T.int32,
        alpha: T.float64,
        beta: T.float64,
        limit: T.float64,
        strips: T.int64,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        gate = any_floats(gate_address, (R, n), (gate_row, 1))
        up = any_floats(up_address, (R, n), (up_row, 1))
        out = any_floats(out_address, (R, n), (out_row, 1))
        with T.Kernel(1) as _:
            scratch = T.alloc_local((4,), T.float64)
            # variables: what is named otherwise is computed again for each element
            r = T.alloc_var(T.int64)
            left = T.alloc_var(T.int64)
            for strip in T.serial(lo, hi):
                r = strip // strips
                left = strip % strips * _STRIP
                for f in FORMATS.values():
                    if fmt == f:
                        for i in T.serial(T.min(T.int64(_STRIP), n - left)):
                            swiglu(
                                T.cast(widen(gate[f][r, left + i], f), "float64"),
                                T.cast(widen(up[f][r, left + i], f), "float64"),
                                (alpha, beta, limit),
                                scratch,
                            )
                            out[f][r, left + i] = narrow(T.cast(scratch[0], "float32"), f)

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def swiglu_fwd(gate, up, limit, alpha, beta, *, target, out) -> None:
    """Write the activation of every pair to ``out``; a ``limit`` of 0 turns the clamps off."""
    if out.numel() == 0:
        return
    tensors = gate, up, out
    if all(x.is_contiguous() for x in tensors):
        tensors = tuple(x.view(1, -1) for x in tensors)
    R, n = tensors[-1].shape
    strips = -(-n // _STRIP)  # of a row
    kernel = build(compiler.level().name)
    arguments = (
        *(x.data_ptr() for x in tensors),
        *(R, n, *(x.stride(0) for x in tensors), FORMATS[out.dtype]),
        *(alpha, beta, limit if limit > 0 else math.inf, strips),
    )
    grain = -(-_THREAD_ELEMENTS // min(n, _STRIP))
    parallel(R * strips, grain, lambda lo, hi: kernel(*arguments, lo, hi))
