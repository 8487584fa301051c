"""Give every route its row among those of its expert, stably: for the permute and the align op.

`build_count` counts the routes of each expert in each chunk of the batch, where one block does not
hold all; `build_place` turns the counts into segments and rows. No size is compiled in.
"""

import tilelang
import tilelang.language as T

from tileops.kernels.cuda.device import UNCHECKED, jit

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


@jit(pass_configs=CONFIG)
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


@jit(pass_configs=CONFIG)
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
