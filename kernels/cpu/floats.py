"""Tensors inside kernels, and the float formats, of which the C target knows only float32.

Kernels take addresses, sizes and strides as numbers and put the tensors together themselves: one
compile then serves every shape and view, and a call costs less than one that passes tensors. An
argument annotated as a tensor of one byte is an address, of any memory, or 0; who passes it keeps
the memory alive until the kernel returns.

bfloat16 and float16 tensors are int16 there. A value is widened to float32, exactly, where it is
read and rounded once, to nearest even, where it is written; NaN stays NaN, infinities and signed
zeros stay what they are, and float16 subnormals keep their values. float8_e4m3fn tensors are
uint8: the format has no infinities, and what is too large for it becomes +-448.
"""

from functools import partial

import tilelang.cpu.language as T
import torch

FLOAT32, BFLOAT16, FLOAT16, E4M3 = 0, 1, 2, 3

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""A dtype as a kernel argument."""


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions but the last, whose stride is 1."""
    return tensor.stride()[:-1]


def view(address, shape, dtype, strides=None):
    """Return the tensor at an address, in a kernel."""
    return T.make_tensor(T.address_of(address[0]), shape, dtype, strides)


def any_floats(address, shape, strides=None):
    """Return the tensor as each of the `FORMATS`, for a kernel that learns the one at run time."""
    full, halves = (floats(address, shape, fmt, strides) for fmt in (FLOAT32, BFLOAT16))
    return {fmt: full if fmt == FLOAT32 else halves for fmt in FORMATS.values()}


def floats(address, shape, fmt: int, strides=None):
    """Return the tensor of float32, of int16 for 16-bit floats or uint8 for e4m3, in a kernel."""
    dtype = {FLOAT32: T.float32, E4M3: T.uint8}.get(fmt, T.int16)
    return view(address, shape, dtype, strides)


def _from_half(shifted, special):
    """Widen a float16 from an int32: its sign in bits 31 to 28, the rest in bits 27 to 13."""
    bits = T.cast(shifted, "uint32") & T.uint32(0x8FFFE000)
    bits = bits | T.Select(special, T.uint32(0x70000000), T.uint32(0))
    # the product gives every exponent its bias, and normalises subnormals
    return T.reinterpret(bits, "float32") * T.float32(2.0**112)


def widen_low(word, fmt: int):
    """Return the value of the 16-bit float in the low half of an int32: the even one of a pair."""
    high = T.cast(word, "uint32") << T.uint32(16)
    if fmt == BFLOAT16:
        return T.reinterpret(high, "float32")
    return _from_half(T.cast(high, "int32") >> 3, (word & 0x7C00) == 0x7C00)


def widen_high(word, fmt: int):
    """Return the value of the 16-bit float in the high half of an int32: the odd one of a pair."""
    if fmt == BFLOAT16:
        return T.reinterpret(T.cast(word, "uint32") & T.uint32(0xFFFF0000), "float32")
    return _from_half(word >> 3, (word & 0x7C000000) == 0x7C000000)


def _from_e4m3(high):
    """Widen an e4m3 from a uint32 that has it in its highest byte."""
    bits = T.cast(T.cast(high, "int32") >> 4, "uint32") & T.uint32(0x87F00000)
    special = (high & T.uint32(0x7F000000)) == T.uint32(0x7F000000)
    bits = bits | T.Select(special, T.uint32(0x78000000), T.uint32(0))
    # the product gives every exponent its bias, and normalises subnormals
    return T.reinterpret(bits, "float32") * T.float32(2.0**120)


def widen_parts(fmt: int):
    """Return functions for the floats in an int32, two of 16 bits or four of 8, lowest first."""
    if fmt == E4M3:
        shifts = (T.uint32(24 - 8 * part) for part in range(4))
        return [lambda word, by=by: _from_e4m3(T.cast(word, "uint32") << by) for by in shifts]
    return [partial(widen_low, fmt=fmt), partial(widen_high, fmt=fmt)]


def widen(bits, fmt: int):
    """Return the float32 value of a bit pattern as `floats` has it (a float32 passes through)."""
    if fmt == E4M3:
        return _from_e4m3(T.cast(bits, "uint32") << T.uint32(24))
    return bits if fmt == FLOAT32 else widen_low(T.cast(bits, "int32"), fmt)


def narrow(value, fmt: int):
    """Round a float32 to the int16 bit pattern of a 16-bit float (to float32: pass it through)."""
    if fmt == FLOAT32:
        return value
    bits = T.reinterpret(value, "uint32")
    magnitude = bits & T.uint32(0x7FFFFFFF)
    nan = magnitude > T.uint32(0x7F800000)
    if fmt == BFLOAT16:
        rounded = (bits + T.uint32(0x7FFF) + ((bits >> 16) & T.uint32(1))) >> 16
        return T.cast(T.Select(nan, (bits >> 16) | T.uint32(0x40), rounded), "int16")
    normal = (magnitude + T.uint32(0xC8000FFF) + ((magnitude >> 13) & T.uint32(1))) >> 13
    # adding 0.5 aligns the last bit of a float32 with that of a float16 subnormal
    aligned = T.reinterpret(magnitude, "float32") + T.float32(0.5)
    small = T.reinterpret(aligned, "uint32") - T.uint32(0x3F000000)
    half = T.Select(magnitude < T.uint32(0x38800000), small, normal)
    half = T.Select(magnitude >= T.uint32(0x47800000), T.uint32(0x7C00), half)
    half = T.Select(nan, T.uint32(0x7E00), half)
    return T.cast(half | ((bits >> 16) & T.uint32(0x8000)), "int16")


def narrow_e4m3(value):
    """Round a float32 to the uint8 bit pattern of a float8_e4m3fn; a NaN loses its sign."""
    bits = T.reinterpret(value, "uint32")
    magnitude = bits & T.uint32(0x7FFFFFFF)
    normal = (magnitude + T.uint32(0x7FFFF) + ((magnitude >> 20) & T.uint32(1))) >> 20
    # adding 2**14 aligns the last bit of a float32 with that of a subnormal
    aligned = T.reinterpret(magnitude, "float32") + T.float32(16384)
    small = T.reinterpret(aligned, "uint32") - T.uint32(0x46800000)
    byte = T.Select(magnitude < T.uint32(0x3C800000), small, normal - T.uint32(120 << 3))
    byte = T.Select(magnitude >= T.uint32(0x43E00000), T.uint32(0x7E), byte)
    byte = byte | ((bits >> 24) & T.uint32(0x80))
    return T.cast(T.Select(magnitude > T.uint32(0x7F800000), T.uint32(0x7F), byte), "uint8")
