"""Kernels for NVIDIA Hopper GPUs (compute capability 9.0)."""

import torch

from tileops.kernels.cuda import (
    grouped_gemm_int,
    indexed_experts,
    indexed_experts_fp8,
    permute,
    permute_align,
    post_permute,
    quantize_fp8,
    router,
    sparse_mixer,
    swiglu,
    topk,
)
from tileops.kernels.cuda.sm90 import (
    fused_experts,
    fused_experts_fp8,
    grouped_gemm,
    grouped_gemm_fp8,
)
from tileops.targets import Kernel, Target


def _detect(where: torch.device) -> bool:
    return where.type == "cuda"


TARGET = Target(
    name="cuda",
    kernels={
        "fused_topk_fwd": [Kernel(topk.fused_topk_fwd, topk.refuse)],
        "moe_pre_permute_fwd": [Kernel(permute.moe_pre_permute_fwd, permute.refuse)],
        "moe_post_permute_fwd": [Kernel(post_permute.moe_post_permute_fwd, post_permute.refuse)],
        "moe_permute_align_fwd": [
            Kernel(permute_align.moe_permute_align_fwd, permute_align.refuse)
        ],
        "moe_router_fwd": [Kernel(router.moe_router_fwd, router.refuse)],
        "sparse_mixer_fwd": [Kernel(sparse_mixer.sparse_mixer_fwd, sparse_mixer.refuse)],
        "swiglu_fwd": [Kernel(swiglu.swiglu_fwd, swiglu.refuse)],
        "quantize_fp8_rowwise_fwd": [
            Kernel(quantize_fp8.quantize_fp8_rowwise_fwd, quantize_fp8.refuse)
        ],
        "quantize_fp8_blockwise_fwd": [
            Kernel(quantize_fp8.quantize_fp8_blockwise_fwd, quantize_fp8.refuse)
        ],
        "indexed_expert_mlp_fwd": [
            Kernel(indexed_experts.indexed_expert_mlp_fwd, indexed_experts.refuse)
        ],
        "fused_moe_experts_fwd": [
            Kernel(fused_experts.fused_moe_experts_fwd, fused_experts.refuse)
        ],
        "moe_grouped_gemm_int_fwd": [
            Kernel(grouped_gemm_int.moe_grouped_gemm_int_fwd, grouped_gemm_int.refuse)
        ],
        "moe_grouped_gemm_fwd": [Kernel(grouped_gemm.moe_grouped_gemm_fwd, grouped_gemm.refuse)],
        "moe_grouped_gemm_fp8_fwd": [
            Kernel(grouped_gemm_fp8.moe_grouped_gemm_fp8_fwd, grouped_gemm_fp8.refuse)
        ],
        "fused_moe_experts_fp8_fwd": [
            Kernel(indexed_experts_fp8.fused_moe_experts_fp8_fwd, indexed_experts_fp8.refuse),
            Kernel(fused_experts_fp8.fused_moe_experts_fp8_fwd, fused_experts_fp8.refuse),
        ],
    },
    detect=_detect,
    repeats=True,
)
