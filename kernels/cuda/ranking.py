"""Ranking on a GPU: int32 keys that order like float32 scores, and what routing kernels share.

NaN has a defined place among the keys, and a warp finds its best key in one instruction; the
smallest expert id settles ties.
"""

import tilelang.language as T

WARP = 32
WARPS_PER_BLOCK = 4
MAX_SLOTS = 64
"""Keys that a lane holds in registers at most; above, every round reads the logits again."""

# the key of an excluded expert is below that of NaN, and both are below every other
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
