"""Top-k routing on the CPU: scores become integers that sort alike; the largest is taken K times.

Integer keys give what a comparison of floats cannot: NaN ranks below minus infinity, -0.0 ties with
0.0, and a search for the maximum runs in vectors. Among equal keys the first index wins.
"""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import exp_of_negative, sigmoid
from tileops.kernels.cpu.floats import BFLOAT16, FLOAT32, FORMATS, floats, view, widen
from tileops.kernels.cpu.threads import parallel

_TAKEN = -0x7FFFFFFF  # below every key: taken, or in a group that is not kept
_NAN = -0x7FFFFFFE
_THREAD_STEPS = 1 << 17  # least work that pays for a thread: about 50 us


def _key(value):
    """Return an int32 that orders as the float32 does."""
    bits = T.reinterpret(value, "int32")
    magnitude = bits & 0x7FFFFFFF
    return T.Select(
        magnitude > 0x7F800000, T.int32(_NAN), T.Select(bits < 0, -magnitude, magnitude)
    )


def _value(key):
    """Return the float32 that has this key."""
    return T.Select(key < 0, -T.reinterpret(-key, "float32"), T.reinterpret(key, "float32"))


@T.macro
def _take(keys, span, best):
    """Leave the largest of ``span[1]`` keys from ``span[0]`` on in ``best``, and which it is."""
    best[0] = T.int32(_TAKEN)
    for e in T.serial(span[1]):
        best[0] = T.max(best[0], keys[span[0] + e])
    best[1] = 0
    while keys[span[0] + best[1]] != best[0]:
        best[1] += 1


@compiler.jit
def build(level: str):
    """Build the kernel of all dtypes and settings.

    Letters: E experts, K selected, G groups, of which ``kept`` are kept.

    Args:
        level: Name of the vector level.
    """

    @T.prim_func
    def kernel(
        logits_address: T.Tensor[(1,), T.uint8],
        bias_address: T.Tensor[(1,), T.uint8],
        weights_address: T.Tensor[(1,), T.uint8],
        ids_address: T.Tensor[(1,), T.uint8],
        scores_address: T.Tensor[(1,), T.uint8],
        keys_address: T.Tensor[(1,), T.uint8],
        tokens: T.int64,
        E: T.int64,
        K: T.int64,
        G: T.int64,
        kept: T.int64,
        row: T.int64,
        fmt: T.int32,
        is_sigmoid: T.int32,
        has_bias: T.int32,
        renormalize: T.int32,
        scale: T.float32,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags())
        halves = floats(logits_address, (tokens, E), BFLOAT16, (row, 1))
        full = floats(logits_address, (tokens, E), FLOAT32, (row, 1))
        bias = floats(bias_address, (E,), FLOAT32)
        weights = floats(weights_address, (tokens, K), FLOAT32)
        ids = view(ids_address, (tokens, K), T.int32)
        scores = floats(scores_address, (E,), FLOAT32)
        keys = view(keys_address, (E + G,), T.int32)
        with T.Kernel(1) as _:
            best = T.alloc_local((2,), T.int32)
            two = T.alloc_local((2,), T.int32)
            total = T.alloc_local((1,), T.float64)
            scratch = T.alloc_local((3,), T.float64)
            for t in T.serial(lo, hi):
                for f in FORMATS.values():
                    if fmt == f:
                        for e in T.serial(E):
                            scores[e] = widen((full if f == FLOAT32 else halves)[t, e], f)
                # what experts rank by
                if is_sigmoid != 0:
                    for e in T.serial(E):
                        sigmoid(T.cast(scores[e], "float64"), scratch)
                        scores[e] = T.cast(scratch[0], "float32")
                if has_bias != 0:
                    for e in T.serial(E):
                        keys[e] = _key(scores[e] + bias[e])
                else:
                    for e in T.serial(E):
                        keys[e] = _key(scores[e])
                total[0] = 1
                if is_sigmoid == 0:
                    best[0] = T.int32(_TAKEN)
                    for e in T.serial(E):
                        best[0] = T.max(best[0], keys[e])
                    peak = T.cast(_value(best[0]), "float64")
                    for e in T.serial(E):
                        exp_of_negative(T.cast(scores[e], "float64") - peak, scratch)
                        scores[e] = T.cast(scratch[0], "float32")
                    total[0] = 0
                    for e in T.serial(E):
                        total[0] += T.cast(scores[e], "float64")
                if G > 1:
                    size = E // G
                    for g in T.serial(G):
                        two[0] = T.int32(_TAKEN)
                        two[1] = T.int32(_TAKEN)
                        for e in T.serial(size):
                            two[1] = T.max(two[1], T.min(two[0], keys[g * size + e]))
                            two[0] = T.max(two[0], keys[g * size + e])
                        keys[E + g] = two[0]
                        if has_bias != 0 and size > 1:
                            keys[E + g] = _key(_value(two[0]) + _value(two[1]))
                    for _ in T.serial(kept):
                        _take(keys, (E, G), best)
                        keys[E + best[1]] = T.int32(_TAKEN)
                    for g in T.serial(G):
                        if keys[E + g] != T.int32(_TAKEN):
                            for e in T.serial(size):
                                keys[g * size + e] = T.int32(_TAKEN)
                for k in T.serial(K):
                    _take(keys, (0, E), best)
                    keys[best[1]] = T.int32(_TAKEN)
                    ids[t, k] = best[1]
                    weights[t, k] = T.cast(T.cast(scores[best[1]], "float64") / total[0], "float32")
                total[0] = 1
                if renormalize != 0:
                    total[0] = 0
                    for k in T.serial(K):
                        total[0] += T.cast(weights[t, k], "float64")
                    # all weights are 0 then, and stay so
                    if total[0] == T.float64(0):
                        total[0] = 1
                for k in T.serial(K):
                    weights[t, k] = (
                        T.cast(T.cast(weights[t, k], "float64") / total[0], "float32") * scale
                    )

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def fused_topk_fwd(
    gating_output,
    correction_bias,
    top_k,
    scoring_func,
    renormalize,
    num_expert_group,
    topk_group,
    routed_scaling_factor,
    target,
):
    """Return each token's weights and expert ids, best first."""
    tokens, E = gating_output.shape
    weights = gating_output.new_empty(tokens, top_k, dtype=torch.float32)
    ids = gating_output.new_empty(tokens, top_k, dtype=torch.int32)
    kernel = build(compiler.level().name)
    addresses = (
        gating_output.data_ptr(),
        0 if correction_bias is None else correction_bias.data_ptr(),
        *(weights.data_ptr(), ids.data_ptr()),
    )
    numbers = (
        *(tokens, E, top_k, num_expert_group, topk_group, gating_output.stride(0)),
        *(FORMATS[gating_output.dtype], int(scoring_func == "sigmoid")),
        *(int(correction_bias is not None), int(renormalize)),
        float(routed_scaling_factor),
    )

    def select(lo: int, hi: int) -> None:
        scores = torch.empty(E, dtype=torch.float32)
        keys = torch.empty(E + num_expert_group, dtype=torch.int32)
        kernel(*addresses, scores.data_ptr(), keys.data_ptr(), *numbers, lo, hi)

    parallel(tokens, -(-_THREAD_STEPS // (E * (top_k + 8))), select)
    return weights, ids
