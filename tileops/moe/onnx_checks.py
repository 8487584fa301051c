"""Argument checks of ONNX Runtime's MoE operators."""

from __future__ import annotations

import torch

from tileops import check

ACTIVATION_TYPES = ("relu", "gelu", "silu", "identity", "swiglu")


def check_activation(
    op: str, k: int, activation_type: str, fusion: int, limit: float | None, sparse_mixer: bool
) -> None:
    """Check the settings of ONNX Runtime's MoE operators against each other."""
    check.integer(op, "k", k, low=1)
    check.choice(op, "activation_type", activation_type, ACTIVATION_TYPES)
    check.integer(op, "swiglu_fusion", fusion, low=0, high=2)
    if fusion and activation_type != "swiglu":
        raise ValueError(
            f"{op}: swiglu_fusion must be 0 with activation_type={activation_type!r}, got {fusion}"
        )
    if limit is not None and check.number(op, "swiglu_limit", limit, infinite=True) < 0:
        raise ValueError(f"{op}: swiglu_limit must be None or not negative, got {limit}")
    check.flag(op, "use_sparse_mixer", sparse_mixer)
    if sparse_mixer and k != 2:
        raise ValueError(f"{op}: k must be 2 with use_sparse_mixer, got {k}")


def check_input(checker: check.Checker, input: torch.Tensor) -> torch.Tensor:
    """Check the tokens, of rank 2 or 3, and return them as ``[T, H]`` without a copy."""
    if isinstance(input, torch.Tensor) and input.ndim == 3:
        checker.tensor("input", input, ("B", "S", "H"), check.FLOATS)
        batch, length, width = input.shape
        if batch > 1 and length > 1 and input.stride(0) != length * input.stride(1):
            raise ValueError(
                f"{checker.op}: input must have rows of one spacing, got shape "
                f"{tuple(input.shape)} with strides {input.stride()}; call .contiguous() on it once"
            )
        step = input.stride(1) if length > 1 else input.stride(0)
        input = input.as_strided((batch * length, width), (step, 1))
    checker.tensor("input", input, ("T", "H"), check.FLOATS)
    return input


def check_k(checker: check.Checker, k: int) -> None:
    """Check k against the experts of the call."""
    if k > checker.dims["E"]:
        raise ValueError(f"{checker.op}: k must be at most E = {checker.dims['E']}, got {k}")


def needs_fc3(op: str, kind: str, fusion: int, weights: object, bias: object) -> bool:
    """Check that FC3 is there exactly where the activation reads it; return whether it is."""
    wanted = None
    if weights is None and kind == "swiglu" and fusion == 0:
        wanted = "given"
    if weights is not None and (kind not in ("swiglu", "silu") or fusion):
        wanted = "None"
    if wanted:
        raise ValueError(
            f"{op}: fc3_experts_weights must be {wanted} with activation_type={kind!r} and "
            f"swiglu_fusion={fusion}"
        )
    if weights is None and bias is not None:
        raise ValueError(f"{op}: fc3_experts_bias must be None without fc3_experts_weights")
    return weights is not None


def check_quantized(
    checker: check.Checker,
    layer: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    letters: tuple[str, str],
    bits: int,
    block_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Check packed weights, their scales, zero points and bias; return the scales, a row a line.

    Args:
        checker: Of the call; it knows the number of columns, unless it is that of FC2.
        layer: ``"fc1"`` or ``"fc2"``.
        tensors: Weights, scales, zero points or None, bias or None.
        letters: Of the rows and the columns.
        bits: Of a weight.
        block_size: Columns that share a scale, or None.
        dtype: Of the input.
    """
    weights, scales, zero_points, bias = tensors
    rows, columns = letters
    dims, per_byte, uint8 = checker.dims, 8 // bits, (torch.uint8,)

    def fewer(letter: str, divisor: int) -> str:
        """Name the letter's size divided, rounded up, and tell the checker."""
        if divisor == 1:
            return letter
        if letter[0] == "2":  # of rows only, which are two a byte at most
            return letter[1:]
        name = f"{letter}/{divisor}"
        dims[name] = -(-dims[letter] // divisor)
        return name

    if dims[columns] % per_byte:
        raise ValueError(
            f"{checker.op}: {columns} must be a multiple of {per_byte}, as {per_byte} columns are "
            f"packed in a byte, got {dims[columns]}"
        )
    packed = fewer(columns, per_byte)
    checker.tensor(f"{layer}_experts_weights", weights, ("E", rows, packed), uint8)
    floats = tuple({torch.float32: None, dtype: None})
    if block_size is not None:
        groups = fewer(columns, block_size)
        checker.tensor(f"{layer}_scales", scales, ("E", rows, groups), floats)
        points = "E", rows, fewer(columns, block_size * per_byte)
    else:
        dims["1"] = 1
        if isinstance(scales, torch.Tensor) and scales.ndim == 2:
            scales = scales.unsqueeze(-1)
        checker.tensor(f"{layer}_scales", scales, ("E", rows, "1"), floats)
        points = "E", fewer(rows, per_byte)
    if zero_points is not None:
        checker.tensor(f"{layer}_zero_points", zero_points, points, uint8)
    if bias is not None:
        checker.tensor(f"{layer}_experts_bias", bias, ("E", rows), (dtype,))
    return scales
