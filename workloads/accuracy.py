"""How far a result may be from the exact one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
"""One rounding of an output, relative, by its dtype."""


_computing_in: ContextVar[torch.dtype | None] = ContextVar("computing_in", default=None)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Have the references compute in ``dtype``: in float64 for the exact result."""
    token = _computing_in.set(dtype)
    try:
        yield
    finally:
        _computing_in.reset(token)


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a computation: ``dtype``, unless `computing_in` says otherwise."""
    return _computing_in.get() or dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the references compute on inputs of ``dtype``."""
    return precision(torch.float64 if dtype == torch.float32 else torch.float32)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ``norm(out - exact) / norm(exact)`` in float64; NaN where they disagree on NaN.

    An all-zero ``exact`` must be met exactly: the error is then 0 or infinite.
    """
    out, exact = out.double(), exact.double()
    if out.shape != exact.shape or not torch.equal(out.isnan(), exact.isnan()):
        return float("nan")
    finite = exact.isfinite()
    if not torch.equal(out[~finite].nan_to_num(), exact[~finite].nan_to_num()):
        return float("inf")
    difference = torch.linalg.vector_norm((out - exact)[finite]).item()
    norm = torch.linalg.vector_norm(exact[finite]).item()
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def worst_row_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest `relative_error` of a row: a wrong row does not hide among right ones.

    A NaN anywhere gives NaN, and an all-zero row must be met exactly.
    """
    if out.shape != exact.shape:
        return float("nan")
    if out.numel() == 0:
        return 0.0
    out, exact = out.flatten(0, -2).double(), exact.flatten(0, -2).double()
    error = torch.linalg.vector_norm(out - exact, dim=-1)
    ratio = error / torch.linalg.vector_norm(exact, dim=-1)
    return torch.where(error == 0, 0.0, ratio).max().item()


def bound(
    same_dtype: torch.Tensor,
    exact: torch.Tensor,
    error: Callable[[torch.Tensor, torch.Tensor], float] = relative_error,
) -> float:
    """Return the error an op may have: twice that of torch in the same dtype, and one rounding.

    Args:
        same_dtype: What plain torch operations in the inputs' dtype give.
        exact: The float64 result.
        error: How errors are measured.
    """
    return 2 * error(same_dtype, exact) + ROUNDING[same_dtype.dtype]
