"""Pre-permute: give every route its row, stably, then copy each token to the rows of its routes.

Three launches, two when one block holds all routes: `build_count` counts the routes of each expert
in each chunk of the batch, `build_place` turns the counts into segments and rows, `build_copy`
moves the tokens as 16-byte vectors of any dtype. No size is compiled in.
"""

import math

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.device import (
    COMPILE_TARGET,
    UNCHECKED,
    misplaced,
    sm_count,
    wrong_device,
)
from tileops.layouts import MaskedLayoutSpec

WARP = 32
PLACE_WARPS = 16
PLACE_THREADS = PLACE_WARPS * WARP
WINDOW = 1024
"""Experts whose counters fit in shared memory; more experts take several passes."""
BATCH = 4
"""Ids that a thread loads before it uses the first."""
ONE_BLOCK_ROUTES = 4096
MIN_CHUNK = 1024
MAX_CHUNKS = 64

COPY_THREADS = 128
WORDS = 4
"""32-bit words in the vector that a thread moves."""
TARGETS = 8
"""Rows of a token that are looked up before the first is written."""

# Barriers are placed by hand: which counter is touched depends on data, so the automatic pass would
# put one around every access.
CONFIG = {
    **UNCHECKED,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True,
}


@T.macro
def load_ids(experts, ids, first, step, end, top_k, low, high):
    """Set ``experts`` to those of routes ``first, first + step...``, minus ``low``.

    A route at or past ``end``, or whose expert is outside ``[low, high)``, gets -1.
    """
    for j in T.unroll(BATCH):
        experts[j] = -1
        if first + j * step < end:
            token = T.truncdiv(first + j * step, top_k)
            experts[j] = ids[token, first + j * step - token * top_k]
    for j in T.unroll(BATCH):
        experts[j] = T.Select(T.And(experts[j] >= low, experts[j] < high), experts[j] - low, -1)


@tilelang.jit(target=COMPILE_TARGET, pass_configs=CONFIG)
def build_count():
    """Build the kernel that counts the routes of each expert in each chunk of ``chunk`` routes.

    T tokens, K routes a token, E experts, C chunks.
    """
    num_tokens, top_k, num_experts, chunks = T.dynamic("T, K, E, C")
    id_stride = T.dynamic("id_stride", T.int64)

    @T.prim_func
    def count_routes(
        ids: T.StridedTensor[(num_tokens, top_k), (id_stride, 1), T.int32],
        counts: T.Tensor[(chunks, num_experts), T.int32],
        chunk: T.int32,
    ):
        with T.Kernel(chunks, threads=PLACE_THREADS) as block:
            thread = T.get_thread_binding()
            seen = T.alloc_shared((WINDOW,), T.int32)
            experts = T.alloc_local((BATCH,), T.int32)
            end = T.min((block + 1) * chunk, num_tokens * top_k)
            for window in T.serial(T.ceildiv(num_experts, WINDOW)):
                low = window * WINDOW
                high = T.min(low + WINDOW, num_experts)
                for i in T.unroll(WINDOW // PLACE_THREADS):
                    seen[i * PLACE_THREADS + thread] = 0
                T.sync_threads()
                for i in T.serial(T.ceildiv(chunk, BATCH * PLACE_THREADS)):
                    first = block * chunk + i * BATCH * PLACE_THREADS + thread
                    load_ids(experts, ids, first, PLACE_THREADS, end, top_k, low, high)
                    for j in T.unroll(BATCH):
                        if experts[j] >= 0:
                            T.atomic_add(seen[experts[j]], 1)
                T.sync_threads()
                for i in T.unroll(WINDOW // PLACE_THREADS):
                    slot = i * PLACE_THREADS + thread
                    if low + slot < high:
                        counts[block, low + slot] = seen[slot]
                T.sync_threads()

    return count_routes


@tilelang.jit(target=COMPILE_TARGET, pass_configs=CONFIG)
def build_place(inverted: bool):
    """Build the kernel that gives every route its row and every expert its segment.

    A warp takes a run of its chunk's routes in order, 32 at a time. Its counters start at the row
    of its first route to each expert, so the row of a route is the counter plus its rank among the
    routes of the same expert in the same 32. Every block works all segments out, which costs less
    than another launch would.

    T tokens, K routes a token, E experts. ``counts`` is read only with several chunks. ``max_m`` is
    0 in a contiguous layout.

    Args:
        inverted: Whether the rows' routes are written, not the routes' rows: ``slots``, the number
            of routes in a row that none owns; ``block_experts``, the expert of each run of
            ``alignment`` rows, E past the last segment; and ``num_rows``, where that ends. The
            others are ``inverse``; ``segment_end`` and ``valid_end``, the rows where the segment of
            an expert ends with and without its padding. Of a slab only ``valid_end`` is written, as
            a count. The tensors of the other kind are None.
    """
    num_tokens, top_k, experts_written, num_counts = T.dynamic("T, K, E, N")
    num_slots, num_blocks = T.dynamic("S, B")
    id_stride = T.dynamic("id_stride", T.int64)

    @T.prim_func
    def place_routes(
        ids: T.StridedTensor[(num_tokens, top_k), (id_stride, 1), T.int32],
        counts: T.Tensor[(num_counts,), T.int32],
        inverse: T.Tensor[(num_tokens * top_k,), T.int32],
        segment_end: T.Tensor[(experts_written,), T.int32],
        valid_end: T.Tensor[(experts_written,), T.int32],
        slots: T.Tensor[(num_slots,), T.int32],
        block_experts: T.Tensor[(num_blocks,), T.int32],
        num_rows: T.Tensor[(1,), T.int32],
        num_experts: T.int32,
        chunks: T.int32,
        chunk: T.int32,
        alignment: T.int32,
        max_m: T.int32,
    ):
        with T.Kernel(chunks, threads=PLACE_THREADS) as block:
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            rows = T.alloc_shared((PLACE_WARPS, WINDOW), T.int32)
            if inverted:
                firsts = T.alloc_shared((WINDOW,), T.int32)
                ends = T.alloc_shared((WINDOW,), T.int32)
            warp_sums = T.alloc_shared((PLACE_WARPS,), T.int32)
            experts = T.alloc_local((BATCH,), T.int32)
            total = T.alloc_var(T.int32)
            before = T.alloc_var(T.int32)
            length = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            rank = T.alloc_var(T.int32)
            count = T.alloc_var(T.int32)
            start = T.alloc_var(T.int32)

            run = T.ceildiv(chunk, PLACE_THREADS) * WARP
            run_first = block * chunk + warp * run
            run_end = T.min(T.min(run_first + run, (block + 1) * chunk), num_tokens * top_k)
            start = 0
            for window in T.serial(T.ceildiv(num_experts, WINDOW)):
                low = window * WINDOW
                high = T.min(low + WINDOW, num_experts)

                # Routes of each expert in each warp's run.
                for i in T.serial(T.ceildiv(high - low, PLACE_THREADS)):
                    for w in T.unroll(PLACE_WARPS):
                        rows[w, i * PLACE_THREADS + thread] = 0
                T.sync_threads()
                for i in T.serial(T.ceildiv(run, BATCH * WARP)):
                    first = run_first + i * BATCH * WARP + lane
                    load_ids(experts, ids, first, WARP, run_end, top_k, low, high)
                    for j in T.unroll(BATCH):
                        if experts[j] >= 0:
                            T.atomic_add(rows[warp, experts[j]], 1)
                T.sync_threads()

                # An expert a thread: its routes in all, and in the chunks before this one.
                for i in T.serial(T.ceildiv(high - low, PLACE_THREADS)):
                    slot = i * PLACE_THREADS + thread
                    total = 0
                    before = 0
                    if low + slot < high:
                        if chunks == 1:
                            for w in T.unroll(PLACE_WARPS):
                                total = total + rows[w, slot]
                        else:
                            for c in T.unroll(chunks, unroll_factor=8):
                                count = counts[c * num_experts + low + slot]
                                total = total + count
                                before = before + T.Select(c < block, count, 0)
                    length = T.truncdiv(total + alignment - 1, alignment) * alignment
                    # Sum of the lengths up to here: within the warp, then over the warps before it.
                    row = length
                    for shift in T.unroll(5):
                        other = T.shfl_up(row, 1 << shift)
                        row = row + T.Select(lane >= (1 << shift), other, 0)
                    if lane == WARP - 1:
                        warp_sums[warp] = row
                    T.sync_threads()
                    row = row + start - length
                    for w in T.unroll(PLACE_WARPS):
                        row = row + T.Select(w < warp, warp_sums[w], 0)
                        start = start + warp_sums[w]
                    if low + slot < high:
                        if max_m > 0:
                            row = (low + slot) * max_m
                        if inverted:
                            firsts[slot] = row
                            ends[slot] = row + total
                        elif block == 0:
                            if max_m > 0:
                                valid_end[low + slot] = T.min(total, max_m)
                            else:
                                valid_end[low + slot] = row + total
                                segment_end[low + slot] = row + length
                        row = row + before
                        for w in T.unroll(PLACE_WARPS):
                            count = rows[w, slot]
                            rows[w, slot] = row
                            row = row + count
                    T.sync_threads()

                for i in T.serial(T.ceildiv(run, BATCH * WARP)):
                    first = run_first + i * BATCH * WARP + lane
                    load_ids(experts, ids, first, WARP, run_end, top_k, low, high)
                    for j in T.unroll(BATCH):
                        if first - lane + j * WARP < run_end:
                            peers = T.reinterpret(T.match_any_sync(experts[j]), T.int32)
                            rank = T.call_extern(T.int32, "__popc", peers & ((-1 << lane) ^ -1))
                            count = T.call_extern(T.int32, "__popc", peers)
                            row = -1
                            if experts[j] >= 0:
                                row = rows[warp, experts[j]] + rank
                            T.sync_warp()
                            if experts[j] >= 0 and rank == 0:
                                rows[warp, experts[j]] = row + count
                            T.sync_warp()
                            if max_m > 0 and row >= (low + experts[j] + 1) * max_m:
                                row = -1
                            if inverted:
                                if row >= 0:
                                    slots[row] = first + j * WARP
                            # The first pass drops what a later one may still place.
                            elif (experts[j] >= 0 or window == 0) and first + j * WARP < run_end:
                                inverse[first + j * WARP] = row
                if inverted:
                    # An expert a warp: its filler and its blocks.
                    for i in T.serial(T.ceildiv(high - low, chunks * PLACE_WARPS)):
                        slot = (i * chunks + block) * PLACE_WARPS + warp
                        if low + slot < high:
                            row = ends[slot] + lane
                            count = T.ceildiv(ends[slot], alignment)
                            while row < count * alignment:
                                slots[row] = num_tokens * top_k
                                row = row + WARP
                            row = T.truncdiv(firsts[slot], alignment) + lane
                            while row < count:
                                block_experts[row] = low + slot
                                row = row + WARP
                T.sync_threads()

            if inverted:
                row = start + block * PLACE_THREADS + thread
                while row < num_slots:
                    slots[row] = num_tokens * top_k
                    row = row + chunks * PLACE_THREADS
                row = T.truncdiv(start, alignment) + block * PLACE_THREADS + thread
                while row < num_blocks:
                    block_experts[row] = num_experts
                    row = row + chunks * PLACE_THREADS
                if block == 0 and thread == 0:
                    num_rows[0] = start

    return place_routes


@tilelang.jit(target=COMPILE_TARGET, pass_configs=CONFIG)
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


def count_chunks(ids, num_experts: int):
    """Split the routes into chunks and count each expert's routes in each, if there are several.

    Returns:
        ``counts`` int32 (empty for one chunk), the number of chunks, and the routes of a chunk.
    """
    num_routes = ids.shape[0] * ids.shape[1]
    if num_routes <= ONE_BLOCK_ROUTES:
        return ids.new_empty(0), 1, num_routes
    chunk = max(MIN_CHUNK, -(-num_routes // MAX_CHUNKS))
    chunks = -(-num_routes // chunk)
    counts = ids.new_empty((chunks, num_experts))
    build_count()(ids, counts, chunk)
    return counts.view(-1), chunks, chunk


def place(ids, alignment: int, max_m: int, num_experts: int):
    """Give every route its row; ``max_m`` is 0 in a contiguous layout.

    Returns:
        ``inverse`` ``[T * K]``, the row of each route or -1; ``segment_end`` ``[E]``, where the
        segment of each expert ends (unwritten for a slab); ``valid_end`` ``[E]``, where its routes
        end, or in a slab how many there are. All int32. Call it with the ids' device current.
    """
    inverse = ids.new_empty(ids.shape[0] * ids.shape[1])
    valid_end = ids.new_empty(num_experts)
    segment_end = valid_end if max_m else ids.new_empty(num_experts)
    counts, *split = count_chunks(ids, num_experts)
    written = inverse, segment_end, valid_end
    build_place(False)(
        ids, counts, *written, None, None, None, num_experts, *split, alignment, max_m
    )
    return written


def refuse(hidden_states, local_expert_ids, layout, num_local_experts, target) -> str | None:
    """Say why a call cannot be served: another GPU, or rows that are not runs of 16-byte words."""
    if (reason := wrong_device(hidden_states)) is not None:
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
    with torch.cuda.device(hidden_states.device):
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
