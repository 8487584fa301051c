"""Count the routes of each expert in each chunk of a batch: the first half of `place_routes`."""

import tilelang
import tilelang.language as T

from tileops.kernels.cuda.device import UNCHECKED, jit

WARP = 32
THREADS = 512
WINDOW = THREADS
"""Experts whose counters fit in shared memory, one a thread; more experts take several passes."""
BATCH = 4
"""Ids that a thread holds at once."""
TILE = BATCH * THREADS

# Barriers are placed by hand: which counter is touched depends on data, so the automatic pass would
# put one around every access.
CONFIG = {
    **UNCHECKED,
    tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True,
}


@T.macro
def load_ids(experts, number, ids, id_stride, first, step, end, top_k):
    """Set ``number`` experts to those of routes ``first, first + step...``, -1 from ``end`` on."""
    if id_stride == T.Cast(T.int64, top_k):
        for j in T.unroll(number):
            experts[j] = -1
            if first + j * step < end:
                experts[j] = ids[0, first + j * step]
    else:
        for j in T.unroll(number):
            experts[j] = -1
            if first + j * step < end:
                token = T.truncdiv(first + j * step, top_k)
                experts[j] = ids[token, first + j * step - token * top_k]


@T.macro
def keep_window(experts, number, low, high):
    """Count ``experts`` from ``low``; one outside ``[low, high)`` becomes -1."""
    for j in T.unroll(number):
        experts[j] = T.Select(T.And(experts[j] >= low, experts[j] < high), experts[j] - low, -1)


@jit(pass_configs=CONFIG)
def build():
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
        with T.Kernel(chunks, threads=THREADS) as block:
            thread = T.get_thread_binding()
            seen = T.alloc_shared((WINDOW,), T.int32)
            experts = T.alloc_local((BATCH,), T.int32)
            end = T.min((block + 1) * chunk, num_tokens * top_k)
            T.pdl_sync()
            T.pdl_trigger()
            for window in T.serial(T.ceildiv(num_experts, WINDOW)):
                low = window * WINDOW
                high = T.min(low + WINDOW, num_experts)
                seen[thread] = 0
                T.sync_threads()
                for i in T.serial(T.ceildiv(chunk, TILE)):
                    first = block * chunk + i * TILE + thread
                    load_ids(experts, BATCH, ids, id_stride, first, THREADS, end, top_k)
                    keep_window(experts, BATCH, low, high)
                    for j in T.unroll(BATCH):
                        if experts[j] >= 0:
                            T.atomic_add(seen[experts[j]], 1)
                T.sync_threads()
                if low + thread < high:
                    counts[block, low + thread] = seen[thread]

    return count_routes
