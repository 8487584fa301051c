"""Benchmark: the time of every case of a manifest, beside its floor and beside peers.

The floor of a call is the larger of its operations over the rate of a dense matrix product and its
bytes over the rate of a copy, both measured in the same run. Each step runs in a fresh process.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import torch

from tileops.targets import NoKernelError
from tileops.workloads import timing
from tileops.workloads.draw import Draw, Outputs, Weights
from tileops.workloads.peers import PeerError, measure, start
from tileops.workloads.problems import PROBLEMS, Problem
from tileops.workloads.report import OURS, Rates, Report, Row, machine, today, versions
from tileops.workloads.verify import NO_SUCH_OP, Step, comparison, device_of, poisoned, too_large

CACHES = 3
"""The inputs that are taken in turn are together so many times the size of the cache."""
MAX_SETS = 32


def bench(
    todo: Sequence[Step],
    target: str,
    peers: Sequence[str] = (),
    graph: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
    command: str = "",
) -> Iterator[tuple[Report, list[Row]]]:
    """Yield the report and the newest rows: once with none, then after each step.

    Args:
        todo: What to run.
        target: The target to time.
        peers: As ``peers.measure`` takes them.
        graph: Replay CUDA graphs: always, never, or None for calls too short to time otherwise.
        dtype: Of tokens and weights.
        command: What to call the run in its report.
    """
    # the next process starts up while one measures, so that a step costs little more than itself
    args = target, tuple(peers), graph, dtype
    pool = _pool(target)
    try:
        rates, name = pool.submit(_rates, target, dtype).result()
        report = Report(command, name, versions(), today(), target, rates)
        yield report, []
        running = [pool.submit(_step, step, *args) for step in todo]
        for index, step in enumerate(todo):
            try:
                rows = running[index].result()
            except Exception as error:
                row = Row(**step.call(dtype), by=OURS, failed=True)
                rows = [replace(row, skipped=_in_words(error))]
            if isinstance(running[index].exception(), BrokenProcessPool):
                # a process died with the turn in its hands: the rest needs others
                pool.shutdown(wait=False, cancel_futures=True)
                pool = _pool(target)
                rest = [pool.submit(_step, later, *args) for later in todo[index + 1 :]]
                running[index + 1 :] = rest
            report.rows += rows
            yield report, rows
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(target: str) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    workers = 3 if device_of(target).type == "cuda" else 1
    turn = context.Lock()
    return ProcessPoolExecutor(
        workers, context, initializer=_begin, initargs=(turn,), max_tasks_per_child=1
    )


def _in_words(error: Exception) -> str:
    if isinstance(error, BrokenProcessPool):
        return "its process was ended, for want of memory perhaps: try fewer tokens"
    return f"{type(error).__name__}: {error}"[:300]


_turn: Any = None


def _begin(turn: Any) -> None:
    global _turn
    _turn = turn
    import tilelang

    tilelang.set_log_level("WARNING")


def _rates(target: str, dtype: torch.dtype) -> tuple[Rates, str]:
    device = device_of(target)
    with _turn:
        rates = Rates(
            timing.dense_rate(device, dtype), timing.copy_rate(device), timing.fp8_rate(device)
        )
        return rates, machine(device)


def _step(
    step: Step, target: str, peers: Sequence[str], graph: bool | None, dtype: torch.dtype
) -> list[Row]:
    start(peers)  # before its turn comes, as this process did
    with _turn:
        weights = Weights(step.case.layer, dtype, device_of(target))
        args = target, peers, graph, dtype, weights
        rows = [row for op in step.ops for row in _op_rows(step, op, *args)]
        return rows or [Row(**step.call(dtype), by=OURS, skipped=NO_SUCH_OP)]


def _op_rows(step, op, target, peers, graph, dtype, weights) -> Iterator[Row]:
    device, layer = device_of(target), step.case.layer
    base = Row(**step.call(dtype, op), by=OURS)

    def problems(seed: int) -> list[Problem]:
        draw = Draw(layer, step.tokens, dtype, device, step.routing, seed, weights)
        return list(PROBLEMS[op](draw))

    if (reason := too_large(step, (op,), dtype, device, weights)) is not None:
        yield replace(base, skipped=reason)
        return
    with torch.inference_mode():
        first = problems(1)
        others = [problems(seed) for seed in range(2, 1 + _sets(first, device))]
        for sets in zip(first, *others, strict=True):
            one, compare = sets[0], comparison(sets[0])
            row = replace(base, op=one.name, flops=one.flops, num_bytes=one.num_bytes, fp8=one.fp8)
            for by in (OURS, *peers):
                here = replace(row, by=by.partition("=")[0])
                yield _time(sets, by, target, device, graph, here, compare)


def _sets(found: list[Problem], device: torch.device) -> int:
    """Return how many sets of inputs it takes to get past the cache."""
    smallest = min((problem.num_bytes for problem in found), default=1)
    count = math.ceil(CACHES * timing.cache_bytes(device) / max(smallest, 1))
    return max(1, min(count, MAX_SETS))


def _time(
    sets: Sequence[Problem],
    by: str,
    target: str,
    device: torch.device,
    graph: bool | None,
    row: Row,
    compare: Callable[[Outputs], tuple[float, float]],
) -> Row:
    errors: list[float] = []

    def check(outputs: Outputs) -> None:
        error, limit = compare(outputs)
        errors.append(error)
        if not error <= limit:
            raise PeerError(f"wrong: relative error {error:.2e}, allowed {limit:.2e}")

    try:
        if by == OURS:
            calls = [problem.prepared(target) for problem in sets]
            with poisoned():
                outputs = calls[0]()
            check(outputs)
            spent, how = timing.microseconds(calls, device, graph)
        else:
            spent, how = measure(by, sets, check, graph)
    except NoKernelError as error:
        return replace(row, skipped=str(error))
    except PeerError as error:
        return replace(row, skipped=str(error), failed=by == OURS)
    except Exception as error:
        return replace(row, skipped=_in_words(error), failed=by == OURS)
    return replace(row, microseconds=spent, how=how, error=errors[0])
