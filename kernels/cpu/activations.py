"""Exponential, sigmoid and the gated activations inside kernels, in float64 and without libm's exp.

float64 keeps the small values of both tails where float32 would overflow or underflow, and these
operations become vectors. Results are left in a scratch array: each step has to be stored, because
the simplifier takes float sums apart and copies an expression into each of its uses.
"""

import math
import struct

import tilelang.cpu.language as T


def _f64(value: float):
    """Return a float64 constant to its last bit; one written as a number keeps seven digits."""
    return T.reinterpret(T.int64(struct.unpack("<q", struct.pack("<d", value))[0]), "float64")


_EXP_SERIES = tuple(1 / math.factorial(n) for n in range(8, -1, -1))


@T.macro
def exp_of_negative(x, t):
    """Leave exp(x) of a float64 ``x <= 0`` in ``t[0]``, to 1e-9; ``t`` has three float64.

    Below -708 it is 0, where float32 has long had no value; NaN stays NaN.
    """
    t[0] = T.Select(x < T.float64(-708), T.float64(-708), x)
    # 2**n * exp(r), n whole: adding 1.5 * 2**52 rounds to n, which then stands in the low bits
    t[1] = t[0] * _f64(math.log2(math.e)) + _f64(1.5 * 2.0**52)
    t[2] = t[1] - _f64(1.5 * 2.0**52)
    t[0] = t[0] - t[2] * _f64(math.log(2))
    t[2] = _f64(_EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        t[2] = t[2] * t[0] + _f64(coefficient)
    exponent = T.reinterpret(t[1], "uint64") + T.uint64(1023)
    t[1] = T.reinterpret(exponent << T.uint64(52), "float64")
    t[0] = T.Select(x < T.float64(-708), T.float64(0), t[1] * t[2])


@T.macro
def sigmoid(x, t):
    """Leave the logistic function of a float64 in ``t[0]``; ``t`` has three float64."""
    exp_of_negative(T.Select(x < T.float64(0), x, -x), t)
    t[0] = T.Select(x >= T.float64(0), T.float64(1), t[0]) / (T.float64(1) + t[0])


# Gated activations of float64 values, left in ``t[0]``; ``t`` has four. A comparison with NaN is
# false, so that each clamp hands NaN on.


@T.macro
def _silu_and_mul(gate, up, t):
    sigmoid(gate, t)
    t[0] = gate * t[0] * up


@T.macro
def _gelu_and_mul(gate, up, t):
    # erfc keeps the small values that 1 + erf would lose
    t[0] = T.call_extern("float64", "erfc", gate * _f64(-math.sqrt(0.5)))
    t[0] = T.float64(0.5) * gate * t[0] * up


@T.macro
def _swigluoai(gate, up, t):
    t[3] = T.Select(gate > T.float64(7), T.float64(7), gate)
    sigmoid(t[3] * T.float64(1.702), t)
    t[1] = T.Select(up > T.float64(7), T.float64(7), up)
    t[1] = T.Select(up < T.float64(-7), T.float64(-7), t[1])
    t[0] = t[3] * t[0] * (t[1] + T.float64(1))


ACTIVATIONS = {None: 0, "silu_and_mul": 1, "gelu_and_mul": 2, "swigluoai": 3}
"""An activation's name as a kernel argument."""

GATED = {1: _silu_and_mul, 2: _gelu_and_mul, 3: _swigluoai}
"""The macro of each: called with gate, up and scratch."""
