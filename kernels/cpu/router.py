"""MoERouter on the CPU: affinities, the chosen slots, and the weights of this rank's experts."""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import exp_of_negative, sigmoid
from tileops.kernels.cpu.floats import FLOAT32, FORMATS, any_floats, floats, narrow, view
from tileops.kernels.cpu.ranking import (
    LOWEST_FINITE,
    TAKEN,
    find,
    key_of,
    read_scores,
    softmax_terms,
)
from tileops.kernels.cpu.threads import parallel

_MAX_SLOTS = 32  # of a token
_THREAD_STEPS = 1 << 17  # least work that pays for a thread: about 50 us
_SCORINGS = {"sqrt_softplus": 0, "softmax": 1, "sigmoid": 2}
_LOWEST = {torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -1e4}


@T.macro
def _sqrt_softplus(x, t):
    """Leave sqrt(log(1 + exp(x))) of a float64 in ``t[0]``; ``t`` has three float64."""
    exp_of_negative(T.Select(x < T.float64(0), x, -x), t)
    t[1] = T.call_extern("float64", "log1p", t[0])
    t[1] += T.Select(x > T.float64(0), x, T.float64(0))
    t[0] = T.call_extern("float64", "sqrt", t[1])


@compiler.jit
def build(level: str):
    """Build the kernel of all dtypes and settings, for E experts and K slots of a token.

    Args:
        level: Name of the vector level.
    """

    @T.macro
    def score(scores, keys, E, scoring, best, total, scratch):
        """Turn the scores into affinities."""
        if scoring == _SCORINGS["softmax"]:
            for e in T.serial(E):
                keys[e] = key_of(scores[e])
            softmax_terms(scores, keys, E, best, total, scratch)
            for e in T.serial(E):
                scores[e] = T.cast(T.cast(scores[e], "float64") / total[0], "float32")
        for name, affinity in (("sigmoid", sigmoid), ("sqrt_softplus", _sqrt_softplus)):
            if scoring == _SCORINGS[name]:
                for e in T.serial(E):
                    affinity(T.cast(scores[e], "float64"), scratch)
                    scores[e] = T.cast(scratch[0], "float32")

    @T.macro
    def choose(scores, bias, has_bias, keys, E, K, slots, best):
        """Fill the slots with the largest affinities plus bias; -1 where none is left."""
        for e in T.serial(E):
            keys[e] = key_of(scores[e])
        if has_bias != 0:
            for e in T.serial(E):
                keys[e] = key_of(scores[e] + bias[e])
        for k in T.serial(K):
            find(keys, (0, E), best)
            slots[k] = -1
            if best[0] > T.int32(LOWEST_FINITE):
                slots[k] = best[1]
            keys[best[1]] = T.int32(TAKEN)

    @T.prim_func
    def kernel(
        scores_address: T.Tensor[(1,), T.uint8],
        bias_address: T.Tensor[(1,), T.uint8],
        ids_address: T.Tensor[(1,), T.uint8],
        probs_address: T.Tensor[(1,), T.uint8],
        scale_address: T.Tensor[(1,), T.uint8],
        affinities_address: T.Tensor[(1,), T.uint8],
        keys_address: T.Tensor[(1,), T.uint8],
        tokens: T.int64,
        E: T.int64,
        K: T.int64,
        start: T.int64,
        columns: T.int64,
        row: T.int64,
        ids_row: T.int64,
        fmt: T.int32,
        probs_fmt: T.int32,
        scoring: T.int32,
        has_bias: T.int32,
        ids_bytes: T.int32,
        lowest: T.float32,
        route_scale: T.float64,
        lo: T.int64,
        hi: T.int64,
    ):
        T.annotate_compile_flags(compiler.flags(level))
        rows = any_floats(scores_address, (tokens, E), (row, 1))
        bias = floats(bias_address, (E,), FLOAT32)
        long_ids = view(ids_address, (tokens, K), T.int64, (ids_row, 1))
        short_ids = view(ids_address, (tokens, K), T.int32, (ids_row, 1))
        probs = any_floats(probs_address, (tokens, columns))
        scale = floats(scale_address, (tokens,), FLOAT32)
        scores = floats(affinities_address, (E,), FLOAT32)
        keys = view(keys_address, (E,), T.int32)
        with T.Kernel(1) as _:
            best = T.alloc_local((2,), T.int32)
            slots = T.alloc_local((_MAX_SLOTS,), T.int64)
            weights = T.alloc_local((_MAX_SLOTS,), T.float64)
            total = T.alloc_local((1,), T.float64)
            scratch = T.alloc_local((3,), T.float64)
            mass = T.alloc_var(T.float64)
            for t in T.serial(lo, hi):
                read_scores(rows, fmt, t, scores, E)
                score(scores, keys, E, scoring, best, total, scratch)
                if ids_bytes == 0:
                    choose(scores, bias, has_bias, keys, E, K, slots, best)
                else:
                    for k in T.serial(K):
                        slots[k] = T.if_then_else(
                            ids_bytes == 8, long_ids[t, k], T.cast(short_ids[t, k], "int64")
                        )
                total[0] = 0
                for k in T.serial(K):
                    weights[k] = 0
                    if slots[k] >= 0 and slots[k] < E:
                        weights[k] = T.cast(scores[slots[k]], "float64")
                    total[0] += weights[k]
                for k in T.serial(K):
                    # false for NaN
                    weights[k] = T.Select(
                        total[0] > T.float64(0), weights[k] / total[0], T.float64(0)
                    )
                for f in FORMATS.values():
                    if probs_fmt == f:
                        for column in T.serial(columns):
                            probs[f][t, column] = narrow(lowest, f)
                total[0] = 0
                for k in T.serial(K):
                    column = slots[k] - start
                    if column >= 0 and column < columns:
                        total[0] += weights[k]
                        # an expert in several slots has the weight of all
                        mass = 0
                        for other in T.serial(K):
                            if slots[other] == slots[k]:
                                mass += weights[other]
                        if mass > T.float64(0):
                            mass = T.call_extern("float64", "log", mass)
                            for f in FORMATS.values():
                                if probs_fmt == f:
                                    probs[f][t, column] = narrow(T.cast(mass, "float32"), f)
                scale[t] = T.cast(route_scale * total[0], "float32")

    return kernel


def refuse(*args, **named) -> str | None:
    """Say why this kernel cannot serve a call, or return None."""
    return compiler.refusal()


def moe_router_fwd(
    scores,
    bias,
    expert_ids,
    local_expert_count,
    topk,
    local_expert_start,
    scoring,
    route_scale,
    dtype,
    *,
    target,
):
    """Return the log weights of the local experts, and the sum of these weights times a scale."""
    tokens, E = scores.shape
    probs = scores.new_empty(tokens, local_expert_count, dtype=dtype)
    scale = scores.new_empty(tokens, 1, dtype=torch.float32)
    kernel = build(compiler.level().name)
    tensors = scores, bias, expert_ids, probs, scale
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    ids_row, ids_bytes = 0, 0
    if expert_ids is not None:
        ids_row, ids_bytes = expert_ids.stride(0), expert_ids.element_size()
    numbers = (
        *(tokens, E, topk, local_expert_start, local_expert_count, scores.stride(0), ids_row),
        *(FORMATS[scores.dtype], FORMATS[dtype], _SCORINGS[scoring], int(bias is not None)),
        *(ids_bytes, _LOWEST[dtype], float(route_scale)),
    )

    def route(lo: int, hi: int) -> None:
        affinities = torch.empty(E, dtype=torch.float32)
        keys = torch.empty(E, dtype=torch.int32)
        kernel(*addresses, affinities.data_ptr(), keys.data_ptr(), *numbers, lo, hi)

    parallel(tokens, -(-_THREAD_STEPS // (E * (topk + 32))), route)
    return probs, scale
