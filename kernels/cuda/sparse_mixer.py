"""PhiMoE's routing: two experts of a token, one after the other, by one warp, one launch."""

import tilelang.language as T
import torch

from tileops.kernels.cuda.device import current, dtype_name, jit, wrong_device
from tileops.kernels.cuda.ranking import LAST, NO_KEY, WARP, WARPS_PER_BLOCK, key_value, rank_key

NEAR = 0.02
"""Twice the jitter of training, 0.01: how far below the best a logit counts, relative to both."""


@T.macro
def choose(logits, token, lane, num_experts, taken, expert: T.Ref, weight: T.Ref):
    """Set ``expert`` to the best but ``taken``, ``weight`` to its softmax among those near it."""
    key = T.alloc_var(T.int32)
    best = T.alloc_var(T.int32)
    top = T.alloc_var(T.float32)
    score = T.alloc_var(T.float32)
    best = NO_KEY
    expert = LAST
    for i in T.serial(T.ceildiv(num_experts, WARP)):
        at = i * WARP + lane
        if at < num_experts and at != taken:
            score = T.Cast(T.float32, logits[token, at])
            key = rank_key(score)
            if key > best:
                best = key
                expert = at
    key = T.warp_reduce_max(best)
    expert = T.warp_reduce_min(T.Select(best == key, expert, LAST))
    top = key_value(key)
    weight = 0
    for i in T.serial(T.ceildiv(num_experts, WARP)):
        at = i * WARP + lane
        if at < num_experts and at != taken:
            score = T.Cast(T.float32, logits[token, at])
            far = top - score > NEAR * T.max(T.abs(score), top)
            weight = weight + T.Select(far, T.float32(0), T.exp(score - top))
    weight = 1 / T.warp_reduce_sum(weight)


@jit
def build(dtype: str):
    """Build the kernel for T tokens and E experts, whose logits have type ``dtype``."""
    num_tokens, num_experts = T.dynamic("T, E")
    row_stride = T.dynamic("row_stride", T.int64)

    @T.prim_func
    def sparse_mixer(
        logits: T.StridedTensor[(num_tokens, num_experts), (row_stride, 1), dtype],
        weights: T.Tensor[(num_tokens, 2), T.float32],
        ids: T.Tensor[(num_tokens, 2), T.int32],
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS_PER_BLOCK), threads=WARPS_PER_BLOCK * WARP) as b:
            thread = T.get_thread_binding()
            lane = thread % WARP
            token = b * WARPS_PER_BLOCK + thread // WARP
            expert = T.alloc_var(T.int32)
            taken = T.alloc_var(T.int32)
            weight = T.alloc_var(T.float32)
            if token < num_tokens:
                expert = -1
                for k in T.serial(2):
                    taken = expert
                    choose(logits, token, lane, num_experts, taken, expert, weight)
                    if lane == 0:
                        weights[token, k] = weight
                        ids[token, k] = expert

    return sparse_mixer


def refuse(logits, *, target) -> str | None:
    """Say why a call cannot be served: another GPU."""
    return wrong_device(logits)


def sparse_mixer_fwd(logits, *, target):
    """Choose two experts a token; returns float32 weights and int32 ids, both ``[T, 2]``."""
    weights = logits.new_empty((logits.shape[0], 2), dtype=torch.float32)
    ids = logits.new_empty((logits.shape[0], 2), dtype=torch.int32)
    if logits.shape[0]:
        with current(logits.device):
            build(dtype_name(logits))(logits, weights, ids)
    return weights, ids
