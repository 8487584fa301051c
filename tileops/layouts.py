"""How the rows of an expert GEMM are laid out by expert, and what follows the combine.

A layout says where the rows of each expert stand and what the ``layout_metadata`` tensor holds:

| spec | rows of ``a`` | ``layout_metadata`` (int32) |
| --- | --- | --- |
| ``ContiguousLayoutSpec.tight_physical_psum()`` | ``T * K`` | ``[E]`` end of each expert |
| ``ContiguousLayoutSpec.aligned_physical_psum(n)`` | capacity ``C`` | ``[E]`` padded ends |
| ``ContiguousLayoutSpec.tight_per_row()`` | ``T * K`` | ``[T * K]`` expert of each row |
| ``ContiguousLayoutSpec.aligned_per_row(n)`` | capacity ``C`` | ``[C]`` expert of each row |
| ``MaskedLayoutSpec(max_m)`` | ``[E, max_m]`` slab | ``[E]`` valid rows of each expert |

``C = T * K + E * (n - 1)`` rounded up to a multiple of ``n``, the alignment: an upper bound that
the host knows, so nothing waits for the device. Segments stand in expert order and, inside a
segment, routes keep token order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tileops import check


class _Layout:
    """What both kinds of layout share."""

    def expert_shape(self, num_routes: int, num_experts: int) -> tuple[int, ...]:
        """Return the leading shape of ``expert_input``."""
        raise NotImplementedError

    def too_large(self, num_routes: int, num_experts: int) -> str | None:
        """Say why the rows cannot be numbered in int32, or return None."""
        rows = math.prod(self.expert_shape(num_routes, num_experts))
        return f"takes fewer than 2**31 rows, got {rows} of {self!r}" if rows >= 2**31 else None


@dataclass(frozen=True, repr=False)
class ContiguousLayoutSpec(_Layout):
    """Rows of all experts in one matrix, a segment an expert. Build it with one of the presets.

    Attributes:
        metadata: ``"physical_psum"`` (end row of each expert) or ``"per_row"`` (expert of each
            row).
        alignment: Each segment is padded to a multiple of this many rows; 1 is the tight layout.

    Raises:
        TypeError: If ``alignment`` is not an int.
        ValueError: If ``alignment`` is below 1 or ``metadata`` has another value.
    """

    metadata: Literal["physical_psum", "per_row"]
    alignment: int = 1

    def __post_init__(self) -> None:
        check.choice(
            "ContiguousLayoutSpec", "metadata", self.metadata, ("physical_psum", "per_row")
        )
        check.integer("ContiguousLayoutSpec", "alignment", self.alignment, low=1)

    @classmethod
    def tight_physical_psum(cls) -> ContiguousLayoutSpec:
        """Segments without padding; the metadata is the inclusive running sum of the counts."""
        return cls("physical_psum")

    @classmethod
    def aligned_physical_psum(cls, alignment: int) -> ContiguousLayoutSpec:
        """Segments padded to multiples of ``alignment``; the metadata holds their padded ends."""
        return cls("physical_psum", alignment)

    @classmethod
    def tight_per_row(cls) -> ContiguousLayoutSpec:
        """Segments without padding; the metadata names the expert of each row."""
        return cls("per_row")

    @classmethod
    def aligned_per_row(cls, alignment: int) -> ContiguousLayoutSpec:
        """Segments padded to multiples of ``alignment``; padding rows carry their expert's id."""
        return cls("per_row", alignment)

    def __repr__(self) -> str:
        if self.alignment == 1:
            return f"ContiguousLayoutSpec.tight_{self.metadata}()"
        return f"ContiguousLayoutSpec.aligned_{self.metadata}({self.alignment})"

    def expert_shape(self, num_routes: int, num_experts: int) -> tuple[int, ...]:
        """Return the leading shape of ``expert_input``: one row a route, plus room for padding."""
        rows = num_routes + num_experts * (self.alignment - 1)
        return ((rows + self.alignment - 1) // self.alignment * self.alignment,)

    def metadata_shape(self, num_rows: int, num_experts: int) -> tuple[int, ...]:
        """Return the shape of ``layout_metadata`` for a matrix of ``num_rows`` rows."""
        return (num_experts,) if self.metadata == "physical_psum" else (num_rows,)


@dataclass(frozen=True)
class MaskedLayoutSpec(_Layout):
    """A slab of ``max_m`` rows an expert; the metadata counts the valid rows of each.

    Attributes:
        max_m: Capacity of an expert. Routes past it are dropped.

    Raises:
        TypeError: If ``max_m`` is not an int.
        ValueError: If ``max_m`` is below 1.
    """

    max_m: int

    def __post_init__(self) -> None:
        check.integer("MaskedLayoutSpec", "max_m", self.max_m, low=1)

    def expert_shape(self, num_routes: int, num_experts: int) -> tuple[int, ...]:
        """Return the leading shape of ``expert_input``: ``(num_experts, max_m)``."""
        return (num_experts, self.max_m)

    def metadata_shape(self, num_rows: int, num_experts: int) -> tuple[int, ...]:
        """Return the shape of ``layout_metadata``: one count an expert."""
        return (num_experts,)


MGroupedLayoutSpec = ContiguousLayoutSpec | MaskedLayoutSpec
"""Any layout whose rows are grouped by expert."""


@dataclass(frozen=True)
class RoutingEpilogueSpec:
    """What [MoEPostPermuteFwdOp][tileops.moe.MoEPostPermuteFwdOp] applies while it combines.

    Attributes:
        routed_scaling_factor: Multiplier on the weighted sum.

    Raises:
        TypeError: If the factor is not a number.
        ValueError: If the factor is not finite and positive.
    """

    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        check.factor("RoutingEpilogueSpec", "routed_scaling_factor", self.routed_scaling_factor)


_CONTIGUOUS = re.compile(r"ContiguousLayoutSpec\.(tight|aligned)_(physical_psum|per_row)\((\d*)\)")
_MASKED = re.compile(r"MaskedLayoutSpec\(max_m=(\d+)\)")


@lru_cache(maxsize=1024)
def parse_layout(text: str) -> MGroupedLayoutSpec:
    """Read back the ``repr`` of a layout, the form in which operator schemas carry it."""
    if match := _CONTIGUOUS.fullmatch(text):
        return ContiguousLayoutSpec(match[2], int(match[3] or 1))  # type: ignore[arg-type]
    if match := _MASKED.fullmatch(text):
        return MaskedLayoutSpec(int(match[1]))
    raise ValueError(f"layout must be the repr of a layout spec, got {text!r}")


def layout_argument(op: str, layout: object) -> MGroupedLayoutSpec:
    """Return ``layout`` if it is a layout spec; raise a TypeError that names ``op`` otherwise."""
    if isinstance(layout, ContiguousLayoutSpec | MaskedLayoutSpec):
        return layout
    raise TypeError(
        f"{op}: layout must be a ContiguousLayoutSpec or a MaskedLayoutSpec, got {layout!r}"
    )
