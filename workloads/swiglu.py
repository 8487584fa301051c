"""SwiGLU: reference."""

from __future__ import annotations

import math

import torch

from tileops.moe.grouped_gemm import Activation
from tileops.workloads.accuracy import precision
from tileops.workloads.grouped_gemm import gated


def swiglu_fwd(gate, up, limit, alpha, beta, *, target, out):
    """Clamp, gate, add: in float32, rounded once."""
    activation = Activation("swiglu", alpha, beta, limit if limit > 0 else math.inf)
    compute = precision(torch.float32)
    out.copy_(gated(gate.to(compute), up.to(compute), activation))
