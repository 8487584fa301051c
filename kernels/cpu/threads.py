"""One pool of threads for all kernels: a kernel call runs on one core and releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock

import torch

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _executor(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            # one that is replaced ends by itself once its last caller lets go of it
            _pool = ThreadPoolExecutor(size, thread_name_prefix="tileops-cpu")
            _pool_size = size
        return _pool


def _forget() -> None:
    """Drop the pool in a forked child, which has none of its threads."""
    global _lock, _pool
    _lock, _pool = Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def parallel(units: int, grain: int, call: Callable[[int, int], object]) -> None:
    """Run ``call(lo, hi)`` on ranges that partition ``[0, units)``, on all of torch's threads.

    Args:
        units: Independent pieces of work, numbered from 0. With none, ``call`` does not run.
        grain: Fewest units worth a thread of their own; a kernel call costs about 40 us.
        call: Runs one range. It allocates its own workspace.
    """
    parts = max(1, min(torch.get_num_threads(), units // max(grain, 1)))
    bounds = [units * part // parts for part in range(parts + 1)]
    if parts == 1:
        if units:
            call(0, units)
        return
    pool = _executor(parts - 1)
    futures = [pool.submit(call, lo, hi) for lo, hi in zip(bounds[1:], bounds[2:], strict=False)]
    try:
        call(bounds[0], bounds[1])
    finally:
        wait(futures)
    for future in futures:
        future.result()
