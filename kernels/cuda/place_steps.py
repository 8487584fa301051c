"""Steps of `place_routes` that a warp or a block takes together."""

import tilelang.language as T

from tileops.kernels.cuda.count_routes import THREADS, WARP, WINDOW

WARPS = THREADS // WARP


@T.macro
def match(peers: T.Ref, expert):
    """Set ``peers`` to the lanes of the same expert, if that is none of the window's, garbage.

    A vote for each bit takes a fraction of the time of the instruction that compares all lanes.
    """
    peers = T.Cast(T.int32, T.ballot(expert >= 0))
    for i in T.unroll(WINDOW.bit_length() - 1):
        bit = (expert >> i) & 1
        peers = peers & (T.Cast(T.int32, T.ballot(bit != 0)) ^ (bit - 1))


@T.macro
def fill(written, first, end, step, value):
    """Write ``value`` at ``first, first + step...`` below ``end``; most loops end at once."""
    place = T.alloc_var(T.int32)
    place = first
    for _ in T.unroll(end, unroll_factor=1):
        if place >= end:
            T.loop_break()
        written[place] = value
        place = place + step


@T.macro
def scan(value, before: T.Ref, total: T.Ref, warp_sums, lane, warp):
    """Sum the values of the threads of a block: of those before this one, and of all."""
    before = value
    for shift in T.unroll(5):
        other = T.shfl_up(before, 1 << shift)
        before = before + T.Select(lane >= (1 << shift), other, 0)
    if lane == WARP - 1:
        warp_sums[warp] = before
    T.sync_threads()
    others = T.Select(lane < WARPS, warp_sums[lane], 0)
    before = before - value + T.warp_reduce_sum(T.Select(lane < warp, others, 0))
    total = T.warp_reduce_sum(others)  # noqa: F841 (an out parameter)
