"""Benchmark: the time of every case of a manifest, beside its floor and beside peers.

The floor of a call is the larger of its operations over the rate of a dense matrix product and its
bytes over the rate of a copy, both measured in the same run. Each step runs in a fresh process.
"""

from __future__ import annotations

import math
import multiprocessing
import platform
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import tileops
from tileops.targets import NoKernelError
from tileops.workloads import timing
from tileops.workloads.peers import PeerError, measure
from tileops.workloads.problems import PROBLEMS, Draw, Problem, Weights
from tileops.workloads.verify import NO_SUCH_OP, Step, comparison, device_of, poisoned, too_large

CACHES = 3
"""The inputs that are taken in turn are together so many times the size of the cache."""
MAX_SETS = 32

OURS = "tileops"


@dataclass(frozen=True)
class Rates:
    """What the machine reaches.

    Attributes:
        flops: FLOP/s of a dense matrix product.
        bytes: Bytes per second, read and written, of a copy.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Row:
    """One implementation on one call.

    Attributes:
        op: The operator, and the part of it.
        case: The manifest's case.
        tokens: T.
        routing: How tokens chose experts.
        dtype: Of tokens and weights.
        by: ``"tileops"`` or the peer.
        microseconds: Median time, NaN where there is none.
        how: Taken from calls (``"eager"``), from replays of a CUDA graph, or on a ``"cpu"``.
        error: The largest relative error of an output row.
        flops: Operations that the call needs.
        num_bytes: Bytes that it must move.
        skipped: Why there is no time, or None.
        failed: Whether that is a fault of ours: a wrong result, or an error.
    """

    op: str
    case: str
    tokens: int
    routing: str
    dtype: str
    by: str
    microseconds: float = math.nan
    how: str = ""
    error: float = math.nan
    flops: float = 0.0
    num_bytes: float = 0.0
    skipped: str | None = None
    failed: bool = False

    def floor(self, rates: Rates) -> float:
        """Return the least microseconds that the machine could take."""
        return 1e6 * max(self.flops / rates.flops, self.num_bytes / rates.bytes)


@dataclass
class Report:
    """A run: where, with what, and what came out."""

    command: str
    machine: str
    versions: dict[str, str]
    date: str
    target: str
    rates: Rates
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Report:
        """Return the report whose fields a JSON file holds, None for what is not a number."""
        rows = [
            Row(**{k: math.nan if v is None and k != "skipped" else v for k, v in row.items()})
            for row in content["rows"]
        ]
        return cls(**{**content, "rates": Rates(**content["rates"]), "rows": rows})


def machine(device: torch.device) -> str:
    """Name the processor and, for a GPU, its driver."""
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = subprocess.run(query, capture_output=True, text=True, check=False)
        return f"{torch.cuda.get_device_name(device)}, driver {found.stdout.strip() or 'unknown'}"
    names = {"processor": platform.processor() or platform.machine()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names |= dict(
                (part.strip() for part in line.split(":", 1)) for line in lines if ":" in line
            )
    except OSError:
        pass
    name = names.get("model name", names["processor"])
    return f"{name}, {torch.get_num_threads()} threads"


def today() -> str:
    """Return the date in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"tileops": tileops.__version__, "python": platform.python_version()}
    for package in ("torch", "tilelang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


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
                reason = f"{type(error).__name__}: {error}"[:300]
                rows = [_without_time(step, dtype, reason, failed=True)]
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


def _without_time(step: Step, dtype: torch.dtype, reason: str, failed: bool = False) -> Row:
    """Return the row of a step that gave none."""
    names = ", ".join(step.ops), step.case.name, step.tokens, step.routing, str(dtype)[6:]
    return Row(*names, OURS, skipped=reason, failed=failed)


_turn: Any = None


def _begin(turn: Any) -> None:
    global _turn
    _turn = turn
    import tilelang

    tilelang.set_log_level("WARNING")


def _rates(target: str, dtype: torch.dtype) -> tuple[Rates, str]:
    device = device_of(target)
    with _turn:
        rates = Rates(timing.dense_rate(device, dtype), timing.copy_rate(device))
        return rates, machine(device)


def _step(
    step: Step, target: str, peers: Sequence[str], graph: bool | None, dtype: torch.dtype
) -> list[Row]:
    with _turn:
        weights = Weights(step.case.layer, dtype, device_of(target))
        args = target, peers, graph, dtype, weights
        rows = [row for op in step.ops for row in _op_rows(step, op, *args)]
        return rows or [_without_time(step, dtype, NO_SUCH_OP)]


def _op_rows(step, op, target, peers, graph, dtype, weights) -> Iterator[Row]:
    device, layer = device_of(target), step.case.layer
    base = Row(op, step.case.name, step.tokens, step.routing, str(dtype)[6:], OURS)

    def problems(seed: int) -> list[Problem]:
        draw = Draw(layer, step.tokens, dtype, device, step.routing, seed, weights)
        return list(PROBLEMS[op](draw))

    if (reason := too_large(step, (op,), dtype, device, weights)) is not None:
        yield Row(**{**vars(base), "skipped": reason})
        return
    with torch.inference_mode():
        parts = list(zip(*(problems(seed) for seed in _seeds(problems(1), device)), strict=True))
        for sets in parts:
            fields = vars(base) | {"op": sets[0].name}
            fields |= {"flops": sets[0].flops, "num_bytes": sets[0].num_bytes}
            compare = comparison(sets[0])
            for by in (OURS, *peers):
                fields["by"] = by.partition("=")[0]
                yield _time(sets, by, target, graph, fields, compare)


def _seeds(found: list[Problem], device: torch.device) -> range:
    """Return the seeds of as many sets of inputs as it takes to get past the cache."""
    smallest = min((problem.num_bytes for problem in found), default=1)
    count = math.ceil(CACHES * timing.cache_bytes(device) / max(smallest, 1))
    return range(1, 1 + max(1, min(count, MAX_SETS)))


def _time(
    sets: Sequence[Problem], by: str, target: str, graph: bool | None, fields: dict, compare
) -> Row:
    errors: list[float] = []

    def check(outputs) -> None:
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
            spent, how = timing.microseconds(calls, graph)
        else:
            spent, how = measure(by, sets, check, graph)
    except NoKernelError as error:
        return Row(**fields | {"skipped": str(error)})
    except PeerError as error:
        return Row(**fields | {"skipped": str(error), "failed": by == OURS})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        return Row(**fields | {"skipped": reason, "failed": by == OURS})
    return Row(**fields | {"microseconds": spent, "how": how, "error": errors[0]})
