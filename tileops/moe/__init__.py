"""Mixture-of-Experts operators: construct one with its settings, then call it with tensors."""

from tileops.layouts import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MGroupedLayoutSpec,
    RoutingEpilogueSpec,
)
from tileops.moe.expert_mlp import MoEExpertMLPFwdOp
from tileops.moe.experts import FusedMoEExpertsFwdOp
from tileops.moe.fused_moe import FusedMoEFwdOp
from tileops.moe.fused_moe_fp8 import FusedMoEFP8FwdOp
from tileops.moe.grouped_gemm import MoEGroupedGemmFwdOp
from tileops.moe.grouped_gemm_fp8 import MoEGroupedGemmFP8FwdOp
from tileops.moe.indexed_experts import IndexedExpertMLPFwdOp
from tileops.moe.modular import (
    FusedMoEExpertsModular,
    FusedMoEPrepareAndFinalize,
    PrepareResult,
    WeightedReduce,
    WeightedReduceNoOp,
)
from tileops.moe.onnx_moe import MoEFwdOp
from tileops.moe.permute import MoEPostPermuteFwdOp, MoEPrePermuteFwdOp
from tileops.moe.permute_align import MoEPermuteAlignFwdOp
from tileops.moe.qmoe import QMoEFwdOp
from tileops.moe.quantize import quantize_fp8_blockwise, quantize_fp8_rowwise
from tileops.moe.router import MoERouterFwdOp
from tileops.moe.shared_expert import FusedMoESharedExpertFwdOp, SharedExpertMLPFwdOp
from tileops.moe.swiglu import SwiGLUFwdOp
from tileops.moe.topk import FusedTopKFwdOp

__all__ = [
    "ContiguousLayoutSpec",
    "FusedMoEExpertsFwdOp",
    "FusedMoEExpertsModular",
    "FusedMoEFP8FwdOp",
    "FusedMoEFwdOp",
    "FusedMoEPrepareAndFinalize",
    "FusedMoESharedExpertFwdOp",
    "FusedTopKFwdOp",
    "IndexedExpertMLPFwdOp",
    "MGroupedLayoutSpec",
    "MaskedLayoutSpec",
    "MoEExpertMLPFwdOp",
    "MoEFwdOp",
    "MoEGroupedGemmFP8FwdOp",
    "MoEGroupedGemmFwdOp",
    "MoEPermuteAlignFwdOp",
    "MoEPostPermuteFwdOp",
    "MoEPrePermuteFwdOp",
    "MoERouterFwdOp",
    "PrepareResult",
    "QMoEFwdOp",
    "RoutingEpilogueSpec",
    "SharedExpertMLPFwdOp",
    "SwiGLUFwdOp",
    "WeightedReduce",
    "WeightedReduceNoOp",
    "quantize_fp8_blockwise",
    "quantize_fp8_rowwise",
]
