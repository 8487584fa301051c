"""Verification: every case of a manifest on a target, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from tileops.targets import NoKernelError
from tileops.workloads.accuracy import bound, worst_row_error
from tileops.workloads.draw import Draw, Outputs, Weights
from tileops.workloads.layer import Routing
from tileops.workloads.manifest import Case
from tileops.workloads.problem import Problem
from tileops.workloads.problems import INDEX_OPS, PROBLEMS
from tileops.workloads.problems_fp8 import PROBLEMS_FP8

NO_SUCH_OP = "the layer has no such op"
FILLED = 0.85
"""The part of the memory that may be filled."""


@dataclass(frozen=True)
class Step:
    """One number of tokens of a case, with one routing, and the operators to run at it."""

    case: Case
    tokens: int
    routing: Routing
    ops: tuple[str, ...]

    def call(self, dtype: torch.dtype, op: str | None = None) -> dict[str, Any]:
        """Return the fields of a `Call`: of one op, or of all."""
        name = op or ", ".join(self.ops)
        return vars(Call(name, self.case.name, self.tokens, self.routing, str(dtype)[6:]))


@dataclass(frozen=True)
class Call:
    """Which call a row is about.

    Attributes:
        op: The operator, and the part of it.
        case: The manifest's case.
        tokens: T.
        routing: How tokens chose experts.
        dtype: Of tokens and weights.
    """

    op: str
    case: str
    tokens: int
    routing: str
    dtype: str


@dataclass(frozen=True)
class Row(Call):
    """What was found for one call.

    Attributes:
        target: The target that ran it.
        error: The largest relative error of an output row; of integers, 0 or infinity.
        bound: What the error may be: twice that of plain torch in the dtype, plus one rounding.
        skipped: Why it was not run, or None.
    """

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
        if too_large(step, step.ops, dtype, device, weights) and weights.num_drawn:
            weights = Weights(layer, dtype, device)
        draw = Draw(layer, step.tokens, dtype, device, step.routing, weights=weights)
        rows = []
        for op in step.ops:
            base = Row(**step.call(dtype, op), target=target)
            if (reason := too_large(step, (op,), dtype, device, weights)) is not None:
                rows.append(replace(base, skipped=reason))
            else:
                rows += [_check(problem, base) for problem in PROBLEMS[op](draw)]
        yield rows or [Row(**step.call(dtype), target=target, skipped=NO_SUCH_OP)]


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch fill new memory with NaN, or with the largest integer: what is not written shows.

    The mode that does it also forbids nondeterministic operations: here it only warns of them.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _check(problem: Problem, row: Row) -> Row:
    row = replace(row, op=problem.name)
    try:
        with poisoned():
            got = problem.prepared(row.target)()
    except NoKernelError as error:
        return replace(row, skipped=str(error))
    error, limit = comparison(problem)(got)
    return replace(row, error=error, bound=limit)


def comparison(problem: Problem, of_peer: bool = False) -> Callable[[Outputs], tuple[float, float]]:
    """Return a function of outputs: the error and the bound of the one furthest from right.

    Integers and copies have no error: an output with a wrong one is infinitely far off. A peer's
    outputs may be in another order where the op's document leaves it free.
    """
    live = problem.any_order if of_peer and problem.any_order is not None else problem.live
    exact, same = live(problem.exact()), live(problem.same_dtype())

    def compare(outputs: Outputs) -> tuple[float, float]:
        pairs = []
        for out, want, plain in zip(live(outputs), exact, same, strict=True):
            if problem.copies or not out.is_floating_point():
                pairs.append((0.0 if torch.equal(out, want.to(out.dtype)) else float("inf"), 0.0))
            else:
                limit = bound(plain.to(out.dtype), want, worst_row_error)
                pairs.append((worst_row_error(out, want), limit))
        return max(pairs, key=_excess)

    return compare


def _excess(pair: tuple[float, float]) -> float:
    error, limit = pair
    if math.isnan(error):
        return math.inf
    return error / limit if limit else error


def bytes_needed(
    step: Step, ops: Sequence[str], dtype: torch.dtype, device: torch.device, num_drawn: int = 0
) -> int:
    """Return about how much memory some ops at a step need.

    Counted are the experts that have weights or may be chosen (on a GPU all that are here), and a
    step's largest intermediate values, some of them in float64.
    """
    layer, size = step.case.layer, dtype.itemsize
    need = step.tokens * (layer.num_experts * 40 + layer.top_k * 8)
    if any(op not in INDEX_OPS for op in ops):
        chosen = step.tokens * layer.top_k + num_drawn
        experts = layer.local_experts
        experts = experts if device.type == "cuda" else min(experts, chosen)
        per_weight = size + any(op in PROBLEMS_FP8 for op in ops)
        need += experts * 3 * layer.hidden_size * layer.ffn_size * per_weight
        need += 3 * layer.hidden_size * (layer.shared_size or 0) * (size + 8)
        wide = 2 * layer.ffn_size + 3 * layer.hidden_size
        need += step.tokens * layer.top_k * wide * (size + 8)
    return need


def bytes_there(device: torch.device) -> int:
    """Return how much memory a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def too_large(
    step: Step, ops: Sequence[str], dtype: torch.dtype, device: torch.device, weights: Weights
) -> str | None:
    """Say why some ops at a step do not fit in memory, or return None."""
    need = bytes_needed(step, ops, dtype, device, weights.num_drawn)
    there = bytes_there(device)
    if need < FILLED * there:
        return None
    return f"needs about {need / 1e9:.0f} GB of memory, {device} has {there / 1e9:.0f} GB"
