"""A target in a package of its own: SwiGLU in plain torch, for float32."""

import os

import torch

from tileops.targets import Kernel, Target


def refuse(gate, up, limit, alpha, beta, *, target, out):
    """Say why a call cannot be served, or return None."""
    if gate.dtype != torch.float32:
        return f"takes float32, got {gate.dtype}"
    return None


def swiglu_fwd(gate, up, limit, alpha, beta, *, target, out):
    """Write ``gate * sigmoid(alpha * gate) * (up + beta)``; a positive limit clamps both first."""
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    torch.mul(gate * torch.sigmoid(alpha * gate), up + beta, out=out)


def detect(device):
    """Claim the CPU, but only where the environment asks for it."""
    return device.type == "cpu" and os.environ.get("TILEOPS_EXAMPLE") == "1"


TARGET = Target(
    name="example",
    kernels={"swiglu_fwd": [Kernel(swiglu_fwd, refuse)]},
    detect=detect,
)
