"""ONNX Runtime's MoE operator: routing, experts of any of its activations, combine."""

from __future__ import annotations

import math

import torch

from tileops import check, repeat, targets
from tileops.moe.grouped_gemm import Activation
from tileops.moe.onnx_checks import check_activation, check_input, check_k, needs_fc3
from tileops.moe.onnx_stages import LAYOUT, STAGES, plain_activation, route, run_experts
from tileops.moe.op import Op

torch.library.define(
    "tileops::moe_fwd",
    "(Tensor input, Tensor router_probs, Tensor fc1, Tensor? fc1_bias, Tensor fc2,"
    " Tensor? fc2_bias, Tensor? fc3, Tensor? fc3_bias, int k, str activation_type,"
    " bool normalize_routing_weights, int swiglu_fusion, float swiglu_limit,"
    " float activation_alpha, float activation_beta, bool use_sparse_mixer, str? target) -> Tensor",
)


@torch.library.impl("tileops::moe_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _moe_fwd(*args):
    *args, target = args
    out = args[0].new_empty(args[0].shape)
    targets.run("moe_fwd", target, *args, out=out)
    return out


@torch.library.register_fake("tileops::moe_fwd")
def _moe_fwd_fake(input, *args):
    return input.new_empty(input.shape)


def first_layer(fc1, fc1_bias, fc3, fc3_bias, activation_type, fusion, limit, alpha, beta):
    """Return the gate rows, up rows, their biases and the activation of the first GEMM."""
    swiglu = Activation("swiglu", alpha, beta, limit)
    if activation_type == "swiglu" and fusion == 1:
        biases = (None, None) if fc1_bias is None else (fc1_bias[:, 0::2], fc1_bias[:, 1::2])
        return fc1[:, 0::2], fc1[:, 1::2], *biases, swiglu
    if activation_type == "swiglu" and fusion == 2:
        biases = (None, None) if fc1_bias is None else fc1_bias.chunk(2, dim=1)
        return *fc1.chunk(2, dim=1), *biases, swiglu
    if fc3 is not None:
        activation = swiglu if activation_type == "swiglu" else Activation("silu_and_mul")
        return fc1, fc3, fc1_bias, fc3_bias, activation
    return fc1, None, fc1_bias, None, plain_activation(activation_type)


def _staged(
    x,
    router_probs,
    fc1,
    fc1_bias,
    fc2,
    fc2_bias,
    fc3,
    fc3_bias,
    k,
    activation_type,
    *settings,
    target,
    out,
):
    normalize, fusion, limit, alpha, beta, use_sparse_mixer = settings
    weights, ids = route(router_probs, k, normalize, use_sparse_mixer, target)
    layer = first_layer(fc1, fc1_bias, fc3, fc3_bias, activation_type, fusion, limit, alpha, beta)

    def gemm(rows, ends, result, gate, up, gate_bias, up_bias, activation):
        args = rows, gate, up, ends, gate_bias, up_bias, LAYOUT, activation
        targets.run("moe_grouped_gemm_fwd", target, *args, out=result)

    def first(rows, ends, result):
        gemm(rows, ends, result, *layer)

    def second(rows, ends, result):
        gemm(rows, ends, result, fc2, None, fc2_bias, None, None)

    sizes = fc2.shape[0], fc2.shape[2]
    run_experts(x, weights, ids, sizes, first, second, target, out)


targets.register_staged("moe_fwd", _staged, (*STAGES, "moe_grouped_gemm_fwd"))


class MoEFwdOp(Op):
    r"""The `MoE` operator of ONNX Runtime's `com.microsoft` domain.

    $y_t = \sum_j w_j \, (W_{2,e} \, \mathrm{act}(W_{1,e} x_t + b_{1,e}) + b_{2,e})$ over the k
    experts $e = e_j$ of a token, with $W_1$ for FC1 and $W_2$ for FC2. The weights are the softmax
    of `router_probs` over all E at the k largest (of equal ones the lower index), with
    `normalize_routing_weights` divided by their sum. With `use_sparse_mixer` they are PhiMoE's: two
    experts, each weighed against the logits that are within 2 % of its own.

    | `activation_type` | `swiglu_fusion` | FC3 | act |
    | --- | --- | --- | --- |
    | `"relu"`, `"silu"`, `"identity"` | 0 | no | as named |
    | `"gelu"` | 0 | no | the tanh form of GELU |
    | `"swiglu"` | 1 | no | even rows of FC1 gate, odd rows linear |
    | `"swiglu"` | 2 | no | first half of FC1 gate, second half linear |
    | `"swiglu"` | 0 | yes | FC1 gate, FC3 linear |
    | `"silu"` | 0 | yes | `silu(fc1 x + b1) * (fc3 x + b3)` (Mixtral) |

    SwiGLU is `g * sigmoid(alpha * g) * (l + beta)` with `g = min(gate, limit)` and
    `l = clamp(linear, -limit, limit)`. Products accumulate in float32, biases join before the
    activation, and the activated rows are rounded to the input's dtype.

    Args:
        k: Experts of a token.
        activation_type: See the table.
        normalize_routing_weights: Divide a token's weights by their sum.
        swiglu_fusion: How FC1 holds gate and linear rows; see the table.
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
        >>> op = MoEFwdOp(k=2, activation_type="silu", normalize_routing_weights=True)
        >>> x, logits = torch.randn(5, 16), torch.randn(5, 4)
        >>> op(x, logits, torch.randn(4, 8, 16), None, torch.randn(4, 16, 8)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
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
        op = "MoEFwdOp"
        check_activation(op, k, activation_type, swiglu_fusion, swiglu_limit, use_sparse_mixer)
        check.flag(op, "normalize_routing_weights", normalize_routing_weights)
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
        fc1_experts_bias: torch.Tensor | None,
        fc2_experts_weights: torch.Tensor,
        fc2_experts_bias: torch.Tensor | None = None,
        fc3_experts_weights: torch.Tensor | None = None,
        fc3_experts_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer; all tensors have one dtype.

        Args:
            input: `[T, H]`, or `[B, S, H]` with T = B * S and rows of one spacing; float32 (not on
                `cuda`), bfloat16 or float16.
            router_probs: `[T, E]` router logits, in spite of the name.
            fc1_experts_weights: `[E, I, H]`, with `swiglu_fusion` 1 or 2 `[E, 2I, H]`.
            fc1_experts_bias: `[E, I]` or `[E, 2I]`, in FC1's row order, or None.
            fc2_experts_weights: `[E, H, I]`.
            fc2_experts_bias: `[E, H]` or None; inside the weighted sum.
            fc3_experts_weights: `[E, I, H]` or None.
            fc3_experts_bias: `[E, I]` or None.

        Returns:
            A tensor of the input's shape and dtype.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides, is missing or not
                expected with these settings, or k exceeds E; as NoKernelError if the target cannot
                serve the call.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("MoEFwdOp")
        rows = check_input(checker, input)
        checker.tensor("router_probs", router_probs, ("T", "E"), (input.dtype,))
        check_k(checker, self.k)
        needs = needs_fc3(
            checker.op,
            self.activation_type,
            self.swiglu_fusion,
            fc3_experts_weights,
            fc3_experts_bias,
        )
        wide, dtype = ("2I" if self.swiglu_fusion else "I"), (input.dtype,)
        checker.tensor("fc1_experts_weights", fc1_experts_weights, ("E", wide, "H"), dtype)
        checker.tensor("fc2_experts_weights", fc2_experts_weights, ("E", "H", "I"), dtype)
        optional = [
            ("fc1_experts_bias", fc1_experts_bias, ("E", wide)),
            ("fc2_experts_bias", fc2_experts_bias, ("E", "H")),
            ("fc3_experts_weights", fc3_experts_weights if needs else None, ("E", "I", "H")),
            ("fc3_experts_bias", fc3_experts_bias, ("E", "I")),
        ]
        for name, tensor, shape in optional:
            if tensor is not None:
                checker.tensor(name, tensor, shape, dtype)
        out = torch.ops.tileops.moe_fwd.default(
            rows,
            router_probs,
            fc1_experts_weights,
            fc1_experts_bias,
            fc2_experts_weights,
            fc2_experts_bias,
            fc3_experts_weights,
            fc3_experts_bias,
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
