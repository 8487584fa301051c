"""Give every route its row among those of its expert, stably: for the permute and the align op.

A small batch takes one launch: every block counts the routes of each expert in one chunk of the
batch, the blocks of a cluster tell each other, and a block places its part of its chunk. The
clusters count the same, which costs less than to wait for each other. For a larger batch
`count_routes` counts each chunk once, before the chunks are placed. No size is compiled in.

For the fused layers the same launch lists the tiles of the rows, where the ends are at hand.
"""

import tilelang.language as T

from tileops.kernels.cuda import count_routes
from tileops.kernels.cuda.count_routes import (
    BATCH,
    CONFIG,
    THREADS,
    TILE,
    WARP,
    WINDOW,
    keep_window,
    load_ids,
)
from tileops.kernels.cuda.device import jit
from tileops.kernels.cuda.grouped_gemm_tiles import (
    FIELDS,
    most_tiles,
    start_counters,
    tile_height,
    write_tile,
)
from tileops.kernels.cuda.mail import MAIL
from tileops.kernels.cuda.place_steps import WARPS, fill, match, scan

COUNT_BATCH = 8
"""Ids that a thread counts at once."""
ALONE = 4096
"""Routes that every block counts by itself at most."""
CLUSTER = 8
PARTS = 16
"""Blocks that share a chunk of a small batch."""
TOGETHER = CLUSTER * PARTS * THREADS
"""Routes of which every block has one a thread at most."""
MIN_CHUNK = 2048
MAX_CHUNKS = 128


@jit(pass_configs=CONFIG)
def build_place(written: str, cluster: int):
    """Build the kernel that gives every route its row and every expert its segment.

    A block takes a part of a chunk of the routes, in tiles that its threads hold in registers, and
    a warp a run of a tile in order, 32 at a time: the rank of a route is that among the routes of
    the same expert in the same 32, plus how many the warp saw before. Every block works all
    segments out, which costs less than another launch would.

    T tokens, K routes a token, E experts. ``max_m`` is 0 in a contiguous layout.

    Args:
        written: ``"rows"``: ``inverse``, the row of each route; ``segment_end`` and ``valid_end``,
            where the segment of an expert ends with and without its padding. Of a slab only
            ``valid_end`` is written, as a count. ``"tiles"``: ``inverse``; ``sources``, the token
            of each row that a route owns; and ``tiles``, the list that `grouped_gemm_tiles` makes
            of tight rows, by ``block_m`` and ``even``. ``"slots"``: ``slots``, the route of each
            row, the number of routes where none owns it; ``block_experts``, the expert of each run
            of ``alignment`` rows, E past the last segment; and ``num_rows``, where that ends.
            Tensors that are not written are None.
        cluster: How many chunks the blocks of a cluster count, at most `WINDOW` experts; a part is
            a tile at most. Or 0: a part is a chunk, which `count_routes` has counted in ``counts``.
    """
    num_tokens, top_k, experts_written, num_counts = T.dynamic("T, K, E, N")
    num_slots, num_blocks, num_sources, lines = T.dynamic("S, B, R, L")
    id_stride = T.dynamic("id_stride", T.int64)
    counted = cluster == 0
    inverted, tiled = written == "slots", written == "tiles"
    batch, tile_size = (BATCH, TILE) if counted else (1, THREADS)
    launch = {"cluster_dims": cluster, "prelude": MAIL} if cluster > 1 else {}

    @T.prim_func
    def place_routes(
        ids: T.StridedTensor[(num_tokens, top_k), (id_stride, 1), T.int32],
        counts: T.Tensor[(num_counts,), T.int32],
        inverse: T.Tensor[(num_tokens * top_k,), T.int32],
        segment_end: T.Tensor[(experts_written,), T.int32],
        valid_end: T.Tensor[(experts_written,), T.int32],
        sources: T.Tensor[(num_sources,), T.int32],
        tiles: T.Tensor[(lines, FIELDS), T.int32],
        slots: T.Tensor[(num_slots,), T.int32],
        block_experts: T.Tensor[(num_blocks,), T.int32],
        num_rows: T.Tensor[(1,), T.int32],
        num_experts: T.int32,
        blocks: T.int32,
        chunk: T.int32,
        part: T.int32,
        alignment: T.int32,
        max_m: T.int32,
        expert_bits: T.int32,
        block_m: T.int32,
        even: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS, **launch) as block:
            T.annotate_min_blocks_per_sm(2)
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            # how many routes of each expert the warps before this one saw in the tile
            rows = T.alloc_shared((WARPS, WINDOW), T.int32)
            bases = T.alloc_shared((WINDOW,), T.int32)
            warp_sums = T.alloc_shared((WARP,), T.int32)
            # how many routes of each expert there are before this block's, and from there on
            seen = T.alloc_shared((2, WINDOW), T.int32)
            if inverted:
                firsts = T.alloc_shared((WINDOW,), T.int32)
                lasts = T.alloc_shared((WINDOW,), T.int32)
                ends = T.alloc_shared((WINDOW,), T.int32)
            if tiled:
                tile_sums = T.alloc_shared((WARP,), T.int32)
                firsts = T.alloc_shared((WINDOW,), T.int32)
                ends = T.alloc_shared((WINDOW,), T.int32)
                heights = T.alloc_shared((WINDOW,), T.int32)
                tile_ends = T.alloc_shared((WINDOW,), T.int32)
            if cluster > 1:
                totals = T.alloc_shared((cluster, WINDOW), T.int32)
                mail = T.alloc_shared((1,), T.uint64)
            experts = T.alloc_local((batch,), T.int32)
            ranks = T.alloc_local((batch,), T.int32)
            others = T.alloc_local((COUNT_BATCH,), T.int32)
            sent = T.alloc_local((4,), T.int32)
            total = T.alloc_var(T.int32)
            before = T.alloc_var(T.int32)
            within = T.alloc_var(T.int32)
            length = T.alloc_var(T.int32)
            row = T.alloc_var(T.int32)
            next_row = T.alloc_var(T.int32)
            peers = T.alloc_var(T.int32)
            rank = T.alloc_var(T.int32)
            count = T.alloc_var(T.int32)
            first = T.alloc_var(T.int32)
            end = T.alloc_var(T.int32)
            start = T.alloc_var(T.int32)
            active = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            height = T.alloc_var(T.int32)
            listed = T.alloc_var(T.int32)
            found = T.alloc_var(T.int32)

            num_routes = num_tokens * top_k
            place = block if counted else block % cluster
            chunk_end = T.min((place + 1) * chunk, num_routes)
            part_first = place * chunk if counted else place * chunk + block // cluster * part
            run = T.ceildiv(T.min(part, tile_size), THREADS) * WARP
            active = T.truncdiv(T.min(part, tile_size) + run - 1, run)
            start = 0
            listed = 0
            if cluster > 1:
                quads = T.ceildiv(num_experts, 4)
                if thread == 0:
                    T.call_extern("void", "open_mail", T.address_of(mail[0]), cluster * quads * 16)
                T.cluster_arrive_relaxed()
            for window in T.serial(T.ceildiv(num_experts, WINDOW) if counted else 1):
                low = window * WINDOW
                high = T.min(low + WINDOW, num_experts)
                seen[0, thread] = 0
                seen[1, thread] = 0
                for tile in T.serial(T.ceildiv(part, TILE) if counted else 1):
                    if warp < active:
                        for i in T.unroll(WINDOW // (4 * WARP)):
                            if i * 4 * WARP < high - low:
                                for v in T.vectorized(4):
                                    rows[warp, (i * WARP + lane) * 4 + v] = 0
                    if counted:
                        T.sync_warp()
                    else:
                        T.sync_threads()
                        T.pdl_sync()
                        T.pdl_trigger()
                    first = part_first + tile * TILE + warp * run + lane
                    end = T.min(T.min(part_first + part, chunk_end), first - lane + run)
                    load_ids(experts, batch, ids, id_stride, first, WARP, end, top_k)
                    if not counted:
                        for i in T.serial(T.ceildiv(chunk, COUNT_BATCH * THREADS)):
                            route = place * chunk + i * COUNT_BATCH * THREADS + thread
                            load_ids(
                                others,
                                COUNT_BATCH,
                                ids,
                                id_stride,
                                route,
                                THREADS,
                                chunk_end,
                                top_k,
                            )
                            keep_window(others, COUNT_BATCH, low, high)
                            for j in T.unroll(COUNT_BATCH):
                                if others[j] >= 0:
                                    later = T.Cast(T.int32, route + j * THREADS >= part_first)
                                    T.atomic_add(seen[later, others[j]], 1)
                    # The ranks within each warp's run.
                    keep_window(experts, batch, low, high)
                    for j in T.unroll(batch):
                        if j * WARP < run:
                            match(peers, experts[j])
                            rank = T.call_extern(T.int32, "__popc", peers & ((-1 << lane) ^ -1))
                            count = T.call_extern(T.int32, "__popc", peers)
                            if experts[j] >= 0:
                                ranks[j] = rows[warp, experts[j]] + rank
                            T.sync_warp()
                            if experts[j] >= 0 and rank == 0:
                                rows[warp, experts[j]] = ranks[j] + count
                            T.sync_warp()
                    T.sync_threads()

                    if cluster > 1:
                        T.cluster_wait()
                        for i in T.unroll(cluster // 4):
                            quad = (i * THREADS + thread) // cluster
                            if quad < quads:
                                for v in T.unroll(4):
                                    sent[v] = seen[0, quad * 4 + v] + seen[1, quad * 4 + v]
                                T.call_extern(
                                    "void",
                                    "send_mail",
                                    T.address_of(totals[place, quad * 4]),
                                    T.address_of(mail[0]),
                                    thread % cluster,
                                    sent[0],
                                    sent[1],
                                    sent[2],
                                    sent[3],
                                )
                    # An expert a thread, from here to the next barrier but one.
                    within = 0
                    if low + thread < high:
                        for w in T.unroll(active, unroll_factor=8):
                            count = rows[w, thread]
                            rows[w, thread] = within
                            within = within + count
                    if tile == 0:
                        # Its routes in all, and in the chunks before this one.
                        if counted:
                            total = 0
                            before = 0
                            if window == 0:
                                # The ids were there before the counting, which has let this launch
                                # start early only then.
                                T.pdl_sync()
                                T.pdl_trigger()
                            slot = thread & ((1 << expert_bits) - 1)
                            group = thread >> expert_bits
                            group_bits = THREADS.bit_length() - 1 - expert_bits
                            groups = 1 << group_bits
                            if low + slot < high:
                                steps = (blocks - group + groups - 1) >> group_bits
                                for i in T.unroll(steps, unroll_factor=16):
                                    c = (i << group_bits) + group
                                    count = counts[c * num_experts + low + slot]
                                    total = total + count
                                    before = before + T.Select(c < block, count, 0)
                                T.atomic_add(seen[0, slot], before)
                                T.atomic_add(seen[1, slot], total - before)
                            T.sync_threads()
                        before = seen[0, thread]
                        total = before + seen[1, thread]
                        if cluster > 1:
                            T.call_extern("void", "await_mail", T.address_of(mail[0]))
                            if thread < high:
                                total = 0
                                for c in T.unroll(cluster):
                                    count = totals[c, thread]
                                    total = total + count
                                    before = before + T.Select(c < place, count, 0)
                        length = T.truncdiv(total + alignment - 1, alignment)
                        scan(length, row, count, warp_sums, lane, warp)
                        row = row + start
                        start = start + count
                        if inverted:
                            if low + thread < high:
                                firsts[thread] = row
                                lasts[thread] = row + length
                                ends[thread] = row * alignment + total
                            row = row * alignment
                        elif tiled:
                            tile_height(total, block_m, even, height)
                            count = T.truncdiv(total + height - 1, height)
                            scan(count, slot, found, tile_sums, lane, warp)
                            firsts[thread] = row
                            ends[thread] = row + total
                            heights[thread] = height
                            tile_ends[thread] = slot + count
                        else:
                            row = row * alignment
                            if low + thread < high:
                                if max_m > 0:
                                    row = (low + thread) * max_m
                                if block == 0 and max_m > 0:
                                    valid_end[low + thread] = T.min(total, max_m)
                                if block == 0 and max_m == 0:
                                    valid_end[low + thread] = row + total
                                    segment_end[low + thread] = row + length * alignment
                        next_row = row + before
                    bases[thread] = next_row
                    next_row = next_row + within
                    T.sync_threads()

                    for j in T.unroll(batch):
                        route = first + j * WARP
                        row = -1
                        if experts[j] >= 0:
                            row = bases[experts[j]] + rows[warp, experts[j]] + ranks[j]
                            if max_m > 0 and row >= (low + experts[j] + 1) * max_m:
                                row = -1
                        if inverted:
                            if row >= 0:
                                slots[row] = route
                        else:
                            # The first pass drops what a later one may still place.
                            if (experts[j] >= 0 or window == 0) and route < end:
                                inverse[route] = row
                            if tiled and row >= 0:
                                sources[row] = T.truncdiv(route, top_k)
                    T.sync_warp()
                if inverted:
                    # An expert a warp: its filler and its blocks.
                    slot = block * WARPS + warp
                    while low + slot < high:
                        count = lasts[slot]
                        fill(slots, ends[slot] + lane, count * alignment, WARP, num_routes)
                        fill(block_experts, firsts[slot] + lane, count, WARP, low + slot)
                        slot = slot + blocks * WARPS

                if tiled:
                    # A tile a thread.
                    row = block * THREADS + thread
                    while row < found:
                        slot = 0
                        for i in T.unroll(WINDOW.bit_length() - 1):
                            half = WINDOW >> (i + 1)
                            if tile_ends[slot + half - 1] <= row:
                                slot = slot + half
                        count = row
                        if slot > 0:
                            count = row - tile_ends[slot - 1]
                        write_tile(
                            tiles,
                            listed + row + 1,
                            low + slot,
                            firsts[slot] + count * heights[slot],
                            heights[slot],
                            ends[slot],
                            count,
                            tile_ends[slot] - row + count,
                            lines - 1,
                        )
                        row = row + blocks * THREADS
                    listed = listed + found

            if tiled and block == 0 and thread == 0:
                start_counters(tiles, T.min(listed, lines - 1))
            if inverted:
                row = block * THREADS + thread
                fill(slots, start * alignment + row, num_slots, blocks * THREADS, num_routes)
                fill(block_experts, start + row, num_blocks, blocks * THREADS, num_experts)
                if block == 0 and thread == 0:
                    num_rows[0] = start * alignment

    return place_routes


def split_routes(num_routes: int, num_experts: int) -> tuple[int, int, int, int]:
    """Return the cluster that counts so many routes, 0 for none, the blocks, a chunk and a part."""
    if num_experts <= WINDOW and num_routes <= TOGETHER:
        cluster = 1 if num_routes <= ALONE else CLUSTER
        chunk = max(-(-num_routes // cluster), 1)
        return cluster, cluster * PARTS, chunk, -(-chunk // PARTS)
    chunk = max(MIN_CHUNK, -(-num_routes // MAX_CHUNKS))
    return 0, max(-(-num_routes // chunk), 1), chunk, chunk


def launch(ids, tensors, num_experts: int, written: str, alignment=1, max_m=0, tile=(1, 0)) -> None:
    """Place the routes into ``tensors``, the eight of `build_place` that it may write."""
    if not ids.numel():  # it may have any strides then
        ids = ids.new_empty(ids.shape)
    cluster, blocks, chunk, part = split_routes(ids.shape[0] * ids.shape[1], num_experts)
    counts = None
    if cluster == 0:
        counts = ids.new_empty((blocks, num_experts))
        count_routes.build()(ids, counts, chunk)
        counts = counts.view(-1)
    expert_bits = min(max((num_experts - 1).bit_length(), 5), WINDOW.bit_length() - 1)
    split = num_experts, blocks, chunk, part, alignment, max_m, expert_bits, *tile
    build_place(written, cluster)(ids, counts, *tensors, *split)


def place(ids, alignment: int, max_m: int, num_experts: int):
    """Give every route its row; ``max_m`` is 0 in a contiguous layout.

    Args:
        ids: int32 ``[T, K]``.
        alignment: What the rows of a segment are rounded up to.
        max_m: Rows of a slab, or 0.
        num_experts: E.

    Returns:
        ``inverse`` ``[T * K]``, the row of each route or -1; ``segment_end`` ``[E]``, where the
        segment of each expert ends (unwritten for a slab); ``valid_end`` ``[E]``, where its routes
        end, or in a slab how many there are. All int32. Call it with the ids' device current.
    """
    inverse = ids.new_empty(ids.shape[0] * ids.shape[1])
    valid_end = ids.new_empty(num_experts)
    segment_end = valid_end if max_m else ids.new_empty(num_experts)
    tensors = inverse, segment_end, valid_end, None, None, None, None, None
    launch(ids, tensors, num_experts, "rows", alignment, max_m)
    return inverse, segment_end, valid_end


def place_tiles(ids, num_experts: int, block_m: int, even: bool = True):
    """Give every route its row, without padding, and list the tiles of a grouped GEMM.

    Args:
        ids: int32 ``[T, K]``.
        num_experts: E.
        block_m: Most rows of a tile.
        even: Whether the tiles of an expert are of one height, or as high as they can be.

    Returns:
        ``inverse`` ``[T * K]``, the row of each route or -1; ``sources`` ``[T * K]``, the token of
        each row that a route owns; and the list, as `grouped_gemm_tiles` makes it. All int32. Call
        it with the ids' device current.
    """
    num_routes = ids.shape[0] * ids.shape[1]
    inverse, sources = ids.new_empty(num_routes), ids.new_empty(num_routes)
    tiles = ids.new_empty((1 + most_tiles(num_routes, num_experts, block_m), FIELDS))
    tensors = inverse, None, None, sources, tiles, None, None, None
    launch(ids, tensors, num_experts, "tiles", tile=(block_m, int(even)))
    return inverse, sources, tiles


def align(ids, tensors, alignment: int, num_experts: int) -> None:
    """Write the route of every row, the expert of every block and the number of rows."""
    launch(ids, (None, None, None, None, None, *tensors), num_experts, "slots", alignment)
