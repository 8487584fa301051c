"""What kernels ask of a GPU, each device once, what they are compiled for, and what they refuse.

Where builds are collected ahead of time there may be no GPU: tensors on the CPU then stand for its
tensors, and what is asked of their device is answered for an H200.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path

import tilelang
import torch

from tileops import compilation

COMPILE_TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""TileLang's target: spelled out, so that a machine without a GPU fills the same kernel cache."""

UNCHECKED = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}
"""For kernels that check their own bounds."""

_H200_MULTIPROCESSORS = 132
_NOTHING = nullcontext()


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
    if device.type == "cpu":
        return _H200_MULTIPROCESSORS
    return _properties(_index(device)).multi_processor_count


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a CUDA device is the current one: launch under it."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return _NOTHING  # switching costs more than looking
    return torch.cuda.device(device)


@cache
def has_compiler() -> bool:
    """Return whether TileLang finds CUDA's compiler; the kernels of a filled cache need none."""
    home = tilelang.env.CUDA_HOME
    return bool(home) and any(Path(home, "bin").glob("nvcc*"))


def no_compiler() -> str | None:
    """Say why no kernel can be compiled here and what to do, or return None."""
    if has_compiler():
        return None
    return (
        "TileLang finds no nvcc; install CUDA's compiler (pip install 'tilelang[nvcc]') or set "
        "CUDA_HOME, or fill the cache on a machine that has it: python -m tileops warmup"
    )


def _call_directly(kernel: tilelang.JITKernel) -> None:
    """Have a kernel call its compiled function, which takes the host half the time.

    TileLang's way there also makes the results that a kernel returns, of which ours have none.
    """
    executable = kernel.adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    kernel.torch_function = module["main"]


jit = partial(
    compilation.jit,
    why_not=no_compiler,
    prepare=_call_directly,
    target=COMPILE_TARGET,
    pass_configs=UNCHECKED,
)
"""The decorator of builders."""


def dtype_name(x: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, as builders take it."""
    return str(x.dtype).removeprefix("torch.")


def wrong_device(x: torch.Tensor) -> str | None:
    """Say why the kernels cannot run where ``x`` is."""
    if x.device.type == "cpu" and compilation.collected_arch() == COMPILE_TARGET["arch"]:
        return None
    if x.device.type != "cuda" or capability(x.device) != (9, 0):
        return f"runs on GPUs of compute capability 9.0, got {x.device}"
    return None


def aligned(*tensors: torch.Tensor) -> bool:
    """Return whether all rows start on a 16-byte word."""
    for x in tensors:
        if not x.numel():
            continue
        if x.data_ptr() % 16:
            return False
        vector = 16 // x.element_size()
        for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if step % vector and size > 1:
                return False
    return True


def misplaced(name: str, x: torch.Tensor) -> str | None:
    """Say why the rows of ``x`` cannot be read and written as 16-byte words."""
    if aligned(x):
        return None
    return (
        f"{name}: every row must start on a 16-byte word, got {x.dtype}, strides {x.stride()}, "
        f"address {x.data_ptr():#x}"
    )


def unfit(tensors: dict[str, torch.Tensor], expanded: bool = True) -> str | None:
    """Say why one of these tensors cannot be an operand of 16-byte words.

    Args:
        tensors: By their names.
        expanded: Whether dimensions of stride 0 are taken, as descriptors of TMA do not.
    """
    for name, x in tensors.items():
        if (reason := misplaced(name, x)) is not None:
            return reason
        if not expanded and any(
            size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)
        ):
            return f"{name}: expanded dimensions (of stride 0) are not taken, got {x.stride()}"
    return None
