"""One GEMM per expert over rows grouped by expert, bias and gated activation in its epilogue."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tileops import check, repeat, targets
from tileops.layouts import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MGroupedLayoutSpec,
    layout_argument,
    parse_layout,
)
from tileops.moe.op import Op
from tileops.overlap import refuse_overlap


@dataclass(frozen=True)
class Activation:
    """What a grouped GEMM applies to its products; kernels get it in the place of a name.

    Attributes:
        name: ``"silu_and_mul"``, ``"gelu_and_mul"`` (erf) and ``"swiglu"`` gate one product with
            another; ``"relu"``, ``"gelu_tanh"`` and ``"silu"`` take one.
        alpha: Of ``"swiglu"`` only, as the next two: ``g * sigmoid(alpha * g) * (u + beta)`` with
            ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``, NaN kept.
        beta: Added to the clamped up value.
        limit: Bound of the clamps, not negative; infinity turns them off.
    """

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


ACTIVATIONS = {
    "silu_and_mul": Activation("silu_and_mul"),
    "gelu_and_mul": Activation("gelu_and_mul"),
    "swigluoai": Activation("swiglu", alpha=1.702, beta=1.0, limit=7.0),
}
"""The public names of the gated activations."""


def gate_and_up(
    rows: torch.Tensor | None, activation: str | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """View ``[E, 2F, ...]`` weights or biases as gate rows and up rows, as the activation reads."""
    if rows is None or activation is None:
        return rows, None
    if activation == "swigluoai":
        return rows[:, 0::2], rows[:, 1::2]
    return rows.chunk(2, dim=1)  # type: ignore[return-value]


_SCHEMA = (
    "(Tensor a, Tensor b, Tensor layout_metadata, Tensor? bias, str layout, str? activation,"
    " {}str? target{}) -> {}"
)
torch.library.define(
    "tileops::moe_grouped_gemm_fwd", _SCHEMA.format("ScalarType out_dtype, ", "", "Tensor")
)
torch.library.define(
    "tileops::moe_grouped_gemm_fwd_out", _SCHEMA.format("", ", Tensor(a!) out", "()")
)


def _new_output(a: torch.Tensor, b: torch.Tensor, activation: str | None, dtype: torch.dtype):
    width = b.shape[1] if activation is None else b.shape[1] // 2
    return a.new_empty((*a.shape[:-1], width), dtype=dtype)


def run_grouped_gemm(a, b, metadata, bias, layout, activation, target, out) -> None:
    """Run the target's kernel, which gets the gate rows and the up rows (or None) as two views."""
    gate, up = gate_and_up(b, activation)
    gate_bias, up_bias = gate_and_up(bias, activation)
    args = a, gate, up, metadata, gate_bias, up_bias, layout, ACTIVATIONS.get(activation)
    targets.run("moe_grouped_gemm_fwd", target, *args, out=out)


@torch.library.impl("tileops::moe_grouped_gemm_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _moe_grouped_gemm_fwd(a, b, metadata, bias, layout, activation, out_dtype, target):
    out = _new_output(a, b, activation, out_dtype)
    run_grouped_gemm(a, b, metadata, bias, parse_layout(layout), activation, target, out)
    return out


@torch.library.register_fake("tileops::moe_grouped_gemm_fwd")
def _moe_grouped_gemm_fwd_fake(a, b, metadata, bias, layout, activation, out_dtype, target):
    return _new_output(a, b, activation, out_dtype)


@torch.library.impl("tileops::moe_grouped_gemm_fwd_out", "CompositeExplicitAutograd")
def _moe_grouped_gemm_fwd_out(a, b, metadata, bias, layout, activation, target, out):
    refuse_overlap("MoEGroupedGemmFwdOp", "out", out, a=a, b=b, layout_metadata=metadata, bias=bias)
    run_grouped_gemm(a, b, metadata, bias, parse_layout(layout), activation, target, out)


@torch.library.register_fake("tileops::moe_grouped_gemm_fwd_out")
def _moe_grouped_gemm_fwd_out_fake(*args):
    return None


def check_rows(
    checker: check.Checker,
    name: str,
    rows: torch.Tensor,
    width: str,
    layout: MGroupedLayoutSpec,
    dtypes: tuple[torch.dtype, ...] = check.FLOATS,
) -> tuple[str, ...]:
    """Check a matrix or slab of expert rows; return the letters of its leading dimensions."""
    if isinstance(layout, MaskedLayoutSpec):
        checker.dims["max_m"] = layout.max_m
        lead: tuple[str, ...] = ("E", "max_m")
    else:
        lead = ("M",)
    checker.tensor(name, rows, (*lead, width), dtypes)
    return lead


def check_metadata(
    checker: check.Checker, metadata: torch.Tensor, layout: MGroupedLayoutSpec
) -> None:
    """Check ``layout_metadata`` once the checker knows M and E."""
    per_row = isinstance(layout, ContiguousLayoutSpec) and layout.metadata == "per_row"
    checker.tensor("layout_metadata", metadata, ("M" if per_row else "E",), check.INT32)


class MoEGroupedGemmFwdOp(Op):
    r"""Multiply the rows of each expert by that expert's matrix.

    `out[rows of e] = act(a[rows of e] @ b[e].T + bias[e])`, accumulated in float32 and rounded
    once. The layout says which rows an expert has. Rows that belong to no expert (padding, labels
    outside [0, E), slab rows past the count) are unspecified in `out`.

    With an activation, `b` holds gate and up rows and `out` is half as wide; the wide intermediate
    never exists:

    | activation | order of the 2F rows of `b` | result |
    | --- | --- | --- |
    | `"silu_and_mul"` | F gate rows, then F up rows | `silu(gate) * up` |
    | `"gelu_and_mul"` | F gate rows, then F up rows | `gelu(gate) * up`, the exact (erf) GELU |
    | `"swigluoai"` | row 2j gate j, row 2j + 1 up j | `g * sigmoid(1.702 * g) * (u + 1)` |

    where `g = min(gate, 7)` and `u = clamp(up, -7, 7)`.

    Args:
        layout: How the rows of `a` are grouped by expert.
        activation: None for a plain GEMM, or one of the table.
        out_dtype: None writes the operands' dtype, `torch.float32` keeps the accumulator.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no target has that name.

    Examples:
        >>> op = MoEGroupedGemmFwdOp(ContiguousLayoutSpec.tight_physical_psum())
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> b = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> op(a, b, torch.tensor([1, 2], dtype=torch.int32)).T
        tensor([[1., 4.]])
    """

    def __init__(
        self,
        layout: MGroupedLayoutSpec,
        *,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
        target: str | None = None,
    ) -> None:
        self.layout = layout_argument("MoEGroupedGemmFwdOp", layout)
        self._layout = repr(layout)  # here, since tracing cannot format an int it holds symbolic
        check.choice("MoEGroupedGemmFwdOp", "activation", activation, (None, *ACTIVATIONS))
        check.choice("MoEGroupedGemmFwdOp", "out_dtype", out_dtype, (None, torch.float32))
        self.activation = activation
        self.out_dtype = out_dtype
        self.target = targets.target_argument("MoEGroupedGemmFwdOp", target)

    def forward(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        layout_metadata: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one GEMM per expert.

        Args:
            a: Expert rows, `[M, K]` or `[E, max_m, K]`; float32 (not on `cuda`, where it would run
                as TF32), bfloat16 or float16.
            b: `[E, N, K]` weights in `a`'s dtype, N = 2F with an activation.
            layout_metadata: int32, as the layout says. Its values are not checked.
            out: Buffer to write into, shaped and typed as the result. It must not overlap an input.
            bias: `[E, N]` in `b`'s dtype and row order, added to the float32 product.

        Returns:
            `[M, N]` or `[E, max_m, N]`, with F in the place of N under an activation; `out` itself
            where it was given.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or `out` overlaps
                an input; as NoKernelError if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("MoEGroupedGemmFwdOp")
        lead = check_rows(checker, "a", a, "K", self.layout)
        wide, narrow = ("N", "N") if self.activation is None else ("2F", "F")
        checker.tensor("b", b, ("E", wide, "K"), (a.dtype,))
        check_metadata(checker, layout_metadata, self.layout)
        if bias is not None:
            checker.tensor("bias", bias, ("E", wide), (a.dtype,))
        dtype = self.out_dtype or a.dtype
        args = a, b, layout_metadata, bias, self._layout, self.activation
        if out is None:
            return torch.ops.tileops.moe_grouped_gemm_fwd.default(*args, dtype, self.target)
        checker.output("out", out, (*lead, narrow), (dtype,))
        torch.ops.tileops.moe_grouped_gemm_fwd_out.default(*args, self.target, out)
        return out
