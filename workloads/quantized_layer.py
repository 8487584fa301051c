"""A layer's experts with weights of 4 bits, for the problems of ``QMoEFwdOp``."""

from __future__ import annotations

import torch

from tileops.workloads.grouped_gemm_int import dequantize
from tileops.workloads.layer import Layer, uncommitted

BITS, COLUMNS = 4, 32
"""Of a weight; that share a scale."""
MATRICES = {"fc1": "w_gate_up", "fc2": "w_down"}
"""What ``QMoEFwdOp`` calls the matrices of a layer."""


def empty(layer: Layer, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return packed weights and scales by their names as arguments, without values yet."""
    E, H, F = layer.local_experts, layer.hidden_size, layer.ffn_size
    found = {}
    for name, (rows, columns) in {"fc1": (2 * F, H), "fc2": (H, F)}.items():
        shapes = {
            f"{name}_experts_weights": ((E, rows, -(-columns * BITS // 8)), torch.uint8),
            f"{name}_scales": ((E, rows, -(-columns // COLUMNS)), dtype),
        }
        for argument, (shape, kind) in shapes.items():
            found[argument] = uncommitted(shape, kind, torch.device(device))
    return found


def fill(packed: dict[str, torch.Tensor], layer: Layer, expert: int) -> None:
    """Draw the weights of an expert as codes; they are as large as those of the layer itself."""
    make = torch.Generator(packed["fc1_scales"].device).manual_seed(expert)
    deviations = {"fc1": layer.hidden_size**-0.5, "fc2": 2 * layer.ffn_size**-0.5}
    for name, deviation in deviations.items():
        packed[f"{name}_experts_weights"][expert].random_(256, generator=make)
        # all codes alike often: their standard deviation is that of 16 neighbours
        scale = deviation / ((4**BITS - 1) / 12) ** 0.5
        packed[f"{name}_scales"][expert].uniform_(0.7 * scale, 1.3 * scale, generator=make)


class Dequantized:
    """A matrix of each expert, made when it is asked for: all of them would be large.

    It is exact: in float32, as codes times scales of half precision are, or else in float64.

    Args:
        packed: What `empty` returns.
        name: ``"fc1"`` or ``"fc2"``.
    """

    def __init__(self, packed: dict[str, torch.Tensor], name: str) -> None:
        self._codes, self._scales = packed[f"{name}_experts_weights"], packed[f"{name}_scales"]
        self._dtype = torch.float64 if self._scales.dtype == torch.float32 else torch.float32
        self.shape = (*self._codes.shape[:2], self._codes.shape[2] * 8 // BITS)

    def __getitem__(self, expert: int) -> torch.Tensor:
        args = self._codes[expert], self._scales[expert], None, BITS, COLUMNS
        return dequantize(*args, self._dtype)
