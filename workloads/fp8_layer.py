"""A layer's experts with FP8 weights, for the problems of the ops that take them."""

from __future__ import annotations

import torch

from tileops.moe.quantize import quantize_fp8_blockwise
from tileops.workloads.layer import Layer, uncommitted

MATRICES = "w_gate_up", "w_down"


def empty(layer: Layer, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return matrices and scales by their names as arguments, without values yet."""
    E, H, F = layer.local_experts, layer.hidden_size, layer.ffn_size
    found, device = {}, torch.device(device)
    for name, (rows, columns) in zip(MATRICES, ((2 * F, H), (H, F)), strict=True):
        found[name] = uncommitted((E, rows, columns), torch.float8_e4m3fn, device)
        scales = E, rows // 128, columns // 128
        found[f"{name}_scale"] = uncommitted(scales, torch.float32, device)
    return found


def fill(
    fp8: dict[str, torch.Tensor], weights: dict[str, torch.Tensor | None], expert: int
) -> None:
    """Quantise the weights of an expert."""
    for name in MATRICES:
        q, scale = quantize_fp8_blockwise(weights[name][expert])  # type: ignore[index]
        fp8[name][expert], fp8[f"{name}_scale"][expert] = q, scale


class Dequantised:
    """A matrix of each expert, in float64, made when it is asked for: all of them would be large.

    Args:
        fp8: What `empty` returns.
        name: Of the matrix.
    """

    def __init__(self, fp8: dict[str, torch.Tensor], name: str) -> None:
        self._q, self._scale = fp8[name], fp8[f"{name}_scale"]
        self.shape = self._q.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        scale = self._scale[expert].double()
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return self._q[expert].double() * wide
