"""Grouped GEMM for Hopper, in every layout: tiles are listed, and `multiply_tiles` takes them."""

import torch

from tileops.kernels.cuda.device import current, unfit, wrong_device
from tileops.kernels.cuda.grouped_gemm_tiles import grouped_gemm_tiles
from tileops.kernels.cuda.sm90.configs import pick_gemm
from tileops.kernels.cuda.sm90.multiply_tiles import MAX_SPAN, multiply_tiles
from tileops.layouts import MGroupedLayoutSpec
from tileops.moe.grouped_gemm import Activation


def moe_grouped_gemm_fwd(
    a: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    layout_metadata: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    layout: MGroupedLayoutSpec,
    activation: Activation | None,
    *,
    target: str,
    out: torch.Tensor,
) -> None:
    """Run the kernel on ``a``'s device and its current stream; see ``MoEGroupedGemmFwdOp``."""
    num_experts, rows = gate.shape[0], a.shape[-2]
    if out.numel() == 0 or num_experts == 0:
        return
    # TileLang makes the device of the arguments current and leaves it so
    with current(a.device):
        tile = pick_gemm(a.shape[:-1].numel(), num_experts)
        tiles = grouped_gemm_tiles(layout_metadata, layout, rows, num_experts, tile.block_m)
        multiply_tiles(a, None, gate, up, gate_bias, up_bias, activation, tiles, tile, out)


def refuse(
    a: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
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
    if a.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"takes bfloat16 and float16, got {a.dtype}; float32 would run as TF32: "
            "target='reference' takes it"
        )
    depth, width = a.shape[-1], out.shape[-1]
    if depth % 8 or width % 8:
        return (
            f"takes widths that are multiples of 8 (16 bytes), got K = {depth} and {width} columns "
            "of out"
        )
    if (a.shape[-2] - 1) * a.stride(-2) >= MAX_SPAN:
        return f"a: takes rows that span less than 2**34 elements, got strides {a.stride()}"
    weights = {"b": gate} if up is None else {"gate rows of b": gate, "up rows of b": up}
    return unfit({"a": a, **weights, "out": out}, expanded=False)
