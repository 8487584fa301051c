"""Top-k routing: scores, group limits, selection and weights of a token by one warp, one launch.

An expert is ranked by an int32 key that orders like its float32 score, so that NaN has a defined
place and a warp finds its best key in one instruction; the smallest expert id settles ties. It
stands below the key: in the same word where logits of 16 bits leave room, else in one more. A group
of experts is shared by a run of neighbouring lanes, so its score takes a few shuffles.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda import topk_merge, topk_scan
from tileops.kernels.cuda.device import current, dtype_name, jit, wrong_device
from tileops.kernels.cuda.ranking import (
    LAST,
    MAX_SLOTS,
    NAN,
    NAN_KEY,
    NO_KEY,
    WARP,
    WARPS_PER_BLOCK,
    group_key,
    keep_two,
    key_value,
    merge_lanes,
    rank_key,
    sigmoid,
    sorting_network,
    write_batch,
    write_weights,
)

SORTED_SLOTS = 16
"""Keys that a lane sorts at most: then a round of the selection takes the first and moves the rest
up. Sorting more costs more than looking for the best of them in each round."""
ID_BITS = 12
"""Bits of an expert in a packed key: enough for `MAX_SLOTS` and never all zero; a float16 has 13
to spare."""


@T.macro
def rank_value(rank, packed: bool):
    """Return the score of an int32 rank, whose low bits hold an id if it is ``packed``."""
    if packed:
        rest = rank & (-1 << ID_BITS)
        return T.reinterpret(rest ^ ((rest >> 31) & (LAST ^ ((1 << ID_BITS) - 1))), T.float32)
    else:
        return key_value(rank)


@T.macro
def make_key(score, expert, slot: int, scoring: str, packed: bool):
    """Return a key that is unique in its lane: of equal scores the lower expert's is higher."""
    rank = T.alloc_var(T.int32)
    if scoring == "sigmoid":  # no score is negative
        rank = T.Select(T.isnan(score), NAN_KEY, T.reinterpret(score, T.int32))
    else:
        rank = rank_key(score)
    if packed:
        return (rank & (-1 << ID_BITS)) | ((1 << ID_BITS) - 1 - expert)
    else:
        return (T.Cast(T.int64, rank) << 32) | T.Cast(T.int64, LAST - slot)


@T.macro
def key_rank(key, packed: bool):
    """Return the int32 that ranks an expert, in a packed key its id included."""
    if packed:
        return key
    else:
        return T.Cast(T.int32, key >> 32)


@T.macro
def key_expert(rank, expert, packed: bool):
    """Return the expert of a rank that a round took, from the rank if that is a packed key."""
    if packed:
        return (1 << ID_BITS) - 1 - (rank & ((1 << ID_BITS) - 1))
    else:
        return expert


@T.macro
def win(rank, expert, lane, packed: bool, top: T.Ref, winner: T.Ref, mine: T.Ref):
    """Find the best of the lanes' ranks, ``top``, and its expert, ``winner``; ``mine`` says where.

    Among equal ranks the lowest lane wins, whose experts are the lowest. A packed key has no equal
    and leaves ``winner`` alone.
    """
    top = T.warp_reduce_max(rank)
    mine = T.Cast(T.int32, rank == top)
    if not packed:
        equals = T.Cast(T.int32, T.ballot(mine))
        mine = T.Select((equals & ((1 << lane) - 1)) == 0, mine, 0)
        winner = T.Select(mine != 0, expert, -1)
        winner = T.warp_reduce_max(winner)


@jit
def build(dtype: str, scoring: str, slots: int):
    """Build the kernel that holds the keys of a token in registers.

    T tokens, E experts, K experts selected per token. ``2**lane_bits`` lanes share a group of
    ``group_size`` experts, ``slots`` neighbours each. ``vectors`` says that whole vectors of
    neighbours can be read.

    Args:
        dtype: Type of the logits.
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"biased_sigmoid"``.
        slots: Experts that a lane holds at most, a power of two.
    """
    num_tokens, num_experts, top_k = T.dynamic("T, E, K")
    row_stride = T.dynamic("row_stride", T.int64)
    packed = dtype != "float32" and scoring == "softmax"
    key_dtype, none = (T.int32, NO_KEY - 1) if packed else (T.int64, NO_KEY << 32)
    order_dtype = T.int64 if slots > 8 else T.int32
    per_word = 1 if dtype == "float32" else 2
    num_words = max(slots // per_word, 1)
    load, vector = {1: (T.ldg32, 1), 2: (T.ldg64, 2)}.get(num_words, (T.ldg128, 4))

    @T.prim_func
    def fused_topk(
        logits: T.StridedTensor[(num_tokens, num_experts), (row_stride, 1), dtype],
        bias: T.Tensor[(num_experts,), T.float32],
        weights: T.Tensor[(num_tokens, top_k), T.float32],
        ids: T.Tensor[(num_tokens, top_k), T.int32],
        lane_bits: T.int32,
        group_size: T.int32,
        topk_group: T.int32,
        renormalize: T.int32,
        factor: T.float32,
        vectors: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS_PER_BLOCK), threads=WARPS_PER_BLOCK * WARP) as b:
            thread = T.get_thread_binding()
            lane = thread % WARP
            token = b * WARPS_PER_BLOCK + thread // WARP
            words = T.alloc_local((num_words,), T.uint32)
            values = T.view(words, (num_words * per_word,), dtype)
            scores = T.alloc_local((slots,), T.float32)
            keys = T.alloc_local((slots,), key_dtype)
            ranks = keys if packed else T.alloc_local((slots,), T.int32)
            best = T.alloc_var(T.int32)
            second = T.alloc_var(T.int32)
            kept = T.alloc_var(T.int32)
            top = T.alloc_var(T.int32)
            winner = T.alloc_var(T.int32)
            mine = T.alloc_var(T.int32)
            key = T.alloc_var(key_dtype)
            order = T.alloc_var(order_dtype)
            chosen_rank = T.alloc_var(T.int32)
            chosen_expert = T.alloc_var(T.int32)
            chosen = T.alloc_var(T.int32)
            has_nan = T.alloc_var(T.int32)
            score = T.alloc_var(T.float32)
            highest = T.alloc_var(T.float32)
            normalizer = T.alloc_var(T.float32)
            total = T.alloc_var(T.float32)

            T.pdl_sync()
            T.pdl_trigger()
            if token < num_tokens:
                group = lane >> lane_bits
                within = (lane & ((1 << lane_bits) - 1)) * slots
                first = group * group_size + within
                room = T.min(group_size - within, num_experts - first)
                if slots >= per_word and vectors != 0:
                    for w in range(0, num_words, vector):
                        words[w : w + vector] = load(
                            logits[token, first + w * per_word], pred=w * per_word < room
                        )
                    for i in T.unroll(slots):
                        scores[i] = T.Cast(T.float32, values[i])
                else:
                    # No branch, so that every load is issued before the first value is used.
                    for i in T.unroll(slots):
                        scores[i] = T.Cast(
                            T.float32, logits[token, T.min(first + i, num_experts - 1)]
                        )
                has_nan = 0
                for i in T.unroll(slots):
                    score = scores[i]
                    if scoring == "softmax":
                        has_nan = has_nan | T.Cast(T.int32, T.isnan(score))
                    else:
                        score = sigmoid(score)
                    if scoring == "biased_sigmoid":
                        score = score + bias[T.min(first + i, num_experts - 1)]
                    keys[i] = make_key(score, first + i, i, scoring, packed)
                    keys[i] = T.Select(i < room, keys[i], none)
                if slots <= SORTED_SLOTS:
                    for i, j in sorting_network(slots):
                        lower = T.min(keys[i], keys[j])
                        keys[i] = T.max(keys[i], keys[j])
                        keys[j] = lower
                    order = 0
                    if not packed:
                        # From here on the ranks are apart from their slots, four bits for each.
                        for i in T.unroll(slots):
                            ranks[i] = key_rank(keys[i], packed)
                            order = order | (
                                (T.Cast(order_dtype, keys[i]) & (SORTED_SLOTS - 1)) << (4 * i)
                            )
                best = key_rank(keys[0], packed)
                second = NO_KEY
                if slots <= SORTED_SLOTS:
                    if slots > 1:
                        second = ranks[1]
                else:
                    for i in T.unroll(slots - 1):
                        keep_two(best, second, key_rank(keys[i + 1], packed), NO_KEY)

                total = 0
                if scoring == "softmax":
                    highest = rank_value(T.warp_reduce_max(best), packed)
                    normalizer = 0
                    if renormalize == 0:
                        for i in T.unroll(slots):
                            normalizer = normalizer + T.Select(
                                i < room, T.exp(scores[i] - highest), T.float32(0)
                            )
                        normalizer = T.warp_reduce_sum(normalizer)
                    elif T.any_sync(has_nan):
                        # the sum of all would be NaN; nothing else of it survives renormalising
                        total = NAN

                if topk_group > 0:
                    merge_lanes(best, second, lane_bits)
                    best = group_key(best, second, scoring)
                    kept = 0
                    for _ in T.serial(topk_group):
                        top = T.warp_reduce_max(best)
                        winner = T.warp_reduce_min(T.Select(best == top, group, LAST))
                        if group == winner:
                            best = NO_KEY
                            kept = 1
                    if kept == 0:
                        for i in T.unroll(slots):
                            if slots <= SORTED_SLOTS:
                                ranks[i] = key_rank(none, packed)
                            else:
                                keys[i] = none

                winner = 0
                for batch in T.serial(T.ceildiv(top_k, WARP)):
                    for k in T.serial(T.min(WARP, top_k - batch * WARP)):
                        if slots <= SORTED_SLOTS:
                            expert = first + (~T.Cast(T.int32, order) & (SORTED_SLOTS - 1))
                            win(ranks[0], expert, lane, packed, top, winner, mine)
                            for i in T.unroll(slots - 1):
                                ranks[i] = T.Select(mine != 0, ranks[i + 1], ranks[i])
                            ranks[slots - 1] = T.Select(
                                mine != 0, key_rank(none, packed), ranks[slots - 1]
                            )
                            if not packed:
                                order = T.Select(mine != 0, order >> 4, order)
                        else:
                            key = keys[0]
                            for i in T.unroll(slots - 1):
                                key = T.max(key, keys[i + 1])
                            expert = first + (~T.Cast(T.int32, key) & (MAX_SLOTS - 1))
                            win(key_rank(key, packed), expert, lane, packed, top, winner, mine)
                            for i in T.unroll(slots):
                                keys[i] = T.Select(T.And(mine != 0, keys[i] == key), none, keys[i])
                        if lane == k:
                            chosen_rank = top
                            chosen_expert = winner
                    chosen = key_expert(chosen_rank, chosen_expert, packed)
                    place = batch * WARP + lane
                    score = 0
                    if place < top_k:
                        if scoring == "biased_sigmoid":
                            score = sigmoid(T.Cast(T.float32, logits[token, chosen]))
                        else:
                            score = rank_value(chosen_rank, packed)
                        if scoring == "softmax":
                            score = T.exp(score - highest)
                            if renormalize == 0:
                                score = score / normalizer
                    write_batch(
                        weights, ids, token, place, top_k, chosen, score, total, renormalize
                    )
                write_weights(weights, token, lane, top_k, score, total, renormalize, factor)

    return fused_topk


def takes_vectors(logits, slots: int, group_size: int) -> bool:
    """Return whether `build` can read ``slots`` neighbours as whole vectors of up to 16 bytes."""
    step = min(slots, 16 // logits.element_size())
    starts = [group_size, logits.data_ptr() // logits.element_size()]
    if logits.shape[0] > 1:
        starts.append(logits.stride(0))
    return not any(start % step for start in starts)


def refuse(gating_output, *settings, **named) -> str | None:
    """Say why a call cannot be served: another GPU."""
    return wrong_device(gating_output)


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
    """Select the experts of every token; returns float32 weights and int32 ids, both ``[T, K]``."""
    num_tokens, num_experts = gating_output.shape
    weights = gating_output.new_empty((num_tokens, top_k), dtype=torch.float32)
    ids = gating_output.new_empty((num_tokens, top_k), dtype=torch.int32)
    if num_tokens == 0:
        return weights, ids
    if topk_group >= num_expert_group:
        num_expert_group, topk_group = 1, 0
    group_size = num_experts // num_expert_group
    lane_bits = max(5 - (num_expert_group - 1).bit_length(), 0)
    slots = 1 << (-(-group_size >> lane_bits) - 1).bit_length()
    dtype = dtype_name(gating_output)
    scoring = scoring_func if correction_bias is None else f"biased_{scoring_func}"
    split = (lane_bits, group_size, topk_group, int(renormalize), routed_scaling_factor)
    with current(gating_output.device):
        if topk_merge.takes(num_tokens, num_experts, top_k, num_expert_group):
            topk_merge.launch(
                gating_output,
                correction_bias,
                weights,
                ids,
                scoring,
                renormalize,
                num_expert_group,
                topk_group,
                routed_scaling_factor,
            )
        elif num_expert_group <= WARP and slots <= MAX_SLOTS:
            kernel = build(dtype, scoring, slots)
            vectors = takes_vectors(gating_output, slots, group_size)
            kernel(gating_output, correction_bias, weights, ids, *split, int(vectors))
        else:
            kernel = topk_scan.build(dtype, scoring)
            group_keys = ids.new_empty((num_tokens, num_expert_group))
            kernel(gating_output, correction_bias, weights, ids, group_keys, *split)
    return weights, ids
