"""A problem: one call of one op on the layer of a case, with what it must give and what it costs.

That is the call itself, its exact result in float64, what plain torch gives in the inputs' own
dtype, and the fewest operations and bytes that the call needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tileops.workloads.accuracy import computing_in
from tileops.workloads.draw import Outputs


@dataclass(frozen=True)
class Problem:
    """One call of one op.

    Attributes:
        op: The operator.
        part: Which of an operator's calls in the layer it is; empty where there is one.
        cls: Class of the op in `tileops.moe`, or what takes its settings and returns the call.
        settings: Its constructor's arguments.
        inputs: The call's arguments.
        exact: Returns the result in float64.
        same_dtype: Returns the result of plain torch in the inputs' dtype.
        flops: Floating-point operations of the matrix products.
        num_bytes: Each input that the result depends on read once, each output written once.
        live: Picks from the outputs what is defined.
        any_order: Brings outputs into one order where a peer's may be in another; None: in none may
            they.
        copies: Whether the outputs must be equal to the exact ones, to the last bit.
        fp8: Whether the matrix products are those of FP8 operands.
    """

    op: str
    cls: Callable[..., Callable[..., Any]]
    settings: dict[str, Any]
    inputs: dict[str, torch.Tensor | None]
    exact: Callable[[], Outputs]
    same_dtype: Callable[[], Outputs]
    flops: float
    num_bytes: float
    part: str = ""
    live: Callable[[Outputs], Outputs] = lambda outputs: outputs
    any_order: Callable[[Outputs], Outputs] | None = None
    copies: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        """The operator and the part."""
        return f"{self.op} {self.part}".rstrip()

    def prepared(self, target: str | None) -> Callable[[], Outputs]:
        """Return a function that runs the op on a target."""
        op = self.cls(**self.settings, target=target)
        return lambda: as_tuple(op(**self.inputs))


def as_tuple(result: Any) -> Outputs:
    """Return an op's result, a tensor or several, as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def size_of(*tensors: torch.Tensor | None) -> int:
    """Return the bytes of some tensors; None has none."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def from_reference(
    problem: Callable[..., Problem], same: torch.dtype | None, **unrounded: Any
) -> Problem:
    """Make a problem whose results are the reference's, computed in float64 and in ``same``.

    ``unrounded`` are settings with which an op does not round its result to the inputs' dtype.
    """

    def computed(dtype: torch.dtype | None, settings: dict[str, Any]) -> Outputs:
        run = replace(made, settings=settings).prepared("reference")
        if dtype is None:
            return run()
        with computing_in(dtype):
            return run()

    made = problem(
        exact=lambda: computed(torch.float64, {**made.settings, **unrounded}),
        same_dtype=lambda: computed(same, made.settings),
    )
    return made
