"""Values of ONNX models: attributes read by their kind, arrays to tensors and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

_TORCH_NAMES = {"float32", "float16", "int32", "int64", "uint8", "int8"}


def kind_of(value: object) -> str:
    """Return the kind of an attribute, as ONNX names it, by what the evaluator makes of its value.

    It is told from the value because that of a function's attribute comes without another sign.
    """
    if isinstance(value, str):
        return "STRING"
    if isinstance(value, Integral) and not isinstance(value, bool):
        return "INT"
    if isinstance(value, Real) and not isinstance(value, Integral):
        return "FLOAT"
    return type(value).__name__


def must_be(kind: str, value: object) -> None:
    """Raise ValueError for another kind: a conversion would run a model that is invalid."""
    if kind_of(value) != kind:
        raise ValueError(f"must be of kind {kind}, got {kind_of(value)} {value}")


def read_int(value: Any) -> int:
    """Return an INT."""
    must_be("INT", value)
    return int(value)


def read_float(value: Any) -> float:
    """Return a FLOAT."""
    must_be("FLOAT", value)
    return float(value)


def read_str(value: Any) -> str:
    """Return a STRING."""
    must_be("STRING", value)
    return value


def read_flag(value: Any) -> bool:
    """Return an INT of 0 or 1 as a bool."""
    if read_int(value) not in (0, 1):
        raise ValueError(f"must be 0 or 1, got {value}")
    return bool(value)


def only(*served: object) -> Callable[[object], None]:
    """Return a check of an attribute that the op does not have."""

    def check(value: object) -> None:
        must_be(kind_of(served[0]), value)
        if value not in served:
            raise ValueError(f"must be {' or '.join(map(repr, served))}, got {value!r}")

    return check


def read_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a number of TensorProto."""
    from onnx import TensorProto

    dtypes: dict[int, torch.dtype] = {
        TensorProto.FLOAT: torch.float32,
        TensorProto.FLOAT16: torch.float16,
        TensorProto.BFLOAT16: torch.bfloat16,
    }
    if read_int(value) not in dtypes:
        raise ValueError(f"must be FLOAT, FLOAT16 or BFLOAT16 of TensorProto, got {value}")
    return dtypes[value]


def to_torch(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the tensor of an array: on a CPU without a copy, of bfloat16 too."""
    import numpy as np

    array = np.asarray(array, order="C")
    name = array.dtype.name
    if name != "bfloat16" and name not in _TORCH_NAMES:
        names = [*sorted(_TORCH_NAMES), "bfloat16"]
        raise ValueError(f"an array must be of one of {names}, got {name}")
    with warnings.catch_warnings():
        # of arrays that are read-only: ops do not write their inputs
        warnings.simplefilter("ignore", UserWarning)
        if name == "bfloat16":
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
    if not tensor.numel():  # NumPy's strides are 0 then, and not those of a contiguous tensor
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the array of a tensor, of bfloat16 as ``ml_dtypes`` has it."""
    tensor = tensor.cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    from onnx import TensorProto, helper

    return (
        tensor.view(torch.int16).numpy().view(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    )
