"""Benchmark: the time of every case of a manifest, beside its floor and beside peers.

The floor of a call is the larger of its operations over the rate of a dense matrix product and its
bytes over the rate of a copy, both measured in the same run. A unit, one op of a step, has a fresh
process. The units of a batch prepare at the same time; when all are ready they are timed one after
the other, alone on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from tileops.targets import NoKernelError
from tileops.workloads import timing
from tileops.workloads.draw import Draw, Outputs, Weights
from tileops.workloads.peers import PeerError, prepare, start
from tileops.workloads.problems import PROBLEMS, Problem
from tileops.workloads.report import OURS, Rates, Report, Row, machine, today, versions
from tileops.workloads.verify import (
    FILLED,
    NO_SUCH_OP,
    Step,
    bytes_needed,
    bytes_there,
    comparison,
    device_of,
    poisoned,
    too_large,
)
from tileops.workloads.workers import Worker, Workers, in_words

CACHES = 3
"""The inputs that are taken in turn are together so many times the size of the cache."""
MAX_SETS = 32
AT_ONCE = {"cuda": 12, "cpu": 1}
"""Units in a batch at most. Where it is 1, no process starts while another one runs."""
UNIT_BYTES = 3e9
"""What a unit's processes take beside the tensors of a call: contexts, further sets of inputs."""


def bench(
    todo: Sequence[Step],
    target: str,
    peers: Sequence[str] = (),
    graph: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
    command: str = "",
) -> Iterator[tuple[Report, list[Row]]]:
    """Yield the report and the newest rows: once with none, then after each step, large ones first.

    Args:
        todo: What to run.
        target: The target to time.
        peers: As ``peers.prepare`` takes them.
        graph: Replay CUDA graphs: always, never, or None for calls too short to time otherwise.
        dtype: Of tokens and weights.
        command: What to call the run in its report.
    """
    device = device_of(target)
    units = [(step, op) for step in todo for op in step.ops]
    with closing(Workers(peers, AT_ONCE[device.type])) as workers:
        workers.start_ahead(len(units))
        with closing(Worker(())) as worker:
            worker.send((_rates, target, dtype))
            measured = worker.result()
        if isinstance(measured, str):
            raise RuntimeError(measured)
        rates, name, memory = measured
        report = Report(command, name, versions(), today(), target, rates)
        yield report, []
        works = [(_unit, *unit, target, tuple(peers), graph, dtype) for unit in units]
        sizes = [_size(*unit, peers, dtype, device, FILLED * memory) for unit in units]
        batches = _batches(sizes, FILLED * memory, AT_ONCE[device.type])
        step_of = [number for number, step in enumerate(todo) for _ in step.ops]
        results: dict[int, list[Row] | str] = {}
        found: dict[int, list[Row]] = {}
        for unit, result in workers.run(works, batches):
            number, results[unit] = step_of[unit], result
            own = [i for i, step in enumerate(step_of) if step == number]
            if all(i in results for i in own):
                found[number] = _rows(todo[number], [results[i] for i in own], dtype)
                report.rows = [row for i in sorted(found) for row in found[i]]
                yield report, found[number]


def _rows(step: Step, results: Sequence[list[Row] | str], dtype: torch.dtype) -> list[Row]:
    """Return the rows of a step, from the rows of its ops or from why they failed."""
    rows: list[Row] = []
    for op, found in zip(step.ops, results, strict=True):
        if isinstance(found, str):
            found = [Row(**step.call(dtype, op), by=OURS, skipped=found, failed=True)]
        rows += found
    return rows or [Row(**step.call(dtype), by=OURS, skipped=NO_SUCH_OP)]


def _size(
    step: Step,
    op: str,
    peers: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    room: float,
) -> float:
    """Return the bytes of a unit: one that has no room at all is skipped, and takes none."""
    need = bytes_needed(step, (op,), dtype, device)
    # a peer in the same process may have weights in an order of its own
    copies = 1 + sum("=" not in peer for peer in peers)
    return copies * need + UNIT_BYTES if need < room else 0


def _batches(sizes: Sequence[float], room: float, most: int) -> list[list[int]]:
    """Pack numbers of units into batches, the largest first, each where there is room first."""
    batches: list[list[int]] = []
    left: list[float] = []
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        for number, batch in enumerate(batches):
            if len(batch) < most and sizes[unit] <= left[number]:
                batch.append(unit)
                left[number] -= sizes[unit]
                break
        else:
            batches.append([unit])
            left.append(room - sizes[unit])
    return batches


def _rates(target: str, dtype: torch.dtype) -> Iterator[tuple[Rates, str, int]]:
    device = device_of(target)
    rates = Rates(
        timing.dense_rate(device, dtype), timing.copy_rate(device), timing.fp8_rate(device)
    )
    yield rates, machine(device), bytes_there(device)


def _unit(
    step: Step,
    op: str,
    target: str,
    peers: Sequence[str],
    graph: bool | None,
    dtype: torch.dtype,
) -> Iterator[list[Row] | None]:
    """Yield None when all that is to be timed has run and is right, then the rows."""
    device, layer = device_of(target), step.case.layer
    weights = Weights(layer, dtype, device)
    base = Row(**step.call(dtype, op), by=OURS)

    def problems(seed: int) -> list[Problem]:
        draw = Draw(layer, step.tokens, dtype, device, step.routing, seed, weights)
        return list(PROBLEMS[op](draw))

    if (reason := too_large(step, (op,), dtype, device, weights)) is not None:
        yield [replace(base, skipped=reason)]
        return
    with torch.inference_mode():
        first = problems(1)
        for _ in first[1:]:
            start(peers)
        further = [problems(seed) for seed in range(2, 1 + _sets(first, device))]
        rows: list[tuple[Row | None, Iterator[Row | None]]] = []
        for sets in zip(first, *further, strict=True):
            one, compare = sets[0], comparison(sets[0])
            of_peer = comparison(one, of_peer=True) if peers and one.any_order else compare
            row = replace(base, op=one.name, flops=one.flops, num_bytes=one.num_bytes, fp8=one.fp8)
            for by in (OURS, *peers):
                here = replace(row, by=by.partition("=")[0])
                right = compare if by == OURS else of_peer
                row_of = _row(sets, by, target, device, graph, here, right)
                rows.append((next(row_of), row_of))
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield None
        yield [row for skipped, rest in rows if (row := skipped or next(rest)) is not None]


def _sets(found: list[Problem], device: torch.device) -> int:
    """Return how many sets of inputs it takes to get past the cache."""
    smallest = min((problem.num_bytes for problem in found), default=1)
    count = math.ceil(CACHES * timing.cache_bytes(device) / max(smallest, 1))
    return max(1, min(count, MAX_SETS))


def _row(
    sets: Sequence[Problem],
    by: str,
    target: str,
    device: torch.device,
    graph: bool | None,
    row: Row,
    compare: Callable[[Outputs], tuple[float, float]],
) -> Iterator[Row | None]:
    """Yield None when the call has run and is right, then the row with its time.

    A call that cannot be timed yields the row that says why, in either place.
    """
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
            timed = partial(timing.microseconds, calls, device, graph)
        else:
            timed = prepare(by, sets, check, graph)
        yield None
        spent, how = timed()
    except NoKernelError as error:
        yield replace(row, skipped=str(error))
    except PeerError as error:
        yield replace(row, skipped=str(error), failed=by == OURS)
    except Exception as error:
        yield replace(row, skipped=in_words(error), failed=by == OURS)
    else:
        yield replace(row, microseconds=spent, how=how, error=errors[0])
