"""FP8 grouped GEMM for Hopper, in every layout, on a list of row tiles."""

import torch

from tileops.kernels.cuda.device import current, unfit, wrong_device
from tileops.kernels.cuda.grouped_gemm_tiles import grouped_gemm_tiles
from tileops.kernels.cuda.sm90.configs import pick_gemm_fp8
from tileops.kernels.cuda.sm90.multiply_tiles_fp8 import DEPTH, MAX_SPAN, multiply_tiles_fp8
from tileops.layouts import MGroupedLayoutSpec
from tileops.moe.grouped_gemm import Activation


def moe_grouped_gemm_fp8_fwd(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    layout_metadata: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: Activation | None,
    *,
    target: str,
    out: torch.Tensor,
) -> None:
    """Run the kernel on ``a``'s device and its current stream; see ``MoEGroupedGemmFP8FwdOp``."""
    num_experts, rows = gate.shape[0], a.shape[-2]
    if out.numel() == 0 or num_experts == 0:
        return
    if a.shape[-1] == 0:
        out.zero_()
        return
    with current(a.device):
        tile = pick_gemm_fp8(a.shape[:-1].numel(), num_experts)
        tiles = grouped_gemm_tiles(
            layout_metadata, layout, rows, num_experts, tile.block_m, even=False
        )
        weights = gate, gate_scale, up, up_scale
        biases = gate_bias, up_bias
        multiply_tiles_fp8(a, a_scale, None, *weights, *biases, activation, tiles, tile, out)


def refuse(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    layout_metadata: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: Activation | None,
    *,
    target: str,
    out: torch.Tensor,
) -> str | None:
    """Return why the kernel cannot serve a call, or None."""
    if (reason := wrong_device(a)) is not None:
        return reason
    if a.shape[-1] % DEPTH or gate.shape[1] % (DEPTH // 2):
        return (
            f"takes K that is a multiple of {DEPTH} and rows of weights that are one of "
            f"{DEPTH // 2}, got K = {a.shape[-1]} and {gate.shape[1]}"
        )
    if (a.shape[-2] - 1) * a.stride(-2) >= MAX_SPAN:
        return f"a: takes rows that span less than 2**35 bytes, got strides {a.stride()}"
    weights = {"b": gate} if up is None else {"gate rows of b": gate, "up rows of b": up}
    return unfit({"a": a, **weights, "out": out}, expanded=False)
