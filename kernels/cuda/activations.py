"""Activation formulas that kernels apply to float32 values."""

import tilelang.language as T

GATED = ("silu_and_mul", "gelu_and_mul", "swiglu")
"""The activations that gate one product with another."""


def sigmoid(x):
    """Return the sigmoid: no exponential overflows, and small values are kept."""
    small = T.exp(-T.abs(x))
    return T.Select(x >= 0, T.float32(1), small) * T.fast_rcp(T.float32(1) + small)


def swiglu(gate, up, alpha, beta, limit):
    """Return the clamped SwiGLU; comparisons, unlike min and max, let NaN through."""
    gate = T.Select(gate > limit, limit, gate)
    up = T.Select(up > limit, limit, T.Select(up < -limit, -limit, up))
    return gate * sigmoid(alpha * gate) * (up + beta)


def gated(gate, up, activation: str, alpha, beta, limit):
    """Return the activation of two products."""
    if activation == "silu_and_mul":
        return gate * sigmoid(gate) * up
    if activation == "gelu_and_mul":
        return 0.5 * gate * (1 + T.erf(gate * 0.5**0.5)) * up
    return swiglu(gate, up, alpha, beta, limit)


def activated(x, activation: str):
    """Return the activation of one product."""
    if activation == "relu":
        return T.Select(x < 0, T.float32(0), x)
    if activation == "silu":
        return x * sigmoid(x)
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z, which keeps the tail of negative x
    return x * sigmoid(2 * 0.7978845608 * (x + 0.044715 * x * x * x))
