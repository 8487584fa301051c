"""Moving tokens into an expert layout and back."""

from __future__ import annotations

import torch

from tileops import check, repeat, targets
from tileops.layouts import (
    MaskedLayoutSpec,
    MGroupedLayoutSpec,
    RoutingEpilogueSpec,
    layout_argument,
    parse_layout,
)
from tileops.moe.op import Op
from tileops.overlap import refuse_overlap

torch.library.define(
    "tileops::moe_pre_permute_fwd",
    "(Tensor hidden_states, Tensor local_expert_ids, str layout, int num_local_experts,"
    " str? target) -> (Tensor, Tensor, Tensor)",
)
_POST = (
    "(Tensor expert_output, Tensor topk_weights, Tensor inverse_indices, str layout,"
    " float routed_scaling_factor, {}str? target{}) -> {}"
)
torch.library.define(
    "tileops::moe_post_permute_fwd", _POST.format("ScalarType out_dtype, ", "", "Tensor")
)
torch.library.define(
    "tileops::moe_post_permute_fwd_out", _POST.format("", ", Tensor(a!) out", "()")
)


@torch.library.impl("tileops::moe_pre_permute_fwd", "CompositeExplicitAutograd")
def _moe_pre_permute_fwd(hidden_states, local_expert_ids, layout, num_local_experts, target):
    return targets.run(
        "moe_pre_permute_fwd",
        target,
        hidden_states,
        local_expert_ids,
        parse_layout(layout),
        num_local_experts,
    )


@torch.library.register_fake("tileops::moe_pre_permute_fwd")
def _moe_pre_permute_fwd_fake(hidden_states, local_expert_ids, layout, num_local_experts, target):
    spec = parse_layout(layout)
    routes = local_expert_ids.shape[0] * local_expert_ids.shape[1]
    rows = spec.expert_shape(routes, num_local_experts)
    metadata = spec.metadata_shape(rows[0], num_local_experts)
    return (
        hidden_states.new_empty((*rows, hidden_states.shape[1])),
        local_expert_ids.new_empty(metadata),
        local_expert_ids.new_empty((routes,)),
    )


@torch.library.impl("tileops::moe_post_permute_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _moe_post_permute_fwd(
    expert_output, topk_weights, inverse_indices, layout, scale, out_dtype, target
):
    shape = (topk_weights.shape[0], expert_output.shape[-1])
    out = expert_output.new_empty(shape, dtype=out_dtype)
    args = expert_output, topk_weights, inverse_indices, parse_layout(layout), scale
    targets.run("moe_post_permute_fwd", target, *args, out=out)
    return out


@torch.library.register_fake("tileops::moe_post_permute_fwd")
def _moe_post_permute_fwd_fake(
    expert_output, topk_weights, inverse_indices, layout, scale, out_dtype, target
):
    shape = (topk_weights.shape[0], expert_output.shape[-1])
    return expert_output.new_empty(shape, dtype=out_dtype)


@torch.library.impl("tileops::moe_post_permute_fwd_out", "CompositeExplicitAutograd")
def _moe_post_permute_fwd_out(
    expert_output, topk_weights, inverse_indices, layout, scale, target, out
):
    refuse_overlap(
        "MoEPostPermuteFwdOp",
        "out",
        out,
        expert_output=expert_output,
        topk_weights=topk_weights,
        inverse_indices=inverse_indices,
    )
    args = expert_output, topk_weights, inverse_indices, parse_layout(layout), scale
    targets.run("moe_post_permute_fwd", target, *args, out=out)


@torch.library.register_fake("tileops::moe_post_permute_fwd_out")
def _moe_post_permute_fwd_out_fake(*args):
    return None


class MoEPrePermuteFwdOp(Op):
    """Copy each token to the rows of its experts, in the order an expert GEMM wants.

    Route (t, k), token t's k-th expert, becomes one row. Rows of one expert stand together, experts
    in index order, and routes of one expert in token order, so the outputs are deterministic. A
    route is dropped if its id lies outside [0, num_local_experts), or if its expert's slab is full.
    Every row that no route owns is zero.

    Args:
        layout: How the rows stand, and what the metadata holds: see
            [ContiguousLayoutSpec][tileops.moe.ContiguousLayoutSpec] and
            [MaskedLayoutSpec][tileops.moe.MaskedLayoutSpec].
        num_local_experts: E, the number of experts that the ids index.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `num_local_experts` is below 1, or no target has that name.

    Examples:
        >>> op = MoEPrePermuteFwdOp(ContiguousLayoutSpec.tight_physical_psum(), num_local_experts=3)
        >>> tokens = torch.tensor([[1.0], [2.0]])
        >>> rows, ends, inverse = op(tokens, torch.tensor([[2, 0], [0, 1]], dtype=torch.int32))
        >>> rows.T
        tensor([[1., 2., 2., 1.]])
        >>> ends, inverse
        (tensor([2, 3, 4], dtype=torch.int32), tensor([3, 0, 1, 2], dtype=torch.int32))
    """

    def __init__(
        self, layout: MGroupedLayoutSpec, num_local_experts: int, *, target: str | None = None
    ) -> None:
        self.layout = layout_argument("MoEPrePermuteFwdOp", layout)
        self._layout = repr(layout)  # here, since tracing cannot format an int it holds symbolic
        check.integer("MoEPrePermuteFwdOp", "num_local_experts", num_local_experts, low=1)
        self.num_local_experts = num_local_experts
        self.target = targets.target_argument("MoEPrePermuteFwdOp", target)

    def forward(
        self, hidden_states: torch.Tensor, local_expert_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Permute one batch of tokens.

        Args:
            hidden_states: `[T, H]` tokens; float32, bfloat16 or float16.
            local_expert_ids: `[T, K]` int32, the expert of each route.

        Returns:
            `expert_input` `[T * K, H]`, `[C, H]` or `[E, max_m, H]` in the tokens' dtype;
            `layout_metadata` int32, as the layout says; and `inverse_indices` `[T * K]` int32,
            where entry `t * K + k` is the row of route (t, k), `e * max_m + i` in a slab, or -1
            where the route was dropped.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("MoEPrePermuteFwdOp")
        checker.tensor("hidden_states", hidden_states, ("T", "H"), check.FLOATS)
        checker.tensor("local_expert_ids", local_expert_ids, ("T", "K"), check.INT32)
        return torch.ops.tileops.moe_pre_permute_fwd.default(
            hidden_states, local_expert_ids, self._layout, self.num_local_experts, self.target
        )


class MoEPostPermuteFwdOp(Op):
    r"""Gather the rows of each token's routes and add them up with their weights.

    Token t gets $s \sum_k w_{t,k} \, y_{r(t,k)}$, with $r$ the row of a route and $s$ the factor of
    the epilogue. The sum is float32 in the order of k and rounded once, so the same call gives the
    same bits. A dropped route (index -1) adds exactly nothing, and no row is read for it.

    Args:
        layout: How the rows of `expert_output` stand.
        epilogue: What is applied to the sum; None is `RoutingEpilogueSpec()`, a factor of 1.
        out_dtype: dtype of the result: float32, bfloat16 or float16; None keeps `expert_output`'s.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `out_dtype` is another dtype, or no target has that name.

    Examples:
        >>> op = MoEPostPermuteFwdOp(ContiguousLayoutSpec.tight_physical_psum())
        >>> rows = torch.tensor([[1.0], [2.0], [4.0]])
        >>> weights = torch.tensor([[0.5, 0.25], [1.0, 1.0]])
        >>> op(rows, weights, torch.tensor([2, 0, 1, -1], dtype=torch.int32)).T
        tensor([[2.2500, 2.0000]])
    """

    def __init__(
        self,
        layout: MGroupedLayoutSpec,
        epilogue: RoutingEpilogueSpec | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        target: str | None = None,
    ) -> None:
        self.layout = layout_argument("MoEPostPermuteFwdOp", layout)
        self._layout = repr(layout)  # here, since tracing cannot format an int it holds symbolic
        if epilogue is not None and not isinstance(epilogue, RoutingEpilogueSpec):
            raise TypeError(
                f"MoEPostPermuteFwdOp: epilogue must be a RoutingEpilogueSpec or None, "
                f"got {epilogue!r}"
            )
        check.choice("MoEPostPermuteFwdOp", "out_dtype", out_dtype, (None, *check.FLOATS))
        self.epilogue = epilogue
        self.out_dtype = out_dtype
        self.target = targets.target_argument("MoEPostPermuteFwdOp", target)

    def forward(
        self,
        expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        inverse_indices: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Combine one batch of expert rows.

        Args:
            expert_output: `[M, H]`, or `[E, max_m, H]` in the masked layout; float32, bfloat16 or
                float16.
            topk_weights: `[T, K]` float32 routing weights.
            inverse_indices: `[T * K]` int32, the row of each route or -1.
            out: `[T, H]` buffer of the result's dtype to write into. It must not overlap an input.

        Returns:
            `[T, H]`; `out` itself where it was given.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or `out` overlaps
                an input.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("MoEPostPermuteFwdOp")
        if isinstance(self.layout, MaskedLayoutSpec):
            checker.dims["max_m"] = self.layout.max_m
            rows = ("E", "max_m", "H")
        else:
            rows = ("M", "H")
        checker.tensor("expert_output", expert_output, rows, check.FLOATS)
        checker.tensor("topk_weights", topk_weights, ("T", "K"), check.FLOAT32)
        checker.dims["T*K"] = topk_weights.shape[0] * topk_weights.shape[1]
        checker.tensor("inverse_indices", inverse_indices, ("T*K",), check.INT32)
        scale = 1.0 if self.epilogue is None else float(self.epilogue.routed_scaling_factor)
        dtype = self.out_dtype or expert_output.dtype
        args = expert_output, topk_weights, inverse_indices, self._layout, scale
        if out is None:
            return torch.ops.tileops.moe_post_permute_fwd.default(*args, dtype, self.target)
        checker.output("out", out, ("T", "H"), (dtype,))
        torch.ops.tileops.moe_post_permute_fwd_out.default(*args, self.target, out)
        return out
