"""Mixture-of-Experts operators: construct one with its settings, then call it with tensors."""

from tileops.layouts import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MGroupedLayoutSpec,
    RoutingEpilogueSpec,
)
from tileops.moe.experts import FusedMoEExpertsFwdOp, MoEExpertMLPFwdOp
from tileops.moe.fused_moe import FusedMoEFwdOp
from tileops.moe.grouped_gemm import MoEGroupedGemmFwdOp
from tileops.moe.permute import MoEPostPermuteFwdOp, MoEPrePermuteFwdOp
from tileops.moe.topk import FusedTopKFwdOp

__all__ = [
    "ContiguousLayoutSpec",
    "FusedMoEExpertsFwdOp",
    "FusedMoEFwdOp",
    "FusedTopKFwdOp",
    "MGroupedLayoutSpec",
    "MaskedLayoutSpec",
    "MoEExpertMLPFwdOp",
    "MoEGroupedGemmFwdOp",
    "MoEPostPermuteFwdOp",
    "MoEPrePermuteFwdOp",
    "RoutingEpilogueSpec",
]
