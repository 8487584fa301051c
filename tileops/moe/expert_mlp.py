"""The expert MLP on grouped rows: gate/up GEMM with its activation, then the down GEMM."""

from __future__ import annotations

import torch

from tileops import check, targets
from tileops.layouts import MGroupedLayoutSpec, layout_argument
from tileops.moe.grouped_gemm import ACTIVATIONS, check_metadata, check_rows
from tileops.moe.op import Op
from tileops.overlap import refuse_overlap


def check_expert_weights(
    checker: check.Checker,
    dtype: torch.dtype,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
) -> None:
    """Check the weights and biases of gated experts against what the checker knows of E and H."""
    checker.tensor("w_gate_up", w_gate_up, ("E", "2F", "H"), (dtype,))
    checker.tensor("w_down", w_down, ("E", "H", "F"), (dtype,))
    if b_gate_up is not None:
        checker.tensor("b_gate_up", b_gate_up, ("E", "2F"), (dtype,))
    if b_down is not None:
        checker.tensor("b_down", b_down, ("E", "H"), (dtype,))


class MoEExpertMLPFwdOp(Op):
    """Two grouped GEMMs on one layout, the gated activation inside the first.

    `out = act(x @ w_gate_up[e].T + b_gate_up[e]) @ w_down[e].T + b_down[e]` on the rows of each
    expert e. Both products accumulate in float32; the activated rows are rounded to the operands'
    dtype between them. A composite of two `tileops::moe_grouped_gemm_fwd`.

    Args:
        layout: How the rows are grouped by expert; shared by both GEMMs.
        activation: As [MoEGroupedGemmFwdOp][tileops.moe.MoEGroupedGemmFwdOp] defines them.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the activation is none of the three, or no target has that name.

    Examples:
        >>> op = MoEExpertMLPFwdOp(ContiguousLayoutSpec.tight_physical_psum())
        >>> x, w_gate_up, w_down = torch.ones(3, 4), torch.ones(2, 16, 4), torch.ones(2, 4, 8)
        >>> op(x, w_gate_up, w_down, torch.tensor([1, 3], dtype=torch.int32)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        layout: MGroupedLayoutSpec,
        activation: str = "silu_and_mul",
        *,
        target: str | None = None,
    ) -> None:
        self.layout = layout_argument("MoEExpertMLPFwdOp", layout)
        self._layout = repr(layout)  # here, since tracing cannot format an int it holds symbolic
        check.choice("MoEExpertMLPFwdOp", "activation", activation, ACTIVATIONS)
        self.activation = activation
        self.target = targets.target_argument("MoEExpertMLPFwdOp", target)

    def forward(
        self,
        expert_input: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        layout_metadata: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        b_gate_up: torch.Tensor | None = None,
        b_down: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the gate/up GEMM with its activation, then the down GEMM.

        Args:
            expert_input: `[M, H]` or `[E, max_m, H]`; float32 (not on `cuda`), bfloat16 or float16.
            w_gate_up: `[E, 2F, H]`, its rows ordered as the activation reads them.
            w_down: `[E, H, F]`.
            layout_metadata: int32, as the layout says. Its values are not checked.
            out: Buffer shaped as `expert_input` to write into. It must not overlap `w_down`,
                `layout_metadata` or `b_down`.
            b_gate_up: `[E, 2F]`, added before the activation.
            b_down: `[E, H]`, added before the cast.

        Returns:
            A tensor shaped as `expert_input`, in its dtype; `out` itself where it was given. Rows
            that belong to no expert are unspecified.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or `out`
                overlaps; as NoKernelError if the target cannot serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("MoEExpertMLPFwdOp")
        lead = check_rows(checker, "expert_input", expert_input, "H", self.layout)
        dtype = expert_input.dtype
        check_expert_weights(checker, dtype, w_gate_up, w_down, b_gate_up, b_down)
        check_metadata(checker, layout_metadata, self.layout)
        layout, gemm = self._layout, torch.ops.tileops.moe_grouped_gemm_fwd
        if out is not None:
            checker.output("out", out, (*lead, "H"), (dtype,))
            # before the first GEMM, and in this op's names
            read = {"w_down": w_down, "layout_metadata": layout_metadata, "b_down": b_down}
            refuse_overlap("MoEExpertMLPFwdOp", "out", out, **read)
        act = gemm.default(
            expert_input,
            w_gate_up,
            layout_metadata,
            b_gate_up,
            layout,
            self.activation,
            dtype,
            self.target,
        )
        down = act, w_down, layout_metadata, b_down, layout, None
        if out is None:
            return gemm.default(*down, dtype, self.target)
        torch.ops.tileops.moe_grouped_gemm_fwd_out.default(*down, self.target, out)
        return out
