"""Exponential, sigmoid and the activations inside kernels, in float64 and without libm's exp.

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


# Activations of float64 values, left in ``t[0]``; ``t`` has four. All take a gate and an up value,
# the numbers of ``swiglu``, and ``t``. A comparison with NaN is false, so that each clamp hands NaN
# on.


@T.macro
def _silu_and_mul(gate, up, numbers, t):
    sigmoid(gate, t)
    t[0] = gate * t[0] * up


@T.macro
def _gelu_and_mul(gate, up, numbers, t):
    # erfc keeps the small values that 1 + erf would lose
    t[0] = T.call_extern("float64", "erfc", gate * _f64(-math.sqrt(0.5)))
    t[0] = T.float64(0.5) * gate * t[0] * up


@T.macro
def swiglu(gate, up, numbers, t):
    """Apply the clamped SwiGLU; ``numbers`` are float64 arguments: alpha, beta and the limit."""
    alpha, beta, limit = numbers
    t[3] = T.Select(gate > limit, limit, gate)
    sigmoid(t[3] * alpha, t)
    t[1] = T.Select(up > limit, limit, up)
    t[1] = T.Select(up < -limit, -limit, t[1])
    t[0] = t[3] * t[0] * (t[1] + beta)


@T.macro
def _relu(value, up, numbers, t):
    t[0] = T.Select(value < T.float64(0), T.float64(0), value)


@T.macro
def _gelu_tanh(value, up, numbers, t):
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z
    t[3] = value + _f64(0.044715) * value * value * value
    sigmoid(_f64(2 * 0.7978845608) * t[3], t)
    t[0] = value * t[0]


@T.macro
def _silu(value, up, numbers, t):
    sigmoid(value, t)
    t[0] = value * t[0]


ACTIVATIONS = {
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "swiglu": swiglu,
    "relu": _relu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
"""The macro of each activation of a grouped GEMM. The last three do not read the up value."""

CODES = {name: code for code, name in enumerate(ACTIVATIONS, 1)}
"""An activation's name as a kernel argument; 0 is none."""


def as_arguments(activation) -> tuple[int, float, float, float]:
    """Return the code and the numbers of an activation, or of None."""
    if activation is None:
        return 0, 0.0, 0.0, 0.0
    return CODES[activation.name], activation.alpha, activation.beta, activation.limit
