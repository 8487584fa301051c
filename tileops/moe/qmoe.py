"""ONNX Runtime's QMoE operator: the MoE operator with weights of 4 or 8 bits."""

from __future__ import annotations

import math

import torch

from tileops import check, compilation, repeat, targets
from tileops.moe.grouped_gemm import Activation
from tileops.moe.onnx_checks import check_activation, check_input, check_k, check_quantized
from tileops.moe.onnx_stages import STAGES, plain_activation, route, run_experts
from tileops.moe.op import Op

BLOCK_SIZES = (32, 64, 128)

torch.library.define(
    "tileops::qmoe_fwd",
    "(Tensor input, Tensor router_probs, Tensor fc1, Tensor fc1_scales, Tensor? fc1_bias,"
    " Tensor fc2, Tensor fc2_scales, Tensor? fc2_bias, Tensor? fc1_zero_points,"
    " Tensor? fc2_zero_points, Tensor? router_weights, int bits, int block_size, int k,"
    " str activation_type, bool normalize_routing_weights, int swiglu_fusion, float swiglu_limit,"
    " float activation_alpha, float activation_beta, bool use_sparse_mixer, str? target) -> Tensor",
)


@torch.library.impl("tileops::qmoe_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _qmoe_fwd(*args):
    *args, target = args
    out = args[0].new_empty(args[0].shape)
    targets.run("qmoe_fwd", target, *args, out=out)
    return out


@torch.library.register_fake("tileops::qmoe_fwd")
def _qmoe_fwd_fake(input, *args):
    return input.new_empty(input.shape)


def gathered(router_weights: torch.Tensor, ids: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Return the float32 weights of routes that are given for all experts."""
    if compilation.collected_arch() is not None:  # ids have no values then
        return ids.new_empty(ids.shape, dtype=torch.float32)
    weights = router_weights.gather(1, ids.long()).float()
    if not normalize:
        return weights
    total = weights.sum(1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / total)


def _staged(
    x,
    router_probs,
    fc1,
    fc1_scales,
    fc1_bias,
    fc2,
    fc2_scales,
    fc2_bias,
    fc1_zero_points,
    fc2_zero_points,
    router_weights,
    bits,
    block_size,
    k,
    activation_type,
    *settings,
    target,
    out,
):
    normalize, fusion, limit, alpha, beta, use_sparse_mixer = settings
    weights, ids = route(router_probs, k, normalize, use_sparse_mixer, target)
    if router_weights is not None:
        weights = gathered(router_weights, ids, normalize)

    def gemm(rows, b, scales, zero_points, ends, bias, order, activation, result):
        args = rows, b, scales, zero_points, ends, bias, order, activation, bits, block_size
        targets.run("moe_grouped_gemm_int_fwd", target, *args, out=result)

    def first(rows, ends, result):
        order = ("plain", "interleaved", "halves")[fusion]
        swiglu = Activation("swiglu", alpha, beta, limit)
        activation = swiglu if fusion else plain_activation(activation_type)
        args = fc1, fc1_scales, fc1_zero_points, ends, fc1_bias, order, activation
        gemm(rows, *args, result)

    def second(rows, ends, result):
        gemm(rows, fc2, fc2_scales, fc2_zero_points, ends, fc2_bias, "plain", None, result)

    sizes = fc2.shape[0], fc2.shape[2] * 8 // bits
    run_experts(x, weights, ids, sizes, first, second, target, out)


targets.register_staged("qmoe_fwd", _staged, (*STAGES, "moe_grouped_gemm_int_fwd"))


class QMoEFwdOp(Op):
    r"""The `QMoE` operator of ONNX Runtime's `com.microsoft` domain, for integer weights.

    [`MoEFwdOp`][tileops.moe.MoEFwdOp] with weights that are integers of 4 or 8 bits: routing,
    activations and combine are the same, without the forms that have an FC3. They stay packed in
    memory, and are dequantised where a GEMM loads them.

    A weight is $(q - z) \, s$, for an unsigned code $q$, a zero point $z$, and a scale $s$ for each
    row or for each `block_size` columns of a row (the last block may be shorter). Without zero
    points $z$ is 8 for 4 bits and 128 for 8 bits. As in ONNX Runtime's kernel for CPUs, weights are
    not rounded to the input's dtype: `cpu` multiplies by float32 weights, `cuda` multiplies by
    $q - z$, exactly, and scales the float32 sum of each block.

    Codes of 4 bits are packed two a byte, the first one in the low half: weights along a row; zero
    points along the blocks of a row, or along the rows where a row has one scale. This is what
    `weights_prepacked=0` means in ONNX Runtime; layouts that a provider has packed for itself are
    not taken.

    Args:
        expert_weight_bits: 4 or 8.
        block_size: Columns that share a scale: 32, 64, 128, or None for whole rows.
        k: Experts of a token.
        activation_type: `"relu"`, `"gelu"`, `"silu"`, `"identity"`, or `"swiglu"`, which needs a
            `swiglu_fusion`.
        normalize_routing_weights: Divide a token's weights by their sum.
        swiglu_fusion: 1 if even rows of FC1 are gate rows and odd ones linear rows, 2 if its first
            half is gate rows; 0 with other activations.
        swiglu_limit: Bound of SwiGLU's clamps; None or infinity for none, 0 does clamp.
        activation_alpha: Of SwiGLU only.
        activation_beta: Of SwiGLU only.
        use_sparse_mixer: Route as PhiMoE does; needs `k=2`.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range or contradicts another, or no target has that name.

    Examples:
        >>> op = QMoEFwdOp(expert_weight_bits=8, k=2, activation_type="silu")
        >>> x, logits = torch.randn(5, 16), torch.randn(5, 4)
        >>> fc1 = torch.randint(256, (4, 8, 16), dtype=torch.uint8)
        >>> fc2 = torch.randint(256, (4, 16, 8), dtype=torch.uint8)
        >>> op(x, logits, fc1, torch.ones(4, 8), None, fc2, torch.ones(4, 16)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        expert_weight_bits: int = 4,
        block_size: int | None = None,
        k: int = 1,
        activation_type: str = "relu",
        normalize_routing_weights: bool = False,
        swiglu_fusion: int = 0,
        swiglu_limit: float | None = None,
        activation_alpha: float = 1.0,
        activation_beta: float = 0.0,
        use_sparse_mixer: bool = False,
        *,
        target: str | None = None,
    ) -> None:
        op = "QMoEFwdOp"
        check.choice(op, "expert_weight_bits", expert_weight_bits, (4, 8))
        check.choice(op, "block_size", block_size, (None, *BLOCK_SIZES))
        check_activation(op, k, activation_type, swiglu_fusion, swiglu_limit, use_sparse_mixer)
        if activation_type == "swiglu" and not swiglu_fusion:
            raise ValueError(
                f"{op}: swiglu_fusion must be 1 or 2 with activation_type='swiglu', got 0: there "
                f"is no FC3"
            )
        check.flag(op, "normalize_routing_weights", normalize_routing_weights)
        self.expert_weight_bits = expert_weight_bits
        self.block_size = block_size
        self.k = k
        self.activation_type = activation_type
        self.normalize_routing_weights = normalize_routing_weights
        self.swiglu_fusion = swiglu_fusion
        self.swiglu_limit = swiglu_limit
        self.activation_alpha = check.number(op, "activation_alpha", activation_alpha)
        self.activation_beta = check.number(op, "activation_beta", activation_beta)
        self.use_sparse_mixer = use_sparse_mixer
        self.target = targets.target_argument(op, target)

    def forward(
        self,
        input: torch.Tensor,
        router_probs: torch.Tensor,
        fc1_experts_weights: torch.Tensor,
        fc1_scales: torch.Tensor,
        fc1_experts_bias: torch.Tensor | None,
        fc2_experts_weights: torch.Tensor,
        fc2_scales: torch.Tensor,
        fc2_experts_bias: torch.Tensor | None = None,
        fc1_zero_points: torch.Tensor | None = None,
        fc2_zero_points: torch.Tensor | None = None,
        router_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        N below is the number of rows of a matrix: of FC1 I, or 2I with a `swiglu_fusion`, and of
        FC2 H. K is the number of its columns, H and I, and G that of the blocks of a row.

        Args:
            input: `[T, H]`, or `[B, S, H]` with T = B * S and rows of one spacing; float32 (not on
                `cuda`), bfloat16 or float16.
            router_probs: `[T, E]` router logits in the input's dtype, in spite of the name.
            fc1_experts_weights: `[E, N, K * bits / 8]` uint8.
            fc1_scales: `[E, N, G]`, or `[E, N]` with one scale a row; float32, or the input's
                dtype.
            fc1_experts_bias: `[E, N]` in the input's dtype and FC1's row order, or None.
            fc2_experts_weights: As for FC1, and so are the next two.
            fc2_scales: As for FC1.
            fc2_experts_bias: `[E, H]` or None; inside the weighted sum.
            fc1_zero_points: `[E, N, ceil(G * bits / 8)]` uint8, or `[E, ceil(N * bits / 8)]` with
                one scale a row; None for the middle of the range.
            fc2_zero_points: As for FC1, and on its own.
            router_weights: `[T, E]` in the input's dtype: then `router_probs` only selects, and
                these are the weights of the selected experts. None without.

        Returns:
            A tensor of the input's shape and dtype.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, or is not
                expected with these settings, or k exceeds E; as NoKernelError if the target cannot
                serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("QMoEFwdOp")
        rows = check_input(checker, input)
        checker.tensor("router_probs", router_probs, ("T", "E"), (input.dtype,))
        check_k(checker, self.k)
        bits, size, dtype = self.expert_weight_bits, self.block_size, input.dtype
        wide = "2I" if self.swiglu_fusion else "I"
        fc1 = fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_experts_bias
        fc2 = fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_experts_bias
        fc1_scales = check_quantized(checker, "fc1", fc1, (wide, "H"), bits, size, dtype)
        fc2_scales = check_quantized(checker, "fc2", fc2, ("H", "I"), bits, size, dtype)
        if router_weights is not None:
            checker.tensor("router_weights", router_weights, ("T", "E"), (dtype,))
            if self.use_sparse_mixer:
                raise ValueError(
                    f"{checker.op}: router_weights must be None with use_sparse_mixer, which "
                    f"weighs what it selects"
                )
        out = torch.ops.tileops.qmoe_fwd.default(
            rows,
            router_probs,
            fc1_experts_weights,
            fc1_scales,
            fc1_experts_bias,
            fc2_experts_weights,
            fc2_scales,
            fc2_experts_bias,
            fc1_zero_points,
            fc2_zero_points,
            router_weights,
            bits,
            size or 0,
            self.k,
            self.activation_type,
            self.normalize_routing_weights,
            self.swiglu_fusion,
            math.inf if self.swiglu_limit is None else float(self.swiglu_limit),
            self.activation_alpha,
            self.activation_beta,
            self.use_sparse_mixer,
            self.target,
        )
        return out.view(input.shape)
