"""Kernels for the CPU, through TileLang's C target."""

from tileops.kernels.cpu import grouped_gemm, permute, topk
from tileops.targets import Kernel, Target

TARGET = Target(
    name="cpu",
    kernels={
        "fused_topk_fwd": [Kernel(topk.fused_topk_fwd, topk.refuse)],
        "moe_pre_permute_fwd": [Kernel(permute.moe_pre_permute_fwd, permute.refuse)],
        "moe_post_permute_fwd": [Kernel(permute.moe_post_permute_fwd, permute.refuse)],
        "moe_grouped_gemm_fwd": [Kernel(grouped_gemm.moe_grouped_gemm_fwd, grouped_gemm.refuse)],
    },
    detect=lambda device: device.type == "cpu",
)
