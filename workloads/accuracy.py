"""How far a result may be from the exact one."""

from __future__ import annotations

import torch

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
"""One rounding of an output, relative, by its dtype."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the references compute on inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float32 else torch.float32


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


def bound(same_dtype: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error an op may have: twice that of torch in the same dtype, and one rounding.

    Args:
        same_dtype: What plain torch operations in the inputs' dtype give.
        exact: The float64 result.
    """
    return 2 * relative_error(same_dtype, exact) + ROUNDING[same_dtype.dtype]
