"""The order of the jobs of a persistent grouped GEMM, and its operands as its kernel takes them.

A job is a row tile of the list by a block of columns. The tiles of an expert go through all columns
together, so that those who read the same weights do so at about the same time, and L2 serves most
of them. Blocks take one job after the other as they come to them, so that none has more work than
others.

The warpgroup that loads looks for the next job while it loads one, a part at each quarter of the
loads, so that nothing waits for what a part reads if there are four, and tells the others through a
queue in shared memory.
"""

import tilelang
import tilelang.language as T
import torch

from tileops.kernels.cuda.device import UNCHECKED
from tileops.kernels.cuda.grouped_gemm_tiles import (
    DONE,
    END,
    EXPERT,
    FIRST,
    GROUP,
    NEARLY_DONE,
    SIZE,
    TAKEN,
    TAKEN_AFTER,
    UNFINISHED,
)
from tileops.kernels.cuda.sm90.moves import count_up, lower, put, read_again, take, wait_for
from tileops.kernels.cuda.sm90.tile import MATH_THREADS, WARP

QUEUE = 8
"""Jobs that the queue holds: at least two more than stages, of which a job may need only one."""

# Barriers are placed by hand: automatic ones would join warps that never meet. That the queue is
# written is hidden from TileLang: `moves.put` says why.
CONFIG = {
    **UNCHECKED,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK: True,
}


def check_stages(stages: int) -> None:
    """Raise unless kernels of so many stages are right."""
    if stages + 2 > QUEUE:
        raise ValueError(f"stages: takes up to {QUEUE - 2}, got {stages}")


def within(slot, stages: int):
    """Return a stage, known to the compiler to be one: then addresses in the ring are simple."""
    return T.max(0, T.min(slot, stages - 1))


@T.macro
def wait_together(k, steps, empty, following, phase):
    """Wait for the stage after that of load ``k``, if it is loaded at the same time.

    Args:
        k: The load, of ``steps`` of a job.
        steps: Loads of the job.
        empty: The barriers of the stages.
        following: The stage.
        phase: That of the barrier of the stage before.
    """
    if k + 1 < steps:
        T.barrier_wait(empty[following], phase ^ T.Select(following == 0, 1, 0))


def told_at(steps):
    """Return the step of a job at which the next one is told."""
    return T.truncdiv(steps * 3, 4)


def finder(role: str, columns: int):
    """Make the macros that find jobs, of so many columns.

    A job is told as five numbers: its expert, or -1 past the last job, first column, first row, end
    row, and line in the list.

    Args:
        role: ``"alone"``, or ``"first"`` or ``"second"`` of two products on the same list.
        columns: Columns of a job.

    Returns:
        ``look_up(found, job, num_jobs, column_blocks, tiles)``, which finds a job at once, the
        first one of a block, whose number is that of the block; and ``look_ahead(k, steps, tile,
        found, queue, told, number, num_blocks, num_jobs, column_blocks, tiles)``, which the first
        warp that loads calls at each of the ``steps`` of its job ``number``, with six numbers of
        scratch in ``found``: at step ``told_at(steps)`` the next job is put into ``queue``, a
        barrier of ``told`` tells, and ``tile`` is set to it.
    """
    counter = TAKEN_AFTER if role == "second" else TAKEN

    @T.macro
    def find_group(found, job, column_blocks, tiles):
        at = T.alloc_var(T.int32)
        at = 1 + T.truncdiv(job, column_blocks)  # a line of the group
        found[0] = job
        found[1] = tiles[at, GROUP]
        found[2] = tiles[at, SIZE]

    @T.macro
    def find_tile(found, column_blocks, tiles):
        within = T.alloc_var(T.int32)
        line = T.alloc_var(T.int32)
        within = found[0] - (found[1] - 1) * column_blocks
        line = found[1] + T.truncmod(within, found[2])
        found[1] = T.truncdiv(within, found[2]) * columns
        found[0] = tiles[line, EXPERT]
        found[2] = tiles[line, FIRST]
        found[3] = tiles[line, END]
        found[4] = line

    @T.macro
    def look_up(found, job, num_jobs, column_blocks, tiles):
        for i in T.unroll(5):
            found[i] = 0
        found[0] = -1
        if job < num_jobs:
            find_group(found, job, column_blocks, tiles)
            find_tile(found, column_blocks, tiles)

    @T.macro
    def search(k, steps, found, queue, told, number, num_blocks, num_jobs, column_blocks, tiles):
        if k == 0:
            found[5] = take(tiles[0, counter])
        if k == T.truncdiv(steps, 4):
            found[5] = found[5] + num_blocks
            find_group(found, T.min(found[5], num_jobs - 1), column_blocks, tiles)
        if k == T.truncdiv(steps, 2):
            find_tile(found, column_blocks, tiles)
        if k == told_at(steps):
            found[0] = T.Select(found[5] < num_jobs, found[0], -1)
            put(
                T.access_ptr(queue[number % QUEUE, 0], "r", 5),
                *(found[i] for i in range(5)),
            )
            T.barrier_arrive(told[number % QUEUE])

    @T.macro
    def look_ahead(
        k, steps, tile, found, queue, told, number, num_blocks, num_jobs, column_blocks, tiles
    ):
        if T.get_thread_binding() == MATH_THREADS:
            search(k, steps, found, queue, told, number, num_blocks, num_jobs, column_blocks, tiles)
        if k == told_at(steps):
            next_job(tile, queue, told, number)

    return look_up, look_ahead


@T.macro
def next_job(found, queue, told, number):
    """Set ``found`` to the job after job ``number`` of this block, once it is told."""
    T.barrier_wait(told[number % QUEUE], number // QUEUE & 1)
    for i in T.unroll(5):
        found[i] = queue[number % QUEUE, i]


@T.macro
def wait_stored(k, steps, stored, number):
    """Wait at the last load of job ``number`` of this block until job ``number - 2`` is stored.

    Each is waited for, as a barrier tells of its last phase only, and before the last load, as then
    the next on this barrier cannot be over.
    """
    if k == steps - 1 and number > 1:
        T.barrier_wait(stored[number % 2], number // 2 - 1 & 1)


@T.macro
def tell_stored(tiles, stored, number, line):
    """Tell the second of two products what a block of the first one has stored.

    One warp calls it when all loads are made. The second product starts when the last tiles of the
    first are not yet stored: blocks tell that they have stored all but their last job, of which
    tile that is, and that they are done. A fence for each job costs more.
    """
    if number > 1:
        T.barrier_wait(stored[number % 2], (number - 2) // 2 & 1)
    if T.shuffle_elect(WARP):
        if number > 0:
            lower(tiles[0, UNFINISHED], line)
        count_up(tiles[0, NEARLY_DONE])
    if number > 0:
        T.barrier_wait(stored[(number - 1) % 2], (number - 1) // 2 & 1)
    if T.shuffle_elect(WARP):
        count_up(tiles[0, DONE])


@T.macro
def wait_nearly_done(tiles, num_blocks, safe):
    """Wait until all blocks of the first product are at their last job.

    Lines of the list below ``safe[0]`` are done then.
    """
    wait_for(tiles[0, NEARLY_DONE], num_blocks)
    safe[0] = read_again(tiles[0, UNFINISHED])


@T.macro
def wait_done(tiles, num_blocks, line, safe):
    """Wait for the first product where a tile needs it."""
    if line >= safe[0]:
        wait_for(tiles[0, DONE], num_blocks)
        safe[0] = T.max_value(T.int32)


def view(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``; a dimension of size 1 gets a stride that a TMA descriptor takes."""
    if 1 not in x.shape:
        return x
    step = 16 // x.element_size()
    steps = [step if size == 1 else s for size, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, (*steps[:-1], x.stride(-1)))


def slabs(x: torch.Tensor) -> torch.Tensor:
    """View expert rows, a matrix or slabs, as slabs."""
    return x if x.ndim == 3 else x.unsqueeze(0)
