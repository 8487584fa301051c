"""Quantisation to FP8 on the CPU: the scale of a block of rows of 128 values, then its bytes."""

import tilelang.cpu.language as T

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.floats import FORMATS, any_floats, narrow_e4m3, view, widen
from tileops.kernels.cpu.threads import parallel
from tileops.moe.quantize import new_results

BLOCK = 128
_THREAD_ELEMENTS = 1 << 15  # least work that pays for a thread
_FLOAT32_448 = 0x43E00000  # the largest e4m3; as a float, it would become a product with 1 / 448
_TWO_64, _TWO_MINUS_64 = 0x5F800000, 0x1F800000


def _scale(amax, power_of_two):
    """Return the scale of a block as an expression, from the bits of its largest magnitude."""
    scale = T.reinterpret(amax, "float32") / T.reinterpret(T.uint32(_FLOAT32_448), "float32")
    # a subnormal becomes normal first: rounding its bits up would not give a power of two
    small = scale < T.float32(1)
    up = T.reinterpret(T.Select(small, T.uint32(_TWO_64), T.uint32(0x3F800000)), "float32")
    down = T.reinterpret(T.Select(small, T.uint32(_TWO_MINUS_64), T.uint32(0x3F800000)), "float32")
    bits = T.reinterpret(scale * up, "uint32") + T.uint32(0x007FFFFF)
    power = T.reinterpret(bits & T.uint32(0x7F800000), "float32") * down
    return T.Select(power_of_two != 0, power, scale)


@compiler.jit
def build(level: str):
    """Build the kernel of all dtypes and both kinds of blocks.

    Letters: S slabs of N rows and K columns. A block has ``height`` rows, which divide N, and 128
    columns.

    Args:
        level: Name of the vector level.
    """

    @T.prim_func
    def kernel(
        x_address: T.Tensor[(1,), T.uint8],
        q_address: T.Tensor[(1,), T.uint8],
        scale_address: T.Tensor[(1,), T.uint8],
        S: T.int64,
        N: T.int64,
        K: T.int64,
        x_slab: T.int64,
        x_row: T.int64,
        height: T.int64,
        fmt: T.int32,
        power_of_two: T.int32,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        x = any_floats(x_address, (S, N, K), (x_slab, x_row, 1))
        q = view(q_address, (S, N, K), T.uint8)
        scales = view(scale_address, (S, N // height, K // BLOCK), T.float32)
        with T.Kernel(1) as _:
            wide = T.alloc_local((BLOCK,), T.float32)
            slab = T.alloc_var(T.int64)
            top = T.alloc_var(T.int64)
            amax = T.alloc_var(T.uint32)
            magnitude = T.alloc_var(T.uint32)
            scale = T.alloc_var(T.float32)
            for unit in T.serial(lo, hi):
                slab = unit // (N // height)
                top = unit % (N // height)
                for f in FORMATS.values():
                    if fmt == f:
                        for block in T.serial(K // BLOCK):
                            amax = T.uint32(0)
                            for r in T.serial(height):
                                for i in T.serial(BLOCK):
                                    value = x[f][slab, top * height + r, block * BLOCK + i]
                                    magnitude = T.reinterpret(widen(value, f), "uint32")
                                    magnitude = magnitude & T.uint32(0x7FFFFFFF)
                                    if magnitude < T.uint32(0x7F800000):
                                        amax = T.max(amax, magnitude)
                            scale = _scale(amax, power_of_two)
                            scale = T.Select(scale == T.float32(0), T.float32(1), scale)
                            scales[slab, top, block] = scale
                            for r in T.serial(height):
                                for i in T.serial(BLOCK):
                                    value = x[f][slab, top * height + r, block * BLOCK + i]
                                    wide[i] = widen(value, f) / scale
                                for i in T.serial(BLOCK):
                                    q[slab, top * height + r, block * BLOCK + i] = narrow_e4m3(
                                        wide[i]
                                    )

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def _quantize(x, power_of_two: bool, height: int):
    S, N, K = x.shape
    q, scale = new_results(x, height)
    if x.numel() == 0:
        return q, scale
    kernel = build(compiler.level().name)
    arguments = (
        *(x.data_ptr(), q.data_ptr(), scale.data_ptr(), S, N, K, *x.stride()[:-1]),
        *(height, FORMATS[x.dtype], int(power_of_two)),
    )
    grain = -(-_THREAD_ELEMENTS // (K * height))
    parallel(S * N // height, grain, lambda lo, hi: kernel(*arguments, lo, hi))
    return q, scale


def quantize_fp8_rowwise_fwd(x, power_of_two, target):
    """Return the bytes, and a scale for each row and 128 columns."""
    return _quantize(x, power_of_two, 1)


def quantize_fp8_blockwise_fwd(x, power_of_two, target):
    """Return the bytes, and a scale for each 128 rows and 128 columns."""
    return _quantize(x, power_of_two, BLOCK)
