"""Ranking scores inside kernels: they become integers that sort alike, and the largest is taken.

Integer keys give what a comparison of floats cannot: NaN ranks below minus infinity, -0.0 ties with
0.0, and a search for the maximum runs in vectors. Among equal keys the first index wins.
"""

import tilelang.cpu.language as T

from tileops.kernels.cpu.activations import exp_of_negative
from tileops.kernels.cpu.floats import widen

TAKEN = -0x7FFFFFFF
"""Below every key: of what has been taken or is out of the race."""

_NAN = -0x7FFFFFFE
LOWEST_FINITE = -0x7F7FFFFF
"""The key of the lowest finite float32."""


def key_of(value):
    """Return an int32 that orders as the float32 does."""
    bits = T.reinterpret(value, "int32")
    magnitude = bits & 0x7FFFFFFF
    return T.Select(
        magnitude > 0x7F800000, T.int32(_NAN), T.Select(bits < 0, -magnitude, magnitude)
    )


def value_of(key):
    """Return the float32 that has this key."""
    return T.Select(key < 0, -T.reinterpret(-key, "float32"), T.reinterpret(key, "float32"))


@T.macro
def largest(keys, span, best):
    """Leave the largest of ``span[1]`` keys from ``span[0]`` on in ``best[0]``."""
    best[0] = T.int32(TAKEN)
    for e in T.serial(span[1]):
        best[0] = T.max(best[0], keys[span[0] + e])


@T.macro
def find(keys, span, best):
    """Leave the largest of a span of keys in ``best``, and which of them it is."""
    largest(keys, span, best)
    best[1] = 0
    while keys[span[0] + best[1]] != best[0]:
        best[1] += 1


@T.macro
def read_scores(rows, fmt, t, scores, E):
    """Widen row ``t`` of ``floats.any_floats`` into ``scores``."""
    for f, matrix in rows.items():
        if fmt == f:
            for e in T.serial(E):
                scores[e] = widen(matrix[t, e], f)


@T.macro
def softmax_terms(scores, keys, E, best, total, scratch):
    """Turn ``scores``, whose keys are given, into exp(score - maximum); their sum is ``total[0]``.

    A NaN becomes NaN alone; the sum is NaN then.
    """
    largest(keys, (0, E), best)
    peak = T.cast(value_of(best[0]), "float64")
    for e in T.serial(E):
        exp_of_negative(T.cast(scores[e], "float64") - peak, scratch)
        scores[e] = T.cast(scratch[0], "float32")
    total[0] = 0
    for e in T.serial(E):
        total[0] += T.cast(scores[e], "float64")
