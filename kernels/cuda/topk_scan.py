"""Top-k routing for any number of experts and groups: the schedule that keeps no keys.

A token is one warp's, as in `topk`.
"""

import tilelang.language as T

from tileops.kernels.cuda.device import jit
from tileops.kernels.cuda.ranking import (
    LAST,
    NO_KEY,
    WARP,
    WARPS_PER_BLOCK,
    group_key,
    keep_two,
    merge_lanes,
    scan_softmax,
    selection_key,
    weigh,
    write_batch,
    write_weights,
)


@jit
def build(dtype: str, scoring: str):
    """Build the kernel for any number of experts and groups: each round reads the logits again.

    Instead of marking what was taken, a round looks for the best key after the last one in the
    order of selection. ``group_keys`` is a workspace; the other names are those of the kernel in
    `topk`.
    """
    num_tokens, num_experts, top_k, num_groups = T.dynamic("T, E, K, G")
    row_stride = T.dynamic("row_stride", T.int64)

    @T.prim_func
    def fused_topk_scan(
        logits: T.StridedTensor[(num_tokens, num_experts), (row_stride, 1), dtype],
        bias: T.Tensor[(num_experts,), T.float32],
        weights: T.Tensor[(num_tokens, top_k), T.float32],
        ids: T.Tensor[(num_tokens, top_k), T.int32],
        group_keys: T.Tensor[(num_tokens, num_groups), T.int32],
        lane_bits: T.int32,
        group_size: T.int32,
        topk_group: T.int32,
        renormalize: T.int32,
        factor: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS_PER_BLOCK), threads=WARPS_PER_BLOCK * WARP) as b:
            thread = T.get_thread_binding()
            lane = thread % WARP
            token = b * WARPS_PER_BLOCK + thread // WARP
            key = T.alloc_var(T.int32)
            best = T.alloc_var(T.int32)
            second = T.alloc_var(T.int32)
            found = T.alloc_var(T.int32)
            last_key = T.alloc_var(T.int32)
            last = T.alloc_var(T.int32)
            worst_group_key = T.alloc_var(T.int32)
            worst_group = T.alloc_var(T.int32)
            chosen = T.alloc_var(T.int32)
            score = T.alloc_var(T.float32)
            highest = T.alloc_var(T.float32)
            normalizer = T.alloc_var(T.float32)
            total = T.alloc_var(T.float32)

            T.pdl_sync()
            T.pdl_trigger()
            if token < num_tokens:
                if scoring == "softmax":
                    scan_softmax(logits, token, lane, num_experts, best, highest, normalizer)

                worst_group_key = NO_KEY
                worst_group = 0
                if topk_group > 0:
                    for p in T.serial(T.ceildiv(num_groups << lane_bits, WARP)):
                        group = ((p * WARP) + lane) >> lane_bits
                        best = NO_KEY
                        second = NO_KEY
                        for i in T.serial((group_size + (1 << lane_bits) - 1) >> lane_bits):
                            within = (lane & ((1 << lane_bits) - 1)) + (i << lane_bits)
                            if within < group_size and group < num_groups:
                                expert = group * group_size + within
                                score = T.Cast(T.float32, logits[token, expert])
                                key = selection_key(score, bias, expert, scoring)
                                keep_two(best, second, key, NO_KEY)
                        merge_lanes(best, second, lane_bits)
                        best = group_key(best, second, scoring)
                        if lane & ((1 << lane_bits) - 1) == 0 and group < num_groups:
                            group_keys[token, group] = best
                    T.sync_warp()
                    worst_group_key = LAST
                    worst_group = -1
                    for _ in T.serial(topk_group):
                        best = NO_KEY
                        found = LAST
                        for i in T.serial(T.ceildiv(num_groups, WARP)):
                            group = i * WARP + lane
                            if group < num_groups:
                                key = group_keys[token, group]
                                if key > best and (
                                    key < worst_group_key
                                    or (key == worst_group_key and group > worst_group)
                                ):
                                    best = key
                                    found = group
                        worst_group_key = T.warp_reduce_max(best)
                        worst_group = T.warp_reduce_min(
                            T.Select(best == worst_group_key, found, LAST)
                        )

                total = 0
                last_key = LAST
                last = -1
                for batch in T.serial(T.ceildiv(top_k, WARP)):
                    for k in T.serial(T.min(WARP, top_k - batch * WARP)):
                        best = NO_KEY
                        found = LAST
                        for i in T.serial(T.ceildiv(num_experts, WARP)):
                            expert = i * WARP + lane
                            if expert < num_experts:
                                score = T.Cast(T.float32, logits[token, expert])
                                key = selection_key(score, bias, expert, scoring)
                                if key > best and (
                                    key < last_key or (key == last_key and expert > last)
                                ):
                                    second = LAST
                                    if topk_group > 0:
                                        second = group_keys[token, T.truncdiv(expert, group_size)]
                                    if second > worst_group_key or (
                                        second == worst_group_key
                                        and T.truncdiv(expert, group_size) <= worst_group
                                    ):
                                        best = key
                                        found = expert
                        last_key = T.warp_reduce_max(best)
                        last = T.warp_reduce_min(T.Select(best == last_key, found, LAST))
                        if lane == k:
                            chosen = last
                    place = batch * WARP + lane
                    score = 0
                    if place < top_k:
                        score = T.Cast(T.float32, logits[token, chosen])
                        weigh(score, highest, normalizer, scoring)
                    write_batch(
                        weights, ids, token, place, top_k, chosen, score, total, renormalize
                    )
                write_weights(weights, token, lane, top_k, score, total, renormalize, factor)

    return fused_topk_scan
