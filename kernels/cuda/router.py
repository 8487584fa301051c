"""MoERouter: affinities, choice and the local columns of a token by one warp, one launch.

Lane k holds the k-th chosen expert. Ranking is that of `ranking`: int32 keys that order like the
float32 values, the smallest expert id settling ties.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda.device import current, dtype_name, jit, wrong_device
from tileops.kernels.cuda.ranking import (
    LAST,
    MAX_SLOTS,
    NO_KEY,
    WARP,
    WARPS_PER_BLOCK,
    key_value,
    pick,
    rank_key,
    scan_softmax,
    weigh,
)

LOWEST_KEY = -0x7F800000
"""The key of -FLT_MAX: an expert must rank above it to be chosen."""

NO_WEIGHT = {"float32": -1e30, "bfloat16": -1e30, "float16": -1e4}
"""What a column holds whose expert has no weight, a dtype each."""


@T.macro
def score_affinity(score: T.Ref, highest, normalizer, scoring: str):
    """Turn a score into its affinity; ``highest`` and ``normalizer`` are of the softmax."""
    if scoring == "sqrt_softplus":
        # far below zero softplus is the exponential, whose root does not underflow as it would
        if score < -20:
            score = T.exp(0.5 * score)
        else:
            score = T.sqrt(T.max(score, T.float32(0)) + T.log1p(T.exp(-T.abs(score))))
    else:
        weigh(score, highest, normalizer, scoring)


@T.macro
def candidate_key(affinity, bias, expert, has_bias: bool):
    """Return the key that ranks an expert, `NO_KEY` if it cannot be chosen."""
    value = T.alloc_var(T.float32)
    key = T.alloc_var(T.int32)
    value = affinity
    if has_bias:
        value = value + bias[expert]
    key = rank_key(value)
    return T.Select(key > LOWEST_KEY, key, NO_KEY)


@jit
def build(dtype: str, out_dtype: str, scoring: str, ids_dtype: str, has_bias: bool, slots: int):
    """Build the kernel for T tokens, E experts, K chosen and L local ones.

    Args:
        dtype: Type of the scores.
        out_dtype: Type of ``router_probs``.
        scoring: ``"sqrt_softplus"``, ``"softmax"`` or ``"sigmoid"``.
        ids_dtype: Type of the given choice, or ``"none"`` to choose here; then None is passed.
        has_bias: Whether a bias is added for the choice; without, None is passed in its place.
        slots: Keys that a lane holds in registers, enough for E. With 0 every round of the choice
            reads the scores again, which any E allows.
    """
    num_tokens, num_experts, num_local = T.dynamic("T, E, L")
    num_ids = T.dynamic("K")
    score_stride, id_stride = T.dynamic("score_stride, id_stride", T.int64)
    given = ids_dtype != "none"
    index_dtype = ids_dtype if given else T.int32

    @T.prim_func
    def moe_router(
        scores: T.StridedTensor[(num_tokens, num_experts), (score_stride, 1), dtype],
        bias: T.Tensor[(num_experts,), T.float32],
        expert_ids: T.StridedTensor[(num_tokens, num_ids), (id_stride, 1), index_dtype],
        probs: T.Tensor[(num_tokens, num_local), out_dtype],
        scale: T.Tensor[(num_tokens, 1), T.float32],
        top_k: T.int32,
        local_start: T.int32,
        route_scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS_PER_BLOCK), threads=WARPS_PER_BLOCK * WARP) as b:
            thread = T.get_thread_binding()
            lane = thread % WARP
            token = b * WARPS_PER_BLOCK + thread // WARP
            best = T.alloc_var(T.int32)
            found = T.alloc_var(T.int32)
            last_key = T.alloc_var(T.int32)
            last = T.alloc_var(T.int32)
            chosen = T.alloc_var(T.int32)
            score = T.alloc_var(T.float32)
            highest = T.alloc_var(T.float32)
            normalizer = T.alloc_var(T.float32)
            weight = T.alloc_var(T.float32)
            total = T.alloc_var(T.float32)
            if slots:
                values = T.alloc_local((slots,), T.float32)
                keys = T.alloc_local((slots,), T.int32)
                match = T.alloc_local((slots // 2,), T.int32)
                places = T.alloc_local((slots // 2,), T.int32)

            if token < num_tokens:
                chosen = -1
                if given:
                    if scoring == "softmax":
                        scan_softmax(scores, token, lane, num_experts, best, highest, normalizer)
                    # compared before it is narrowed
                    if (
                        lane < top_k
                        and expert_ids[token, lane] >= 0
                        and expert_ids[token, lane] < num_experts
                    ):
                        chosen = T.Cast(T.int32, expert_ids[token, lane])
                elif slots:
                    # No branch, so that every load is issued before the first value is used.
                    for i in T.unroll(slots):
                        values[i] = T.Cast(
                            T.float32, scores[token, T.min(i * WARP + lane, num_experts - 1)]
                        )
                    if scoring == "softmax":
                        best = NO_KEY
                        for i in T.unroll(slots):
                            best = T.max(best, rank_key(values[i]))
                        highest = key_value(T.warp_reduce_max(best))
                        normalizer = 0
                        for i in T.unroll(slots):
                            if i * WARP + lane < num_experts:
                                normalizer = normalizer + T.exp(values[i] - highest)
                        normalizer = T.warp_reduce_sum(normalizer)
                    for i in T.unroll(slots):
                        score = values[i]
                        score_affinity(score, highest, normalizer, scoring)
                        keys[i] = candidate_key(
                            score, bias, T.min(i * WARP + lane, num_experts - 1), has_bias
                        )
                        keys[i] = T.Select(i * WARP + lane < num_experts, keys[i], NO_KEY)
                    for k in T.serial(top_k):
                        pick(keys, match, places, lane, 5, slots, last_key, last)
                        if lane == k and last_key != NO_KEY:
                            chosen = last
                else:
                    if scoring == "softmax":
                        scan_softmax(scores, token, lane, num_experts, best, highest, normalizer)
                    last_key = LAST
                    last = -1
                    for k in T.serial(top_k):
                        # the best key after the last one in the order of selection
                        best = NO_KEY
                        found = LAST
                        for i in T.serial(T.ceildiv(num_experts, WARP)):
                            expert = i * WARP + lane
                            if expert < num_experts:
                                score = T.Cast(T.float32, scores[token, expert])
                                score_affinity(score, highest, normalizer, scoring)
                                key = candidate_key(score, bias, expert, has_bias)
                                if key > best and (
                                    key < last_key or (key == last_key and expert > last)
                                ):
                                    best = key
                                    found = expert
                        last_key = T.warp_reduce_max(best)
                        last = T.warp_reduce_min(T.Select(best == last_key, found, LAST))
                        if lane == k and last_key != NO_KEY:
                            chosen = last

                weight = 0
                if chosen >= 0:
                    weight = T.Cast(T.float32, scores[token, chosen])
                    score_affinity(weight, highest, normalizer, scoring)
                total = T.warp_reduce_sum(weight)
                weight = T.Select(total > 0, weight / total, T.float32(0))
                if given:
                    # the first slot of an expert collects the weights of the others
                    score = weight
                    weight = 0
                    best = chosen
                    for k in T.serial(top_k):
                        last = T.shfl_sync(best, k)
                        total = T.shfl_sync(score, k)
                        if last == best:
                            weight = weight + total
                            if k < lane:
                                chosen = -1

                for i in T.serial(T.ceildiv(num_local, WARP)):
                    if i * WARP + lane < num_local:
                        probs[token, i * WARP + lane] = NO_WEIGHT[out_dtype]
                T.sync_warp()
                total = 0
                if chosen >= local_start and chosen - local_start < num_local:
                    total = weight
                    if weight > 0:
                        probs[token, chosen - local_start] = T.log(weight)
                total = T.warp_reduce_sum(total)
                if lane == 0:
                    scale[token, 0] = route_scale * total

    return moe_router


def refuse(scores, *settings, **named) -> str | None:
    """Say why a call cannot be served: another GPU."""
    return wrong_device(scores)


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
    """Route every token; returns ``router_probs`` in ``dtype`` and ``weight_scale`` in float32."""
    num_tokens, num_experts = scores.shape
    probs = scores.new_empty((num_tokens, local_expert_count), dtype=dtype)
    scale = scores.new_empty((num_tokens, 1), dtype=torch.float32)
    if num_tokens == 0:
        return probs, scale
    slots = 0
    if expert_ids is None and num_experts <= MAX_SLOTS * WARP:
        slots = max(1 << (-(-num_experts // WARP) - 1).bit_length(), 2)
    bias = bias if expert_ids is None else None
    kernel = build(
        dtype_name(scores),
        dtype_name(probs),
        scoring,
        "none" if expert_ids is None else dtype_name(expert_ids),
        bias is not None,
        slots,
    )
    with current(scores.device):
        kernel(scores, bias, expert_ids, probs, scale, topk, local_expert_start, route_scale)
    return probs, scale
