"""Activation formulas that kernels apply to float32 values."""

import tilelang.language as T


def sigmoid(x):
    """Return the sigmoid: no exponential overflows, and small values are kept."""
    small = T.exp(-T.abs(x))
    return T.Select(x >= 0, T.float32(1), small) * T.fast_rcp(T.float32(1) + small)


def swiglu(gate, up, alpha, beta, limit):
    """Return the clamped SwiGLU; comparisons, unlike min and max, let NaN through."""
    gate = T.Select(gate > limit, limit, gate)
    up = T.Select(up > limit, limit, T.Select(up < -limit, -limit, up))
    return gate * sigmoid(alpha * gate) * (up + beta)
