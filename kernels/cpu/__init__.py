"""Kernels for the CPU, through TileLang's C target."""

from tileops.kernels.cpu import (
    grouped_gemm,
    grouped_gemm_int,
    permute,
    permute_align,
    quantize_fp8,
    router,
    sparse_mixer,
    swiglu,
    topk,
)
from tileops.targets import Kernel, Target

TARGET = Target(
    name="cpu",
    kernels={
        "fused_topk_fwd": [Kernel(topk.fused_topk_fwd, topk.refuse)],
        "sparse_mixer_fwd": [Kernel(sparse_mixer.sparse_mixer_fwd, sparse_mixer.refuse)],
        "moe_router_fwd": [Kernel(router.moe_router_fwd, router.refuse)],
        "moe_pre_permute_fwd": [Kernel(permute.moe_pre_permute_fwd, permute.refuse_pre)],
        "moe_post_permute_fwd": [Kernel(permute.moe_post_permute_fwd, permute.refuse)],
        "moe_permute_align_fwd": [
            Kernel(permute_align.moe_permute_align_fwd, permute_align.refuse)
        ],
        "moe_grouped_gemm_fwd": [Kernel(grouped_gemm.moe_grouped_gemm_fwd, grouped_gemm.refuse)],
        "moe_grouped_gemm_fp8_fwd": [
            Kernel(grouped_gemm.moe_grouped_gemm_fp8_fwd, grouped_gemm.refuse)
        ],
        "quantize_fp8_rowwise_fwd": [
            Kernel(quantize_fp8.quantize_fp8_rowwise_fwd, quantize_fp8.refuse)
        ],
        "quantize_fp8_blockwise_fwd": [
            Kernel(quantize_fp8.quantize_fp8_blockwise_fwd, quantize_fp8.refuse)
        ],
        "moe_grouped_gemm_int_fwd": [
            Kernel(grouped_gemm_int.moe_grouped_gemm_int_fwd, grouped_gemm_int.refuse)
        ],
        "swiglu_fwd": [Kernel(swiglu.swiglu_fwd, swiglu.refuse)],
    },
    detect=lambda device: device.type == "cpu",
)
