"""Pre-permute: give every route its row, then copy each token to the rows of its routes.

`place_routes` finds the rows in one launch or two; `build_copy` moves the tokens as 16-byte vectors
of any dtype. No size is compiled in.
"""

import math

import tilelang.language as T
import torch

from tileops.kernels.cuda.count_routes import CONFIG, WARP
from tileops.kernels.cuda.device import current, jit, misplaced, sm_count, wrong_device
from tileops.kernels.cuda.place_routes import place
from tileops.layouts import MaskedLayoutSpec

COPY_THREADS = 128
WORDS = 4
"""32-bit words in the vector that a thread moves."""
TARGETS = 8
"""Rows of a token that are looked up before the first is written."""


@jit(pass_configs=CONFIG)
def build_copy():
    """Build the kernel that writes every row: tokens, zeros, and the rows' labels.

    The first ``clear_blocks`` blocks share the rows, 32 at a time, to label them and to clear those
    that no route owns. Each of the rest holds one slice of one token, or of a few short ones, and
    stores it once per route.

    T tokens, K routes a token, N routes, E experts, R rows of W words, L labels. ``max_m`` is 0 in
    a contiguous layout. A row is ``2**lane_bits`` threads wide. ``labels`` is written if
    ``per_row``. ``search_steps`` 0 says that the rows have neither padding nor labels.
    """
    num_tokens, width, num_rows, num_experts, num_labels = T.dynamic("T, W, R, E, L")
    num_routes = T.dynamic("N")
    row_stride = T.dynamic("row_stride", T.int64)

    @T.prim_func
    def copy_rows(
        hidden: T.StridedTensor[(num_tokens, width), (row_stride, 1), T.int32],
        inverse: T.Tensor[(num_routes,), T.int32],
        segment_end: T.Tensor[(num_experts,), T.int32],
        valid_end: T.Tensor[(num_experts,), T.int32],
        labels: T.Tensor[(num_labels,), T.int32],
        out: T.Tensor[(num_rows, width), T.int32],
        top_k: T.int32,
        lane_bits: T.int32,
        clear_blocks: T.int32,
        copy_blocks: T.int32,
        search_steps: T.int32,
        per_row: T.int32,
        max_m: T.int32,
    ):
        with T.Kernel(clear_blocks + copy_blocks, threads=COPY_THREADS) as block:
            thread = T.get_thread_binding()
            lane = thread % WARP
            targets = T.alloc_local((TARGETS,), T.int32)
            zero = T.alloc_local((WORDS,), T.uint32)
            token = T.alloc_var(T.int32)
            word = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            expert = T.alloc_var(T.int32)
            above = T.alloc_var(T.int32)
            owned = T.alloc_var(T.int32)
            pending = T.alloc_var(T.int32)

            T.pdl_sync()
            T.pdl_trigger()
            if block >= clear_blocks:
                slices = T.ceildiv(width, COPY_THREADS * WORDS)
                token = T.truncdiv(block - clear_blocks, slices)
                word = (block - clear_blocks - token * slices) * COPY_THREADS * WORDS
                word = word + (thread & ((1 << lane_bits) - 1)) * WORDS
                token = token * (COPY_THREADS >> lane_bits) + (thread >> lane_bits)
                if token < num_tokens and word < width:
                    data = T.ldg128(hidden[token, word])
                    for batch in T.serial(T.ceildiv(top_k, TARGETS)):
                        for j in T.unroll(TARGETS):
                            targets[j] = -1
                            if batch * TARGETS + j < top_k:
                                targets[j] = inverse[token * top_k + batch * TARGETS + j]
                        for j in T.unroll(TARGETS):
                            if targets[j] >= 0:
                                T.stg128(out[targets[j], word], data)
            else:
                for j in T.unroll(WORDS):
                    zero[j] = T.uint32(0)
                # Every warp looks at the same rows, so that none waits for another.
                row = block * WARP + lane
                while row - lane < num_rows:
                    owned = 1
                    if row < num_rows:
                        if max_m > 0:
                            expert = T.truncdiv(row, max_m)
                            owned = T.Cast(T.int32, row - expert * max_m < valid_end[expert])
                        elif search_steps == 0:
                            owned = T.Cast(T.int32, row < valid_end[num_experts - 1])
                        else:
                            # The first expert whose segment ends above the row.
                            expert = 0
                            above = num_experts
                            for _ in T.serial(search_steps):
                                if expert < above:
                                    middle = (expert + above) >> 1
                                    if segment_end[middle] > row:
                                        above = middle
                                    else:
                                        expert = middle + 1
                            owned = 0
                            if expert < num_experts:
                                owned = T.Cast(T.int32, row < valid_end[expert])
                            if per_row != 0 and thread < WARP:
                                labels[row] = expert
                    pending = T.Cast(T.int32, T.ballot(owned == 0))
                    while pending != 0:
                        chosen = T.call_extern(T.int32, "__ffs", pending) - 1
                        pending = pending ^ (1 << chosen)
                        word = thread * WORDS
                        while word < width:
                            T.stg128(out[row - lane + chosen, word], zero[0:WORDS])
                            word = word + COPY_THREADS * WORDS
                    row = row + clear_blocks * WARP

    return copy_rows


def refuse(hidden_states, local_expert_ids, layout, num_local_experts, target) -> str | None:
    """Say why a call cannot be served: another GPU, or rows that are not runs of 16-byte words."""
    reason = wrong_device(hidden_states)
    reason = reason or layout.too_large(local_expert_ids.numel(), num_local_experts)
    if reason is not None:
        return reason
    if hidden_states.shape[1] * hidden_states.element_size() % 16:
        return (
            f"needs a hidden size of whole 16-byte words, got {hidden_states.dtype}, shape "
            f"{tuple(hidden_states.shape)}, strides {hidden_states.stride()}"
        )
    return misplaced("hidden_states", hidden_states)


def moe_pre_permute_fwd(hidden_states, local_expert_ids, layout, num_local_experts, target):
    """Permute tokens into ``layout``; returns the rows, the layout's metadata and the inverse."""
    num_tokens, hidden = hidden_states.shape
    top_k = local_expert_ids.shape[1]
    slab = isinstance(layout, MaskedLayoutSpec)
    alignment, max_m = (1, layout.max_m) if slab else (layout.alignment, 0)
    per_row = not slab and layout.metadata == "per_row"
    lead = layout.expert_shape(num_tokens * top_k, num_local_experts)
    num_rows = math.prod(lead)
    expert_input = hidden_states.new_empty((*lead, hidden))

    words = hidden * hidden_states.element_size() // 4
    lane_bits = min((words // WORDS - 1).bit_length(), 7) if words else 0
    slices = -(-words // (COPY_THREADS * WORDS))
    copy_blocks = -(-num_tokens // (COPY_THREADS >> lane_bits)) * slices
    clear_blocks = min(-(-num_rows // WARP), 8 * sm_count(hidden_states.device))
    if num_tokens <= 1:
        hidden_states = hidden_states.as_strided((num_tokens, hidden), (hidden, 1))
    with current(hidden_states.device):
        inverse, segment_end, valid_end = place(
            local_expert_ids, alignment, max_m, num_local_experts
        )
        labels = inverse.new_empty(num_rows) if per_row else valid_end
        if clear_blocks + copy_blocks:
            build_copy()(
                hidden_states.view(torch.int32),
                inverse,
                segment_end,
                valid_end,
                labels,
                expert_input.view(torch.int32).view(num_rows, words),
                top_k,
                lane_bits,
                clear_blocks,
                copy_blocks,
                num_local_experts.bit_length() if alignment > 1 or per_row else 0,
                int(per_row),
                max_m,
            )
    metadata = valid_end if slab else labels if per_row else segment_end
    return expert_input, metadata, inverse
