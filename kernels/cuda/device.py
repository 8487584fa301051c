"""What kernels ask of a GPU, each device once, and what they are compiled for."""

from functools import cache
from pathlib import Path

import tilelang
import torch

COMPILE_TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""TileLang's target: spelled out, so that a machine without a GPU fills the same kernel cache."""


@cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, such as ``(9, 0)``."""
    properties = _properties(_index(device))
    return properties.major, properties.minor


def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return _properties(_index(device)).multi_processor_count


@cache
def has_compiler() -> bool:
    """Return whether TileLang finds CUDA's compiler, without which no kernel can be built."""
    home = tilelang.env.CUDA_HOME
    return bool(home) and any(Path(home, "bin").glob("nvcc*"))
