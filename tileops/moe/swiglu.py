"""The clamped SwiGLU activation, as an op of its own."""

from __future__ import annotations

import math

import torch

from tileops import check, repeat, targets
from tileops.moe.op import Op

torch.library.define(
    "tileops::swiglu_fwd",
    "(Tensor gate, Tensor? up, float limit, float activation_alpha, float activation_beta,"
    " str? target) -> Tensor",
)


def as_matrix(name: str, x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as rows of its last dimension, without a copy."""
    width = x.shape[-1] if x.ndim else 1
    try:
        return x.view(-1, width) if x.numel() else x.new_empty(0, width)
    except RuntimeError:
        raise ValueError(
            f"SwiGLUFwdOp: {name} must have rows of one spacing, got shape {tuple(x.shape)} "
            f"with strides {x.stride()}; call .contiguous() on it once, outside the hot path"
        ) from None


@torch.library.impl("tileops::swiglu_fwd", "CompositeExplicitAutograd")
@repeat.watching
def _swiglu_fwd(gate, up, limit, alpha, beta, target):
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    out = gate.new_empty(gate.shape)
    args = as_matrix("gate", gate), as_matrix("up", up)
    targets.run("swiglu_fwd", target, *args, limit, alpha, beta, out=as_matrix("out", out))
    return out


@torch.library.register_fake("tileops::swiglu_fwd")
def _swiglu_fwd_fake(gate, up, *settings):
    if up is not None:
        return gate.new_empty(gate.shape)
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


class SwiGLUFwdOp(Op):
    r"""Gate one tensor with another: $g \, \sigma(\alpha g) \, (l + \beta)$.

    Here $g$ is the gate and $l$ the linear value. With `limit > 0`, $g$ is clamped from above to
    `limit` and $l$ to `[-limit, limit]` first. The arithmetic is float32 whatever the dtype, and
    the result is rounded once; NaN passes through the clamps. This is the `SwiGLU` operator of ONNX
    Runtime's `com.microsoft` domain. With the defaults and both tensors given, it is the one of the
    standard domain.

    Args:
        limit: Bound of the clamps; 0, a negative value or infinity turns them off.
        activation_alpha: $\alpha$, the factor inside the sigmoid.
        activation_beta: $\beta$, added to the clamped linear half.
        target: Name of the target that serves the op, `BUILTIN` for the in-tree kernels, or None to
            decide from the device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a setting is NaN, or no target has that name.

    Examples:
        >>> SwiGLUFwdOp()(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0]))
        tensor([ 1.4621, -0.8068])
        >>> SwiGLUFwdOp()(torch.tensor([1.0, -1.0, 2.0, 3.0]))
        tensor([ 1.4621, -0.8068])
    """

    def __init__(
        self,
        limit: float = 0.0,
        activation_alpha: float = 1.0,
        activation_beta: float = 0.0,
        *,
        target: str | None = None,
    ) -> None:
        check.number("SwiGLUFwdOp", "limit", limit, infinite=True)
        check.number("SwiGLUFwdOp", "activation_alpha", activation_alpha)
        check.number("SwiGLUFwdOp", "activation_beta", activation_beta)
        self.limit = float(limit)
        self.activation_alpha = float(activation_alpha)
        self.activation_beta = float(activation_beta)
        self.target = targets.target_argument("SwiGLUFwdOp", target)

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the activation.

        Args:
            gate: Any shape with rows of one spacing; float32, bfloat16 or float16. Without `up` its
                last dimension is even and holds the gate half, then the linear half.
            up: The linear values, shaped and typed as `gate`.

        Returns:
            A tensor in `gate`'s dtype, of its shape, or with half its last dimension without `up`.

        Raises:
            ValueError: If a tensor has the wrong shape, dtype, device or strides.
            RuntimeError: If a tensor requires grad under grad mode.
        """
        checker = check.Checker("SwiGLUFwdOp")
        letters = tuple(f"D{axis}" for axis in range(getattr(gate, "ndim", 0)))
        checker.tensor("gate", gate, letters, check.FLOATS)
        if up is not None:
            checker.tensor("up", up, letters, (gate.dtype,))
        elif gate.ndim == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"SwiGLUFwdOp: gate must have an even last dimension where up is not given, "
                f"got {tuple(gate.shape)}"
            )
        limit = self.limit if 0 < self.limit < math.inf else 0.0
        return torch.ops.tileops.swiglu_fwd.default(
            gate, up, limit, self.activation_alpha, self.activation_beta, self.target
        )
