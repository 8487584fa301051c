"""SwiGLU: reference."""

from __future__ import annotations

import math

from tileops.moe.grouped_gemm import Activation
from tileops.workloads.grouped_gemm import gated


def swiglu_fwd(gate, up, limit, alpha, beta, *, target, out):
    """Clamp, gate, add: in float32, rounded once."""
    activation = Activation("swiglu", alpha, beta, limit if limit > 0 else math.inf)
    out.copy_(gated(gate.float(), up.float(), activation))
