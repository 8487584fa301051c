"""Top-k routing of many tokens: several share a warp, and their lanes merge lists of the best.

A lane reads a run of neighbouring experts at a time, sorts their keys by a network and merges them
into the list of the best it has seen; then the lanes of a token merge their lists by shuffles,
those of a group of experts first. No step depends on the data, so a warp serves several tokens at
once.

Keys are sorted upwards, the best expert first. Their upper part orders like the negated score,
which puts NaN last, and the expert id below it settles ties: in one 32-bit word where the logits
themselves are ranked and have 16 bits, else in 64 bits.
"""

import tilelang.language as T

from tileops.kernels.cuda.device import dtype_name, jit
from tileops.kernels.cuda.ranking import (
    LAST,
    NAN,
    WARP,
    WARPS_PER_BLOCK,
    sigmoid,
    sorting_network,
)

MANY = 4096
"""Tokens from which on it is faster to share warps."""
MAX_EXPERTS = 0xFFFF
"""Ids that fit below a key of 16 bits, but for that of no expert."""
MAX_KEPT = 16
"""Experts selected at most: the networks grow faster than the lists."""
MIN_KEPT = 4
MIN_LANE_BITS = 2
"""Lanes of a token at least: fewer read less than a sector of memory at once."""
SHORT = 8
"""Keys at most that are sorted before the next loads arrive: two steps of them are read at once."""
WARPS = 1024
"""A token gets more lanes as long as that makes no more warps than this, two a scheduler, or than
twice as many with lists of `MIN_KEPT`."""
NAN_KEY = {True: 0x7FFF0000, False: LAST << 32}
"""The first key of a NaN, packed or not."""

ORDER = r"""
// The integer that orders like -x. Adding +0 turns -0 into +0, and any NaN into 0x7fffffff.
__device__ __forceinline__ int falling(float x) {
  int y;
  asm("fma.rn.f32 %0, %1, 0fBF800000, 0f00000000;" : "=r"(y) : "r"(__float_as_int(x)));
  return y ^ ((y >> 31) & 0x7fffffff);
}

__device__ __forceinline__ int bits_of(int order) {
  return order ^ ((order >> 31) & 0x7fffffff);
}

// The x of falling(x).
__device__ __forceinline__ float float32_of(int order) {
  return 0.0f - __int_as_float(bits_of(order));
}

// The x of a 16-bit float that stands above an id.
__device__ __forceinline__ float bfloat16_of(int key) {
  return 0.0f - __int_as_float(bits_of(key) & 0xffff0000);
}

__device__ __forceinline__ float float16_of(int key) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<short>(bits_of(key) >> 16)));
  return 0.0f - x;
}

// falling() of both halves of a word; the selector spreads the signs of the halves over them.
__device__ __forceinline__ unsigned order_halves(unsigned y) {
  unsigned signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(y));
  return y ^ (signs & 0x7fff7fff);
}

__device__ __forceinline__ unsigned falling_bfloat16(unsigned pair) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0xbf80bf80), "r"(0));
  return order_halves(y);
}

__device__ __forceinline__ unsigned falling_float16(unsigned pair) {
  unsigned y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(pair), "r"(0xbc00bc00), "r"(0));
  return order_halves(y);
}

// Sort two keys. In 64-bit selections the compiler sees a minimum and a maximum: two comparisons.
__device__ __forceinline__ void exchange(int64_t* a, int64_t* b) {
  int64_t lower, upper;
  asm("{\n.reg .pred less;\n.reg .b32 a, b, c, d, low, high;\n"
      "setp.lt.s64 less, %2, %3;\n"
      "mov.b64 {a, b}, %2;\n"
      "mov.b64 {c, d}, %3;\n"
      "selp.b32 low, a, c, less;\n"
      "selp.b32 high, b, d, less;\n"
      "mov.b64 %0, {low, high};\n"
      "selp.b32 low, c, a, less;\n"
      "selp.b32 high, d, b, less;\n"
      "mov.b64 %1, {low, high};\n}\n"
      : "=l"(lower), "=l"(upper) : "l"(*a), "l"(*b));
  *a = lower;
  *b = upper;
}

// A half of `order` above the same half of `ids`.
__device__ __forceinline__ int join_lower(unsigned order, unsigned ids) {
  return __byte_perm(order, ids, 0x1054);
}

__device__ __forceinline__ int join_upper(unsigned order, unsigned ids) {
  return __byte_perm(order, ids, 0x3276);
}
"""


def merging_network(size: int) -> list[tuple[int, int]]:
    """Return the comparisons that sort ``size`` keys, a power of two, that rise and then fall."""
    steps = [size >> level for level in range(1, size.bit_length())]
    return [(i, i + step) for step in steps for i in range(size) if not i & step]


@T.macro
def sort(keys, network, packed: bool):
    """Sort keys upwards."""
    for i, j in network:
        if packed:
            lower = T.min(keys[i], keys[j])
            keys[j] = T.max(keys[i], keys[j])
            keys[i] = lower
        else:
            T.call_extern("void", "exchange", T.address_of(keys[i]), T.address_of(keys[j]))


@T.macro
def merge(best, keys, kept: int, packed: bool):
    """Put the first of two sorted lists into ``best``, sorted."""
    for i in T.unroll(kept):
        best[i] = T.min(best[i], keys[kept - 1 - i])
    sort(best, merging_network(kept), packed)


@T.macro
def key_order(key, packed: bool):
    """Return the int32 that orders like a key, as far as the score goes if it is not packed."""
    if packed:
        return key
    else:
        return T.Cast(T.int32, key >> 32)


@T.macro
def key_expert(key, packed: bool):
    """Return the expert of a key."""
    if packed:
        return key & 0xFFFF
    else:
        return T.Cast(T.int32, key)


@T.macro
def key_score(key, dtype: str, packed: bool):
    """Return the score that a key ranks by."""
    if packed:
        return T.call_extern(T.float32, f"{dtype}_of", key)
    else:
        return T.call_extern(T.float32, "float32_of", T.Cast(T.int32, key >> 32))


@T.macro
def read(words, values, logits, token, first, end, vectors, kept: int):
    """Read the logits of ``kept`` neighbours; past ``end`` the last one stands again."""
    if vectors != 0:
        num_words = words.shape[0].value
        load, vector = (T.ldg64, 2) if num_words == 2 else (T.ldg128, 4)
        for w in range(0, num_words, vector):
            words[w : w + vector] = load(logits[token, first + w * (kept // num_words)])
    else:
        for i in T.unroll(kept):
            values[i] = logits[token, T.min(first + i, end - 1)]


@T.macro
def read_bias(words, values, bias, first, end, vectors, kept: int):
    """Read the bias of ``kept`` neighbours, as `read` does."""
    if vectors != 0:
        for w in range(0, kept, 4):
            words[w : w + 4] = T.ldg128(bias[first + w])
    else:
        for i in T.unroll(kept):
            values[i] = bias[T.min(first + i, end - 1)]


@jit
def build(dtype: str, scoring: str, kept: int):
    """Build the kernel for lists of ``kept`` experts, a power of two and K at least.

    T tokens, E experts, K experts selected per token. A token has ``2**lane_bits`` lanes, and a
    group of ``group_size`` experts ``2**group_bits`` of them. ``vectors`` says that whole vectors
    of neighbours can be read, and that they fill a group.

    Args:
        dtype: Type of the logits.
        scoring: ``"softmax"``, ``"sigmoid"`` or ``"biased_sigmoid"``.
        kept: How long a list is, and how many neighbours a lane reads at a time.
    """
    num_tokens, num_experts, top_k = T.dynamic("T, E, K")
    row_stride = T.dynamic("row_stride", T.int64)
    biased = scoring == "biased_sigmoid"
    per_word = 1 if dtype == "float32" else 2
    packed = per_word == 2 and scoring == "softmax"
    early = packed and kept <= SHORT
    key_dtype, none = (T.int32, LAST) if packed else (T.int64, LAST << 32 | LAST)

    @T.prim_func
    def fused_topk_merge(
        logits: T.StridedTensor[(num_tokens, num_experts), (row_stride, 1), dtype],
        bias: T.Tensor[(num_experts,), T.float32],
        weights: T.Tensor[(num_tokens, top_k), T.float32],
        ids: T.Tensor[(num_tokens, top_k), T.int32],
        lane_bits: T.int32,
        group_bits: T.int32,
        num_groups: T.int32,
        steps: T.int32,
        group_size: T.int32,
        topk_group: T.int32,
        renormalize: T.int32,
        factor: T.float32,
        vectors: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=WARPS_PER_BLOCK * WARP, prelude=ORDER) as block:
            T.annotate_min_blocks_per_sm(5)
            thread = T.get_thread_binding()
            words = T.alloc_local((kept // per_word,), T.uint32)
            values = T.view(words, (kept,), dtype)
            if early:
                next_words = T.alloc_local((kept // per_word,), T.uint32)
                next_values = T.view(next_words, (kept,), dtype)
            if biased:
                bias_words = T.alloc_local((kept,), T.uint32)
                biases = T.view(bias_words, (kept,), T.float32)
            keys = T.alloc_local((kept,), key_dtype)
            best = T.alloc_local((kept,), key_dtype)
            mine = T.alloc_var(key_dtype)
            scores = T.alloc_local((kept >> MIN_LANE_BITS,), T.float32)
            chosen = T.alloc_local((kept >> MIN_LANE_BITS,), T.int32)
            highest = T.alloc_var(T.float32)
            pair = T.alloc_var(T.uint32)
            first = T.alloc_var(T.int32)
            nan_seen = T.alloc_var(T.int32)
            key = T.alloc_var(T.int32)
            place = T.alloc_var(T.int32)
            score = T.alloc_var(T.float32)
            total = T.alloc_var(T.float32)

            T.pdl_sync()
            T.pdl_trigger()
            lane = thread & ((1 << lane_bits) - 1)
            own = (block * (WARPS_PER_BLOCK * WARP) + thread) >> lane_bits
            token = T.min(own, num_tokens - 1)  # all lanes of a warp take part in its shuffles
            group = lane >> group_bits
            start = group * group_size + (lane & ((1 << group_bits) - 1)) * kept
            end = T.Select(group < num_groups, (group + 1) * group_size, 0)
            step = kept << group_bits

            nan_seen = 0
            for i in T.unroll(kept):
                best[i] = none
            first = start
            if first < end:
                read(words, values, logits, token, first, end, vectors, kept)
                if biased:
                    read_bias(bias_words, biases, bias, first, end, vectors, kept)
            if early and steps == 2 and first + step < end:
                read(next_words, next_values, logits, token, first + step, end, vectors, kept)
            for n in T.unroll(steps, unroll_factor=1):
                if first < end:
                    if packed:
                        for w in T.unroll(kept // 2):
                            pair = T.call_extern(T.uint32, f"falling_{dtype}", words[w])
                            experts = T.Cast(T.uint32, first + 2 * w) * 0x10001 + 0x10000
                            keys[2 * w] = T.call_extern(T.int32, "join_lower", pair, experts)
                            keys[2 * w + 1] = T.call_extern(T.int32, "join_upper", pair, experts)
                    else:
                        for i in T.unroll(kept):
                            score = T.Cast(T.float32, values[i])
                            if scoring != "softmax":
                                score = sigmoid(score)
                            if biased:
                                score = score + biases[i]
                            key = T.call_extern(T.int32, "falling", score)
                            keys[i] = (T.Cast(T.int64, key) << 32) | T.Cast(T.int64, first + i)
                    if scoring == "softmax" and vectors == 0:
                        for i in T.unroll(kept):
                            nan_seen = nan_seen | T.Cast(
                                T.int32, T.isnan(T.Cast(T.float32, values[i]))
                            )
                    if vectors == 0:
                        for i in T.unroll(kept):
                            keys[i] = T.Select(first + i < end, keys[i], none)
                    # The next step is there already, or asked for before a sort that hides it.
                    if early and steps == 2:
                        for w in T.unroll(kept // per_word):
                            words[w] = next_words[w]
                    elif first + step < end:
                        read(words, values, logits, token, first + step, end, vectors, kept)
                        if biased:
                            read_bias(bias_words, biases, bias, first + step, end, vectors, kept)
                    sort(keys, sorting_network(kept), packed)
                    if scoring == "softmax" and vectors != 0:
                        nan_seen = nan_seen | T.Cast(T.int32, keys[kept - 1] >= NAN_KEY[packed])
                    if n == 0:
                        for i in T.unroll(kept):
                            best[i] = keys[i]
                    else:
                        merge(best, keys, kept, packed)
                first = first + step

            for level in T.unroll(lane_bits, unroll_factor=1):
                if level == group_bits:
                    key = key_order(best[0], packed)
                    if biased and group_size > 1:
                        score = key_score(best[0], dtype, packed) + key_score(
                            best[1], dtype, packed
                        )
                        key = T.call_extern(T.int32, "falling", score)
                    place = 0
                    for g in T.serial(num_groups):
                        other = T.shfl_sync(key, (thread % WARP - lane) + (g << group_bits))
                        if other < key or (other == key and g < group):
                            place = place + 1
                    if place >= topk_group:
                        for i in T.unroll(kept):
                            best[i] = none
                for i in T.unroll(kept):
                    keys[i] = T.shfl_xor(best[i], 1 << level)
                merge(best, keys, kept, packed)
                if scoring == "softmax":
                    nan_seen = nan_seen | T.shfl_xor(nan_seen, 1 << level)

            # Every lane weighs its share of the list.
            total = 0
            if scoring == "softmax":
                highest = key_score(best[0], dtype, packed)
            for n in T.unroll(kept >> MIN_LANE_BITS):
                place = (n << lane_bits) + lane
                scores[n] = 0
                if place < top_k:
                    mine = best[0]
                    for i in T.unroll(1, kept):
                        mine = T.Select(i == place, best[i], mine)
                    chosen[n] = key_expert(mine, packed)
                    if biased:
                        scores[n] = sigmoid(T.Cast(T.float32, logits[token, chosen[n]]))
                    else:
                        scores[n] = key_score(mine, dtype, packed)
                    if scoring == "softmax":
                        scores[n] = T.exp(scores[n] - highest)
                if renormalize != 0:
                    total = total + scores[n]
            if scoring == "softmax" and renormalize == 0:
                first = start
                for _ in T.unroll(steps, unroll_factor=1):
                    if first < end:
                        read(words, values, logits, token, first, end, vectors, kept)
                        for i in T.unroll(kept):
                            score = T.exp(T.Cast(T.float32, values[i]) - highest)
                            total = total + T.Select(first + i < end, score, T.float32(0))
                    first = first + step
            for level in T.unroll(lane_bits, unroll_factor=1):
                total = total + T.shfl_xor(total, 1 << level)
            if scoring == "softmax" and nan_seen != 0:
                total = NAN  # as is the sum of the exponentials of all
            for n in T.unroll(kept >> MIN_LANE_BITS):
                place = (n << lane_bits) + lane
                if own < num_tokens and place < top_k:
                    score = scores[n]
                    if scoring == "softmax" or renormalize != 0:
                        score = T.Select(total == 0, T.float32(0), score / total)
                    ids[token, place] = chosen[n]
                    weights[token, place] = score * factor

    return fused_topk_merge


def takes(num_tokens: int, num_experts: int, top_k: int, num_groups: int) -> bool:
    """Return whether `launch` can serve a call, and faster than `topk`."""
    return (
        num_tokens >= MANY
        and 1 < top_k <= MAX_KEPT
        and num_groups <= WARP
        and num_experts <= MAX_EXPERTS
    )


def launch(
    logits, bias, weights, ids, scoring, renormalize, num_groups, topk_group, factor
) -> None:
    """Write the weights and ids of a call that `takes` accepts; ``topk_group`` 0 is no groups."""
    num_tokens, num_experts = logits.shape
    kept = max(1 << (ids.shape[1] - 1).bit_length(), MIN_KEPT)
    group_size = num_experts // num_groups
    groups_bits = (num_groups - 1).bit_length()
    useful = groups_bits + (-(-group_size // kept) - 1).bit_length()
    warps = 2 * WARPS if kept == MIN_KEPT else WARPS
    spare = (warps * WARP // num_tokens).bit_length() - 1
    lane_bits = max(min(spare, useful, 5), groups_bits, MIN_LANE_BITS)
    group_bits = lane_bits - groups_bits
    word = min(kept * logits.element_size(), 16)
    vectors = group_size % kept == 0 and logits.data_ptr() % word == 0
    if num_tokens > 1:
        vectors = vectors and logits.stride(0) * logits.element_size() % word == 0
    if bias is not None:
        vectors = vectors and bias.data_ptr() % 16 == 0
    build(dtype_name(logits), scoring, kept)(
        logits,
        bias,
        weights,
        ids,
        lane_bits,
        group_bits,
        num_groups,
        -(-group_size // (kept << group_bits)),
        group_size,
        topk_group,
        int(renormalize),
        factor,
        int(vectors),
        -(-(num_tokens << lane_bits) // (WARPS_PER_BLOCK * WARP)),
    )
