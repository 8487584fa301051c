"""Workloads: for each operator its reference and its cases. The references form a target.

``target="reference"`` on any op runs the form written here in plain torch, on any device. It may
synchronise, and it computes in float32 or wider: halves in float32, where their products are exact,
float32 in float64.
"""

from tileops.targets import Kernel, Target
from tileops.workloads import (
    grouped_gemm,
    grouped_gemm_fp8,
    grouped_gemm_int,
    permute,
    permute_align,
    quantize_fp8,
    router,
    sparse_mixer,
    swiglu,
    topk,
)

TARGET = Target(
    name="reference",
    kernels={
        "fused_topk_fwd": [Kernel(topk.fused_topk_fwd)],
        "moe_pre_permute_fwd": [Kernel(permute.moe_pre_permute_fwd)],
        "moe_post_permute_fwd": [Kernel(permute.moe_post_permute_fwd)],
        "moe_grouped_gemm_fwd": [Kernel(grouped_gemm.moe_grouped_gemm_fwd)],
        "moe_grouped_gemm_fp8_fwd": [Kernel(grouped_gemm_fp8.moe_grouped_gemm_fp8_fwd)],
        "quantize_fp8_rowwise_fwd": [Kernel(quantize_fp8.quantize_fp8_rowwise_fwd)],
        "quantize_fp8_blockwise_fwd": [Kernel(quantize_fp8.quantize_fp8_blockwise_fwd)],
        "moe_grouped_gemm_int_fwd": [Kernel(grouped_gemm_int.moe_grouped_gemm_int_fwd)],
        "moe_permute_align_fwd": [Kernel(permute_align.moe_permute_align_fwd)],
        "moe_router_fwd": [Kernel(router.moe_router_fwd)],
        "sparse_mixer_fwd": [Kernel(sparse_mixer.sparse_mixer_fwd)],
        "swiglu_fwd": [Kernel(swiglu.swiglu_fwd)],
    },
)
