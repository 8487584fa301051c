"""One GEMM per expert with FP8 operands and a scale for every block of them."""

from __future__ import annotations

import torch

from tileops import check, repeat, targets
from tileops.layouts import MGroupedLayoutSpec, layout_argument, parse_layout
from tileops.moe.grouped_gemm import ACTIVATIONS, check_metadata, check_rows, gate_and_up
from tileops.moe.op import Op
from tileops.overlap import refuse_overlap

_SCHEMA = (
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor layout_metadata, str layout,"
    " str? target{}) -> {}"
)
torch.library.define("tileops::moe_grouped_gemm_fp8_fwd", _SCHEMA.format("", "Tensor"))
torch.library.define(
    "tileops::moe_grouped_gemm_fp8_fwd_out", _SCHEMA.format(", Tensor(a!) out", "()")
)


def gate_and_up_scales(
    scales: torch.Tensor, activation: str | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """View the scales of ``[E, 2F, K]`` weights as those of gate rows and of up rows.

    Of stacked halves each gets its half. Interleaved rows share blocks: both get all of them.
    """
    if activation == "swigluoai":
        return scales, scales
    return gate_and_up(scales, activation)  # type: ignore[return-value]


def run_grouped_gemm_fp8(
    a, a_scale, b, b_scale, metadata, bias, layout, activation, target, out
) -> None:
    """Run the target's kernel, which gets gate rows and up rows (or None) as two views."""
    gate, up = gate_and_up(b, activation)
    gate_bias, up_bias = gate_and_up(bias, activation)
    gate_scale, up_scale = gate_and_up_scales(b_scale, activation)
    args = a, a_scale, gate, gate_scale, up, up_scale, metadata, gate_bias, up_bias, layout
    targets.run("moe_grouped_gemm_fp8_fwd", target, *args, ACTIVATIONS.get(activation), out=out)


def _new_output(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    shape = (*a.shape[:-1], b.shape[1])
    return torch.empty(shape, dtype=torch.bfloat16, device=a.device)


@torch.library.impl("tileops::moe_grouped_gemm_fp8_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _moe_grouped_gemm_fp8_fwd(a, a_scale, b, b_scale, metadata, layout, target):
    out = _new_output(a, b)
    spec = parse_layout(layout)
    run_grouped_gemm_fp8(a, a_scale, b, b_scale, metadata, None, spec, None, target, out)
    return out


@torch.library.register_fake("tileops::moe_grouped_gemm_fp8_fwd")
def _moe_grouped_gemm_fp8_fwd_fake(a, a_scale, b, b_scale, metadata, layout, target):
    return _new_output(a, b)


@torch.library.impl("tileops::moe_grouped_gemm_fp8_fwd_out", "CompositeExplicitAutograd")
def _moe_grouped_gemm_fp8_fwd_out(a, a_scale, b, b_scale, metadata, layout, target, out):
    read = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "layout_metadata": metadata}
    refuse_overlap("MoEGroupedGemmFP8FwdOp", "out", out, **read)
    spec = parse_layout(layout)
    run_grouped_gemm_fp8(a, a_scale, b, b_scale, metadata, None, spec, None, target, out)


@torch.library.register_fake("tileops::moe_grouped_gemm_fp8_fwd_out")
def _moe_grouped_gemm_fp8_fwd_out_fake(*args):
    return None


class MoEGroupedGemmFP8FwdOp(Op):
    """Multiply the FP8 rows of each expert by that expert's FP8 matrix.

    `out[rows of e] = (a * a_scale)[rows of e] @ (b * b_scale)[e].T`. Each row of `a` has a scale
    for 128 columns, each matrix of `b` one for 128 x 128 values. The products of a 128-wide block
    of K are added up without their scales, that sum is multiplied by the product of the two scales,
    and these are added in float32 in the order of the blocks, as DeepGEMM does; the result is
    rounded once. Rows that belong to no expert (padding, labels outside [0, E), slab rows past the
    count) are unspecified in `out`. Counts of a slab are taken as in [0, max_m].

    Args:
        layout: How the rows of `a` are grouped by expert.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If no target has that name.

    Examples:
        >>> op = MoEGroupedGemmFP8FwdOp(MaskedLayoutSpec(max_m=2))
        >>> a, a_scale = quantize_fp8_rowwise(torch.ones(3, 2, 128))
        >>> b, b_scale = quantize_fp8_blockwise(torch.ones(3, 256, 128))
        >>> op(a, a_scale, b, b_scale, torch.tensor([2, 0, 1], dtype=torch.int32)).shape
        torch.Size([3, 2, 256])
    """

    def __init__(self, layout: MGroupedLayoutSpec, *, target: str | None = None) -> None:
        self.layout = layout_argument("MoEGroupedGemmFP8FwdOp", layout)
        self._layout = repr(layout)  # here, since tracing cannot format an int it holds symbolic
        self.target = targets.target_argument("MoEGroupedGemmFP8FwdOp", target)

    def forward(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        layout_metadata: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one GEMM per expert.

        Args:
            a: Expert rows, `[M, K]` or `[E, max_m, K]` float8_e4m3fn.
            a_scale: `[M, K/128]` or `[E, max_m, K/128]` float32, of any strides.
            b: `[E, N, K]` float8_e4m3fn weights; N and K are multiples of 128.
            b_scale: `[E, N/128, K/128]` float32, of any strides.
            layout_metadata: int32, as the layout says. Its values are not checked.
            out: bfloat16 buffer to write into, shaped as the result. It must not overlap an input.

        Returns:
            `[M, N]` or `[E, max_m, N]` bfloat16; `out` itself where it was given.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or `out` overlaps
                an input; as NoKernelError if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("MoEGroupedGemmFP8FwdOp")
        lead = check_rows(checker, "a", a, "K", self.layout, check.FP8)
        checker.in_blocks("a", a, "K")
        check_scale(checker, "a_scale", a_scale, (*lead, "K/128"))
        checker.tensor("b", b, ("E", "N", "K"), check.FP8)
        checker.in_blocks("b", b, "N")
        check_scale(checker, "b_scale", b_scale, ("E", "N/128", "K/128"))
        check_metadata(checker, layout_metadata, self.layout)
        args = a, a_scale, b, b_scale, layout_metadata, self._layout
        if out is None:
            return torch.ops.tileops.moe_grouped_gemm_fp8_fwd.default(*args, self.target)
        checker.output("out", out, (*lead, "N"), (torch.bfloat16,))
        torch.ops.tileops.moe_grouped_gemm_fp8_fwd_out.default(*args, self.target, out)
        return out


def check_scale(
    checker: check.Checker, name: str, scale: torch.Tensor, shape: tuple[str, ...]
) -> None:
    """Check the scales of blocks, which may have any strides."""
    checker.tensor(name, scale, shape, check.FLOAT32, any_stride=True)
