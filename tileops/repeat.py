"""Eager calls that repeat: one like two earlier ones launches what they launched, and no more.

Between its launches an op does much on the host: it checks its arguments, goes through the
dispatcher, asks kernels what they refuse, picks tile sizes, makes views. All of that depends on the
op's settings and on what `signature` tells of its tensors, never on what they hold. So the second
call of a signature is watched, and what it allocates and launches becomes a `Repetition` that
serves the calls after it. A call that does anything else besides, such as an operator of torch that
computes, has none and always takes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch

from tileops.repetition import Recorder, Repetition

_NOTHING = nullcontext()

_included = torch._C._dispatch_tls_local_include_set
_keys_of = torch._C._dispatch_keys
_select = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
# outside of every mode and transform, with inference mode and without
_PLAIN = {
    _select.raw_repr(),
    _select.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr(),
}

_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def is_plain() -> bool:
    """Return whether no mode, transform, tracer or profiler sees the operators called now."""
    return (
        _included().raw_repr() in _PLAIN
        and not torch._C._len_torch_function_stack()
        and not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    )


def signature(tensors: Sequence[object]) -> tuple[object, ...] | None:
    """Return what decides about a call with these tensors (or None), but for their addresses.

    None if one of them is something else, a tensor of another class or without memory included.
    """
    found: list[object] = [torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()]
    for x in tensors:
        if type(x) is torch.Tensor or type(x) is torch.nn.Parameter:
            try:
                address = x.data_ptr()
            except RuntimeError:  # of a sparse one, say
                return None
            found += (
                x.shape,
                x.stride(),
                x.dtype,
                x.get_device(),
                address % 16,
                x.requires_grad,
                _keys_of(x).raw_repr(),
            )
        elif x is None:
            found.append(None)
        else:
            return None
    return tuple(found)


def recording() -> Recorder | None:
    """Return what records the current call, or None."""
    return _recorder.get()


def watched() -> AbstractContextManager[object]:
    """Return a context in which the recorder of the current call, if any, sees torch's operators.

    Torch hides them from it inside of an operator that it has seen.
    """
    recorder = _recorder.get()
    return _NOTHING if recorder is None or torch._C._len_torch_dispatch_stack() else recorder


def watching(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have the function of an operator run under `watched`: one that allocates on its own."""

    @wraps(function)
    def watched_function(*args: Any) -> Any:
        with watched():
            return function(*args)

    return watched_function


def record(call: Callable[[], Any], tensors: Sequence[object]) -> tuple[Any, Repetition | None]:
    """Make a call with these tensors; return its result, and how to repeat it if that can be."""
    recorder = Recorder(tensors)
    token = _recorder.set(recorder)
    try:
        with recorder:
            result = call()
    finally:
        _recorder.reset(token)
    return result, recorder.repetition(result)
