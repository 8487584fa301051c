"""Top-k routing: scores, group limits, selection and weights of a token by one warp, one launch.

An expert is ranked by an int32 key that orders like its float32 score, so that NaN has a defined
place and a warp finds its best key in one instruction; the smallest expert id settles ties. It
stands below the key: in the same word where logits of 16 bits leave room, else in one more. A group
of experts is shared by a run of neighbouring lanes, so its score takes a few shuffles.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda.device import current, dtype_name, jit, wrong_device

WARP = 32
WARPS_PER_BLOCK = 4
MAX_SLOTS = 64
"""Keys that a lane holds in registers at most; above, every round reads the logits again."""
SORTED_SLOTS = 16
"""Keys that a lane sorts at most: then a round of the selection takes the first and moves the rest
up. Sorting more costs more than looking for the best of them in each round."""
ID_BITS = 12
"""Bits of an expert in a packed key: enough for `MAX_SLOTS` and never all zero; a float16 has 13
to spare."""

NO_KEY = 1 - 2**31
NAN_KEY = NO_KEY + 1
LAST = 2**31 - 1
NAN = float("nan")


@T.macro
def rank_key(value):
    """Map a float32 to an int32 that orders like it: NaN lowest, then -inf; -0 equals +0."""
    bits = T.alloc_var(T.int32)
    bits = T.reinterpret(value, T.int32)
    magnitude = bits & 0x7FFFFFFF
    ordered = T.Select(magnitude == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return T.Select(magnitude > 0x7F800000, NAN_KEY, ordered)


@T.macro
def key_value(key):
    """Invert `rank_key`. The key of a NaN, and that of no expert, give a NaN."""
    return T.reinterpret(key ^ ((key >> 31) & 0x7FFFFFFF), T.float32)


@T.macro
def rank_value(rank, packed: bool):
    """Return the score of an int32 rank, whose low bits hold an id if it is ``packed``."""
    if packed:
        rest = rank & (-1 << ID_BITS)
        return T.reinterpret(rest ^ ((rest >> 31) & (LAST ^ ((1 << ID_BITS) - 1))), T.float32)
    else:
        return key_value(rank)


@T.macro
def sigmoid(x):
    """Keep both tails: no exponential overflows and no small value is rounded away.

    The divisor is in [1, 2], so one Newton step rounds the quotient without the branches that a
    general division needs for its extremes.
    """
    small = T.alloc_var(T.float32)
    inverse = T.alloc_var(T.float32)
    quotient = T.alloc_var(T.float32)
    small = T.exp(-T.abs(x))
    inverse = T.fast_rcp(T.float32(1) + small)
    dividend = T.Select(x >= 0, T.float32(1), small)
    quotient = dividend * inverse
    return T.fma(T.fma(-quotient, T.float32(1) + small, dividend), inverse, quotient)


@T.macro
def selection_key(logit, bias, expert, scoring: str):
    """Return the key that ranks ``expert``; ``bias`` is read only for ``"biased_sigmoid"``."""
    score = T.alloc_var(T.float32)
    score = logit
    if scoring != "softmax":
        score = sigmoid(score)
    if scoring == "biased_sigmoid":
        score = score + bias[expert]
    return rank_key(score)


@T.macro
def keep_two(best: T.Ref, second: T.Ref, a, b):
    """Merge the ordered pair ``a >= b`` into the ordered pair ``best >= second``."""
    second = T.max(T.min(best, a), T.max(second, b))
    best = T.max(best, a)


@T.macro
def merge_lanes(best: T.Ref, second: T.Ref, lane_bits):
    """Give each of ``2**lane_bits`` neighbouring lanes the two best keys among them all."""
    for i in T.unroll(5):
        if i < lane_bits:
            a = T.shfl_xor(best, 1 << i)
            b = T.shfl_xor(second, 1 << i)
            keep_two(best, second, a, b)


@T.macro
def group_key(best, second, scoring: str):
    """Return the key of a group: its best score, or with a bias the sum of its two best."""
    key = T.alloc_var(T.int32)
    key = best
    if scoring == "biased_sigmoid" and second != NO_KEY:
        key = rank_key(key_value(best) + key_value(second))
    return key


@T.macro
def weigh(score: T.Ref, highest, normalizer, scoring: str):
    """Turn the logit in ``score`` into the weight, before renormalising and scaling."""
    score = T.exp(score - highest) / normalizer if scoring == "softmax" else sigmoid(score)


@T.macro
def write_batch(weights, ids, token, k, top_k, chosen, score: T.Ref, total: T.Ref, renormalize):
    """Write up to 32 ids, one a lane, and their unscaled weights unless this batch is the last."""
    if k < top_k:
        ids[token, k] = chosen
        if T.truncdiv(k, WARP) < T.truncdiv(top_k - 1, WARP):
            weights[token, k] = score
    if renormalize != 0:
        total = total + T.warp_reduce_sum(score)


@T.macro
def scale_weight(weights, token, k, top_k, score: T.Ref, total, renormalize, factor):
    """Write the k-th weight of a token from what it is before renormalising and scaling."""
    if k < top_k:
        if renormalize != 0:
            score = T.Select(total == 0, T.float32(0), score / total)
        weights[token, k] = score * factor


@T.macro
def write_weights(weights, token, lane, top_k, score: T.Ref, total, renormalize, factor):
    """Scale the weights of a token, those of its last batch first: they are still in ``score``."""
    batches = T.ceildiv(top_k, WARP)
    scale_weight(
        weights, token, (batches - 1) * WARP + lane, top_k, score, total, renormalize, factor
    )
    for i in T.serial(batches - 1):
        score = weights[token, i * WARP + lane]
        scale_weight(weights, token, i * WARP + lane, top_k, score, total, renormalize, factor)


@T.macro
def scan_softmax(logits, token, lane, num_experts, best: T.Ref, highest: T.Ref, normalizer: T.Ref):
    """Read a row of logits twice for the terms of its softmax; ``best`` is scratch."""
    score = T.alloc_var(T.float32)
    best = NO_KEY
    for i in T.serial(T.ceildiv(num_experts, WARP)):
        if i * WARP + lane < num_experts:
            score = T.Cast(T.float32, logits[token, i * WARP + lane])
            best = T.max(best, rank_key(score))
    highest = key_value(T.warp_reduce_max(best))
    normalizer = 0
    for i in T.serial(T.ceildiv(num_experts, WARP)):
        if i * WARP + lane < num_experts:
            score = T.Cast(T.float32, logits[token, i * WARP + lane])
            normalizer = normalizer + T.exp(score - highest)
    normalizer = T.warp_reduce_sum(normalizer)


def halves(slots: int) -> list[int]:
    """Return the number of matches in each round of a knock-out among ``slots`` keys."""
    return [slots >> level for level in range(1, slots.bit_length())]


@T.macro
def pick(keys, match, found, first, lane_bits, slots: int, top: T.Ref, winner: T.Ref):
    """Take the best key of a warp: ``top`` becomes the key, ``winner`` its expert.

    A lane's keys are of experts ``first, first + 2**lane_bits...``. In the tournament among them
    the left side of a match, in ``match`` and ``found``, holds the lower slots.
    """
    slot = T.alloc_var(T.int32)
    for width in halves(slots):
        for i in T.unroll(width):
            if 2 * width == slots:
                found[i] = 2 * i + T.Cast(T.int32, keys[2 * i + 1] > keys[2 * i])
                match[i] = T.max(keys[2 * i], keys[2 * i + 1])
            else:
                right = match[2 * i + 1] > match[2 * i]
                found[i] = T.Select(right, found[2 * i + 1], found[2 * i])
                match[i] = T.max(match[2 * i], match[2 * i + 1])
    top = T.warp_reduce_max(match[0])
    mine = T.Select(match[0] == top, first + (found[0] << lane_bits), LAST)
    winner = T.warp_reduce_min(mine)
    slot = T.Select(mine == winner, found[0], -1)
    for i in T.unroll(slots):
        keys[i] = T.Select(i == slot, NO_KEY, keys[i])


def sorting_network(size: int) -> list[tuple[int, int]]:
    """Return the comparisons of Batcher's odd-even merge sort of ``size`` keys, a power of two."""
    pairs = []
    run = 1
    while run < size:
        step = run
        while step:
            pairs += [
                (i, i + step)
                for j in range(step % run, size - step, 2 * step)
                for i in range(j, j + step)
                if i // (2 * run) == (i + step) // (2 * run)
            ]
            step //= 2
        run *= 2
    return pairs


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


@jit
def build_scan(dtype: str, scoring: str):
    """Build the kernel for any number of experts and groups: each round reads the logits again.

    Instead of marking what was taken, a round looks for the best key after the last one in the
    order of selection. ``group_keys`` is a workspace; the other names are those of `build`.
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
        if num_expert_group <= WARP and slots <= MAX_SLOTS:
            kernel = build(dtype, scoring, slots)
            vectors = takes_vectors(gating_output, slots, group_size)
            kernel(gating_output, correction_bias, weights, ids, *split, int(vectors))
        else:
            kernel = build_scan(dtype, scoring)
            group_keys = ids.new_empty((num_tokens, num_expert_group))
            kernel(gating_output, correction_bias, weights, ids, group_keys, *split)
    return weights, ids
