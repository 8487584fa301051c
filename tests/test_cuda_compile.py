"""The CUDA kernels compile for sm_90a, with or without a GPU."""

import subprocess
from dataclasses import astuple
from pathlib import Path

import pytest
import tilelang
import torch

from tileops.kernels.cuda import (
    count_routes,
    device,
    grouped_gemm_int,
    grouped_gemm_tiles,
    indexed_experts,
    indexed_experts_fp8,
    permute,
    place_routes,
    post_permute,
    quantize_fp8,
    router,
    sparse_mixer,
    swiglu,
    topk,
    topk_merge,
    topk_scan,
)
from tileops.kernels.cuda.sm90 import multiply_tiles
from tileops.kernels.cuda.sm90.configs import pick_gemm
from tileops.moe import FusedTopKFwdOp
from tileops.targets import NoKernelError

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(not device.has_compiler(), reason="needs nvcc: CUDA's compiler is not here"),
]

DECODE, PREFILL = pick_gemm(64, 128), pick_gemm(65_536, 128)


def gemm(dtype, out_dtype, activation, has_bias, role, tile):
    return multiply_tiles.build(dtype, out_dtype, activation, has_bias, role, *astuple(tile))


KERNELS = {
    "topk of 256 experts, biased": lambda: topk.build("bfloat16", "biased_sigmoid", 8),
    "topk of many tokens, biased": lambda: topk_merge.build("bfloat16", "biased_sigmoid", 8),
    "topk of many tokens in few bits": lambda: topk_merge.build("float16", "softmax", 4),
    "topk of any number of experts": lambda: topk_scan.build("float16", "sigmoid"),
    "router": lambda: router.build("float32", "bfloat16", "sqrt_softplus", "int64", False, 8),
    "sparse mixer": lambda: sparse_mixer.build("bfloat16"),
    "swiglu": lambda: swiglu.build("bfloat16", True),
    "count routes": count_routes.build,
    "place routes in a cluster": lambda: place_routes.build_place("tiles", place_routes.CLUSTER),
    "place counted routes": lambda: place_routes.build_place("slots", 0),
    "copy rows": permute.build_copy,
    "combine rows": lambda: post_permute.build("bfloat16", "bfloat16", 4),
    "quantise rows": lambda: quantize_fp8.build_rows("bfloat16", True),
    "quantise rows that start anywhere": lambda: quantize_fp8.build_rows("float16", False),
    "quantise squares": lambda: quantize_fp8.build_blocks("float32", True),
    "gate and up of few routes": lambda: indexed_experts.build("bfloat16", "swiglu", True),
    "down of few routes": lambda: indexed_experts.build("float16", "none", False),
    "FP8 gate and up of few routes": lambda: indexed_experts_fp8.build("float32", True),
    "FP8 down of few routes": lambda: indexed_experts_fp8.build("bfloat16", False),
    "tiles of labels": lambda: grouped_gemm_tiles.build("per_row"),
    "tiles of slabs": lambda: grouped_gemm_tiles.build("masked"),
}
GEMMS = {
    "gate and up": lambda: gemm("bfloat16", "bfloat16", "silu_and_mul", False, "first", PREFILL),
    "down, decode": lambda: gemm("float16", "float16", "none", True, "second", DECODE),
    "gpt-oss": lambda: gemm("bfloat16", "bfloat16", "swiglu", True, "alone", PREFILL),
    "float32 out": lambda: gemm("bfloat16", "float32", "none", False, "alone", DECODE),
}
FEW, MANY = grouped_gemm_int.FEW, grouped_gemm_int.MANY
INTEGERS = {
    "4 bits, gated, decode": ("bfloat16", "float32", 4, 32, True, "swiglu", True, *FEW),
    "4 bits, a scale a row": ("float16", "float32", 4, 0, True, "none", False, *MANY),
    "8 bits, blocks": ("float16", "float16", 8, 128, False, "none", False, *MANY),
    "8 bits, a scale a row": ("bfloat16", "bfloat16", 8, 0, False, "silu", True, *FEW),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_packed_weights_go_from_16_byte_copies_to_the_tensor_cores(name):
    source = grouped_gemm_int.build(*INTEGERS[name]).get_kernel_source()
    kernel = source[source.rindex("__global__") :]
    assert "copy_vector" in kernel
    assert "mma_sync" in kernel


@pytest.mark.parametrize("name", KERNELS)
def test_index_and_copy_kernels(name):
    assert "__global__" in KERNELS[name]().get_kernel_source()


@pytest.mark.parametrize("name", GEMMS)
def test_grouped_gemms_use_the_tensor_cores_and_the_copy_engine(name):
    source = GEMMS[name]().get_kernel_source()
    assert "wgmma" in source
    assert "tma_load" in source


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_target_refuses_in_words():
    with pytest.raises(NoKernelError, match="target 'cuda' cannot run fused_topk_fwd.*'reference'"):
        FusedTopKFwdOp(1, target="cuda")(torch.randn(2, 4))


def test_the_program_that_measures_ceilings_compiles(tmp_path):
    source = Path(__file__).parents[1] / "workloads" / "ceilings.cu"
    nvcc = Path(tilelang.env.CUDA_HOME, "bin", "nvcc")
    architecture = "-gencode=arch=compute_90a,code=sm_90a"
    flags = "-std=c++17", "-Werror=all-warnings", "-cubin", architecture
    subprocess.run([nvcc, *flags, source, "-o", tmp_path / "ceilings.cubin"], check=True)
