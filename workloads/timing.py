"""Timing of GPU and CPU calls. Torch is all it needs: peers run it in processes of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

WARM_UP_SECONDS = 0.1
SECONDS = 0.3
MIN_REPEATS, MAX_REPEATS = 5, 200
LONG_SECONDS = 0.01
"""A product on a CPU that takes longer is large enough to tell its rate."""
SHORT_MICROSECONDS = 1000
"""Calls shorter than this are replayed from a CUDA graph unless asked otherwise."""

Call = Callable[[], object]


def microseconds(
    calls: Sequence[Call], device: torch.device, graph: bool | None = None
) -> tuple[float, str]:
    """Return the median time of a call, and how it was taken: `"graph"`, `"eager"` or `"cpu"`.

    Args:
        calls: The same call on several sets of inputs, which are taken in turn so that none finds
            its inputs in a cache.
        device: Where they run.
        graph: Whether GPU calls are replayed from a CUDA graph of one turn; None: the short ones,
            which are timed both ways.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return _host_time(calls), "cpu"
    torch.cuda.synchronize()
    if not graph:
        eager = _event_time(calls)
        if graph is False or eager > SHORT_MICROSECONDS:
            return eager, "eager"
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    return _event_time([captured.replay]) / len(calls), "graph"


def _repeats(seconds_each: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, round(SECONDS / max(seconds_each, 1e-7))))


def _event_time(calls: Sequence[Call]) -> float:
    end, turns = time.perf_counter() + WARM_UP_SECONDS, 0
    begin = time.perf_counter()
    while turns == 0 or time.perf_counter() < end:
        for call in calls:
            call()
        torch.cuda.synchronize()
        turns += 1
    repeats = _repeats((time.perf_counter() - begin) / turns)
    times = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        times.append(events)
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) for e in times for a, b in zip(e[:-1], e[1:], strict=True)]
    return 1e3 * median(spans)


def _host_time(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    repeats = _repeats(time.perf_counter() - begin)
    times = []
    for _ in range(repeats):
        for call in calls:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return 1e6 * median(times)


def dense_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large square matrix product through torch, on random data.

    On a CPU float32 counts if it is faster: many have no instructions for less.
    """
    if device.type == "cuda":
        return _product_rate(8192, device, dtype)
    return max(_cpu_rate(kind) for kind in {dtype, torch.float32})


def _cpu_rate(dtype: torch.dtype) -> float:
    """Return the rate at the first size of which a product takes a while."""
    for size in (256, 512, 1024):
        rate = _product_rate(size, torch.device("cpu"), dtype)
        if 2 * size**3 / rate > LONG_SECONDS:
            return rate
    return _product_rate(2048, torch.device("cpu"), dtype)


def _product_rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    return 2e6 * size**3 / microseconds([lambda: a @ b], device, graph=False)[0]


def fp8_rate(device: torch.device) -> float:
    """Return the FLOP/s of a large product of FP8 matrices through torch, NaN without a GPU."""
    if device.type != "cuda":
        return math.nan
    size = 8192
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in "ab")
    one = torch.ones((), device=device)

    def call() -> torch.Tensor:
        return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2e6 * size**3 / microseconds([call], device, graph=False)[0]


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second, read plus written, of a large copy through torch.

    The better of a copy and of an elementwise kernel counts: neither always is.
    """
    size = 2**30 if device.type == "cuda" else 2**27
    source, target = (torch.ones(size, dtype=torch.bfloat16, device=device) for _ in "st")
    calls = lambda: target.copy_(source), lambda: torch.neg(source, out=target)
    return 4e6 * size / min(microseconds([call], device, graph=False)[0] for call in calls)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the cache that inputs are rotated past."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    return 2**25
