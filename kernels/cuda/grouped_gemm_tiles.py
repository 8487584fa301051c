"""The row tiles of a grouped GEMM: every layout's metadata becomes one list, on the device.

The GEMM kernels know no layouts: each of their tiles is a row range of one expert, read from the
list. One thread block makes the list in one launch: it finds the row range of each expert, scans
the experts' tile counts, and then each thread looks up the experts of the tiles it writes, so that
one crowded expert costs no more than many even ones.
"""

import tilelang.language as T
import torch

from tileops.kernels.cuda.device import jit
from tileops.layouts import MaskedLayoutSpec, MGroupedLayoutSpec

THREADS = 1024
WARP = 32
WARPS = THREADS // WARP
LABELS_PER_THREAD = 8

GRAIN = 8
"""What the rows of a tile are a multiple of, but for the last tile of an expert."""

EXPERT, FIRST, END, GROUP, SIZE, FIELDS = 0, 1, 2, 3, 4, 6
"""Columns of the list: expert, first row, the row after the last one, and of the tiles that go
through all columns together the line of the first one, and how many they are."""
COUNT, TAKEN, TAKEN_AFTER, NEARLY_DONE, UNFINISHED, DONE = range(FIELDS)
"""Columns of its line 0: how many tiles there are, and what the products on them count, as
`sm90.jobs` says."""
MOST_TOGETHER = 16
"""Tiles that go through all columns together, at most: those of an expert, or parts of them."""


@T.macro
def scan(value: T.Ref, before: T.Ref, warp_results, carry, lane, warp, maximum: bool):
    """Scan over the block: ``value`` becomes the inclusive result, ``before`` the exclusive one.

    ``carry`` is the result of what came before this block of values.
    """
    other = T.alloc_var(T.int32)
    for i in T.unroll(5):
        other = T.shfl_up(value, 1 << i)
        if lane >= 1 << i:
            value = T.max(value, other) if maximum else value + other
    T.sync_threads()
    if lane == WARP - 1:
        warp_results[warp] = value
    T.sync_threads()
    other = carry
    for i in T.serial(warp):
        other = T.max(other, warp_results[i]) if maximum else other + warp_results[i]
    before = T.shfl_up(value, 1)
    before = T.if_then_else(lane == 0, 0, before)
    before = T.max(before, other) if maximum else before + other
    value = T.max(value, other) if maximum else value + other


@T.macro
def tile_height(rows, block_m, even, height: T.Ref):
    """Cut the rows of an expert in as few tiles as can be, even ones or all full but one."""
    number = T.truncdiv(rows + block_m - 1, block_m)
    height = T.truncdiv(rows + number - 1, T.max(number, 1))
    height = T.max(GRAIN, T.min((height + GRAIN - 1) & -GRAIN, block_m))
    height = T.Select(even != 0, height, block_m)


@T.macro
def write_tile(tiles, line, expert, first, height, end, place, number, capacity):
    """Write a line of the list.

    Args:
        tiles: The list.
        line: Which line, from 1 to ``capacity``; others are not written.
        expert: Whose rows they are.
        first: The first row.
        height: How many rows, unless those of the expert end before.
        end: Where they end.
        place: Which of the expert's tiles this is.
        number: How many tiles the expert has.
        capacity: Lines of tiles that there are.
    """
    if line <= capacity:
        together = T.ceildiv(number, T.ceildiv(number, MOST_TOGETHER))
        before = T.truncmod(place, together)
        left = T.min(number - place, capacity + 1 - line)
        tiles[line, EXPERT] = expert
        tiles[line, FIRST] = first
        tiles[line, END] = T.min(first + height, end)
        tiles[line, GROUP] = line - before
        tiles[line, SIZE] = T.min(together, left + before)


@T.macro
def start_counters(tiles, count):
    """Write the first line of the list."""
    for i in T.unroll(FIELDS):
        tiles[0, i] = 0
    tiles[0, COUNT] = count
    tiles[0, UNFINISHED] = T.max_value(T.int32)


@T.macro
def find_labels(labels, tiles, num_rows, num_experts, ranges, thread):
    """Write the row range of each expert to ``tiles``, from line ``ranges`` on.

    Rows of one expert stand together, but rows that no expert owns may lie between any two.
    """
    for i in T.serial(T.ceildiv(num_experts, THREADS)):
        expert = i * THREADS + thread
        if expert < num_experts:
            tiles[ranges + expert, FIRST] = num_rows
            tiles[ranges + expert, END] = 0
    T.sync_threads()
    label = T.alloc_local((LABELS_PER_THREAD,), T.int32)
    above = T.alloc_local((LABELS_PER_THREAD,), T.int32)
    below = T.alloc_local((LABELS_PER_THREAD,), T.int32)
    for i in T.serial(T.ceildiv(num_rows, THREADS * LABELS_PER_THREAD)):
        for j in T.unroll(LABELS_PER_THREAD):
            row = (i * LABELS_PER_THREAD + j) * THREADS + thread
            label[j] = T.if_then_else(row < num_rows, labels[row], -1)
            above[j] = T.if_then_else(row > 0 and row < num_rows, labels[row - 1], -1)
            below[j] = T.if_then_else(row + 1 < num_rows, labels[row + 1], -1)
        for j in T.unroll(LABELS_PER_THREAD):
            row = (i * LABELS_PER_THREAD + j) * THREADS + thread
            if label[j] >= 0 and label[j] < num_experts:
                if above[j] != label[j]:
                    T.atomic_min(tiles[ranges + label[j], FIRST], row)
                if below[j] != label[j]:
                    T.atomic_max(tiles[ranges + label[j], END], row + 1)
    T.sync_threads()


@jit
def build(layout: str):
    """Build the kernel for one kind of metadata.

    Args:
        layout: ``"physical_psum"``, ``"per_row"`` or ``"masked"``.

    In the kernel: E experts, L entries of metadata. ``num_rows`` is M, or ``max_m`` of a slab,
    whose rows the list counts from the start of their expert's slab.
    """
    num_entries, num_lines = T.dynamic("L, lines")

    @T.prim_func
    def grouped_gemm_tiles(
        metadata: T.Tensor[(num_entries,), T.int32],
        tiles: T.Tensor[(num_lines, FIELDS), T.int32],
        num_experts: T.int32,
        num_rows: T.int32,
        block_m: T.int32,
        even: T.int32,
        capacity: T.int32,
    ):
        with T.Kernel(1, threads=THREADS):
            warp_results = T.alloc_shared((WARPS,), T.int32)
            ends = T.alloc_shared((THREADS,), T.int32)
            firsts = T.alloc_shared((THREADS,), T.int32)
            stops = T.alloc_shared((THREADS,), T.int32)
            heights = T.alloc_shared((THREADS,), T.int32)
            thread = T.get_thread_binding()
            lane = thread % WARP
            warp = thread // WARP
            first = T.alloc_var(T.int32)
            stop = T.alloc_var(T.int32)
            total = T.alloc_var(T.int32)
            height = T.alloc_var(T.int32)
            before = T.alloc_var(T.int32)
            listed = T.alloc_var(T.int32)
            reached = T.alloc_var(T.int32)
            place = T.alloc_var(T.int32)
            tile = T.alloc_var(T.int32)

            T.pdl_sync()
            T.pdl_trigger()
            if layout == "per_row":
                find_labels(metadata, tiles, num_rows, num_experts, capacity + 1, thread)
            listed = 0
            reached = 0
            for chunk in T.serial(T.ceildiv(num_experts, THREADS)):
                expert = chunk * THREADS + thread
                first = 0
                stop = 0
                if expert < num_experts:
                    if layout == "per_row":
                        first = tiles[capacity + 1 + expert, FIRST]
                        stop = tiles[capacity + 1 + expert, END]
                    else:
                        stop = T.max(0, T.min(metadata[expert], num_rows))
                if layout == "physical_psum":
                    # an end below an earlier one is an empty segment: no row is listed twice
                    scan(stop, first, warp_results, reached, lane, warp, True)
                stop = T.max(first, stop)
                tile_height(stop - first, block_m, even, height)
                total = T.truncdiv(stop - first + height - 1, height)
                heights[thread] = height
                scan(total, before, warp_results, 0, lane, warp, False)
                ends[thread] = total
                firsts[thread] = first
                stops[thread] = stop
                T.sync_threads()
                reached = stops[THREADS - 1]
                total = ends[THREADS - 1]
                tile = thread
                while tile < total:
                    place = 0
                    for i in T.unroll(10):
                        if ends[place + (512 >> i) - 1] <= tile:
                            place = place + (512 >> i)
                    before = 0
                    if place > 0:
                        before = ends[place - 1]
                    height = heights[place]
                    write_tile(
                        tiles,
                        listed + tile + 1,
                        chunk * THREADS + place,
                        firsts[place] + (tile - before) * height,
                        height,
                        stops[place],
                        tile - before,
                        ends[place] - before,
                        capacity,
                    )
                    tile = tile + THREADS
                listed = T.max(0, T.min(listed + total, capacity))
                T.sync_threads()
            if thread == 0:
                start_counters(tiles, listed)

    return grouped_gemm_tiles


def most_tiles(rows: int, num_experts: int, block_m: int) -> int:
    """Return how many tiles rows of a contiguous layout may make."""
    return (rows + min(num_experts, rows) * (block_m - 1)) // block_m


def grouped_gemm_tiles(
    metadata: torch.Tensor,
    layout: MGroupedLayoutSpec,
    rows: int,
    num_experts: int,
    block_m: int,
    even: bool = True,
) -> torch.Tensor:
    """List the row tiles of a grouped GEMM.

    Bad metadata gives a list of other rows of the same matrix, never one outside it, and labels
    outside [0, E) have no tile.

    Args:
        metadata: int32, as the layout says.
        layout: How rows are grouped by expert.
        rows: Rows of the matrix, or of one expert's slab.
        num_experts: E.
        block_m: Most rows of a tile.
        even: Whether the tiles of an expert are of one height, or as high as they can be.

    Returns:
        int32 ``[lines, 6]``: line 0 starts with the number of tiles, the next lines hold the
        expert, the first row and the end row of each, in expert order, and which go through all
        columns together. What follows is scratch.
    """
    if isinstance(layout, MaskedLayoutSpec):
        kind, capacity = "masked", num_experts * -(-rows // block_m)
    else:
        kind = layout.metadata
        capacity = most_tiles(rows, num_experts, block_m)
    ranges = num_experts if kind == "per_row" else 0
    tiles = metadata.new_empty((1 + capacity + ranges, FIELDS))
    build(kind)(metadata, tiles, num_experts, rows, block_m, int(even), capacity)
    return tiles
