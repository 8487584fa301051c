"""Verification: every case of a manifest on a target, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil
import torch

from tileops.targets import NoKernelError
from tileops.workloads.accuracy import bound, worst_row_error
from tileops.workloads.layer import Routing
from tileops.workloads.manifest import Case
from tileops.workloads.problems import (
    INDEX_OPS,
    PROBLEMS,
    Draw,
    Outputs,
    Problem,
    Weights,
)


@dataclass(frozen=True)
class Step:
    """One number of tokens of a case, with one routing, and the operators to run at it."""

    case: Case
    tokens: int
    routing: Routing
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """What was found for one call.

    Attributes:
        op: The operator, and the part of it.
        case: The manifest's case.
        tokens: T.
        routing: How tokens chose experts.
        dtype: Of tokens and weights.
        target: The target that ran it.
        error: The largest relative error of an output row; of integers, 0 or infinity.
        bound: What the error may be: twice that of plain torch in the dtype, plus one rounding.
        skipped: Why it was not run, or None.
    """

    op: str
    case: str
    tokens: int
    routing: str
    dtype: str
    target: str
    error: float = float("nan")
    bound: float = float("nan")
    skipped: str | None = None

    @property
    def excess(self) -> float:
        """Error over bound."""
        return _excess((self.error, self.bound))

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; a NaN is not."""
        return self.skipped is not None or self.error <= self.bound


def steps(
    cases: Sequence[Case],
    tokens: Sequence[int] | None = None,
    routing: Sequence[Routing] | None = None,
    ops: Sequence[str] | None = None,
) -> list[Step]:
    """List what cases ask for; an argument that is not None stands in for the manifest's."""
    found = []
    for case in cases:
        wanted = [op for op in ops or PROBLEMS if case.ops is None or op in case.ops]
        index = [op for op in wanted if op in INDEX_OPS]
        counts = [(count, wanted) for count in tokens or case.tokens]
        if not tokens:
            counts += [(count, index) for count in case.index_tokens]
        for count, here in counts:
            if here:
                found += [Step(case, count, kind, tuple(here)) for kind in routing or case.routing]
    return found


def device_of(target: str | None) -> torch.device:
    """Return the device whose tensors a target is given: a GPU where there is one."""
    return torch.device("cuda" if target != "cpu" and torch.cuda.is_available() else "cpu")


def verify(
    todo: Sequence[Step], target: str, dtype: torch.dtype = torch.bfloat16
) -> Iterator[list[Row]]:
    """Yield the rows of each step, one for each call.

    Args:
        todo: What to run.
        target: The target to check.
        dtype: Of tokens and weights.
    """
    device, layer, weights = device_of(target), None, None
    for step in todo:
        if step.case.layer is not layer:
            weights = None  # the old ones go before the new ones come
            layer, weights = step.case.layer, Weights(step.case.layer, dtype, device)
        draw = Draw(layer, step.tokens, dtype, device, step.routing, weights=weights)
        rows = []
        for op in step.ops:
            base = Row(op, step.case.name, step.tokens, step.routing, str(dtype)[6:], target)
            if (reason := too_large(draw, op)) is not None:
                rows.append(Row(**{**vars(base), "skipped": reason}))
                continue
            for problem in PROBLEMS[op](draw):
                rows.append(_check(problem, base))
        yield rows


def _check(problem: Problem, row: Row) -> Row:
    fields = {**vars(row), "op": problem.name}
    try:
        got = problem.prepared(row.target)()
    except NoKernelError as error:
        return Row(**fields | {"skipped": str(error)})
    error, limit = comparison(problem)(got)
    return Row(**fields | {"error": error, "bound": limit})


def comparison(problem: Problem) -> Callable[[Outputs], tuple[float, float]]:
    """Return a function of outputs: the error and the bound of the one furthest from right.

    Integers have no error: an output with a wrong one is infinitely far off.
    """
    exact, same = problem.live(problem.exact()), problem.live(problem.same_dtype())

    def compare(outputs: Outputs) -> tuple[float, float]:
        pairs = []
        for out, want, plain in zip(problem.live(outputs), exact, same, strict=True):
            if out.is_floating_point():
                limit = bound(plain.to(out.dtype), want, worst_row_error)
                pairs.append((worst_row_error(out, want), limit))
            else:
                pairs.append((0.0 if torch.equal(out, want) else float("inf"), 0.0))
        return max(pairs, key=_excess)

    return compare


def _excess(pair: tuple[float, float]) -> float:
    error, limit = pair
    if math.isnan(error):
        return math.inf
    return error / limit if limit else error


def too_large(draw: Draw, op: str) -> str | None:
    """Say why a problem does not fit in memory, or return None.

    Counted are the experts that tokens choose, and a step's largest intermediate values, some of
    them in float64.
    """
    layer, size = draw.layer, draw.dtype.itemsize
    wide = 2 * layer.ffn_size + 3 * layer.hidden_size
    need = draw.num_tokens * (layer.num_experts * 40 + layer.top_k * 8)
    if op not in INDEX_OPS:
        experts = min(layer.local_experts, draw.num_tokens * layer.top_k)
        need += experts * 3 * layer.hidden_size * layer.ffn_size * size
        need += draw.num_tokens * layer.top_k * wide * (size + 8)
    free = (
        torch.cuda.get_device_properties(draw.device).total_memory
        if draw.device.type == "cuda"
        else psutil.virtual_memory().total
    )
    if need < 0.85 * free:
        return None
    return f"needs about {need / 1e9:.0f} GB of memory, {draw.device} has {free / 1e9:.0f} GB"
