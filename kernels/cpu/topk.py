"""Top-k routing on the CPU: groups are kept, then the largest of the scores is taken K times."""

import tilelang.cpu.language as T
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.activations import sigmoid
from tileops.kernels.cpu.floats import FLOAT32, FORMATS, any_floats, floats, view
from tileops.kernels.cpu.ranking import (
    TAKEN,
    find,
    key_of,
    read_scores,
    softmax_terms,
    value_of,
)
from tileops.kernels.cpu.threads import parallel

_THREAD_STEPS = 1 << 17  # least work that pays for a thread: about 50 us


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
        T.annotate_compile_flags(compiler.flags(level))
        logits = any_floats(logits_address, (tokens, E), (row, 1))
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
                read_scores(logits, fmt, t, scores, E)
                # what experts rank by
                if is_sigmoid != 0:
                    for e in T.serial(E):
                        sigmoid(T.cast(scores[e], "float64"), scratch)
                        scores[e] = T.cast(scratch[0], "float32")
                if has_bias != 0:
                    for e in T.serial(E):
                        keys[e] = key_of(scores[e] + bias[e])
                else:
                    for e in T.serial(E):
                        keys[e] = key_of(scores[e])
                total[0] = 1
                if is_sigmoid == 0:
                    softmax_terms(scores, keys, E, best, total, scratch)
                if G > 1:
                    size = E // G
                    for g in T.serial(G):
                        two[0] = T.int32(TAKEN)
                        two[1] = T.int32(TAKEN)
                        for e in T.serial(size):
                            two[1] = T.max(two[1], T.min(two[0], keys[g * size + e]))
                            two[0] = T.max(two[0], keys[g * size + e])
                        keys[E + g] = two[0]
                        if has_bias != 0 and size > 1:
                            keys[E + g] = key_of(value_of(two[0]) + value_of(two[1]))
                    for _ in T.serial(kept):
                        find(keys, (E, G), best)
                        keys[E + best[1]] = T.int32(TAKEN)
                    for g in T.serial(G):
                        if keys[E + g] != T.int32(TAKEN):
                            for e in T.serial(size):
                                keys[g * size + e] = T.int32(TAKEN)
                for k in T.serial(K):
                    find(keys, (0, E), best)
                    keys[best[1]] = T.int32(TAKEN)
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
