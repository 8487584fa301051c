"""What kernels ask of a GPU, each device once, what they are compiled for, and what they refuse."""

from functools import cache
from pathlib import Path

import tilelang
import torch

COMPILE_TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""TileLang's target: spelled out, so that a machine without a GPU fills the same kernel cache."""

UNCHECKED = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}
"""For kernels that check their own bounds."""


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


def dtype_name(x: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, as builders take it."""
    return str(x.dtype).removeprefix("torch.")


def wrong_device(x: torch.Tensor) -> str | None:
    """Say why the kernels cannot run where ``x`` is."""
    if x.device.type != "cuda" or capability(x.device) != (9, 0):
        return f"runs on GPUs of compute capability 9.0, got {x.device}"
    if not has_compiler():
        return "finds no nvcc; install CUDA's compiler or set CUDA_HOME"
    return None


def aligned(*tensors: torch.Tensor) -> bool:
    """Return whether all rows start on a 16-byte word."""
    return all(
        x.data_ptr() % 16 == 0
        and not any(
            size > 1 and step * x.element_size() % 16
            for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
        for x in tensors
        if x.numel()
    )


def misplaced(name: str, x: torch.Tensor) -> str | None:
    """Say why the rows of ``x`` cannot be read and written as 16-byte words."""
    if aligned(x):
        return None
    return (
        f"{name}: every row must start on a 16-byte word, got {x.dtype}, strides {x.stride()}, "
        f"address {x.data_ptr():#x}"
    )
