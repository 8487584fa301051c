"""Targets: which set of kernels serves a device, and which kernel serves a call.

A target is a module with a ``TARGET`` object that maps operator names to kernels. `installed` says
where they come from, and loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch

from tileops import repeat
from tileops.installed import (
    BUILTIN,
    IN_TREE,
    Kernel,
    Target,
    detects,
    failure_note,
    load,
    load_failures,
    third_party,
)

__all__ = [
    "BUILTIN",
    "Kernel",
    "NoKernelError",
    "Target",
    "default_target",
    "find_kernel",
    "load_failures",
    "registered_targets",
    "set_default_target",
]


class NoKernelError(ValueError):
    """No kernel serves this call; the message lists each candidate, its reason, and who could."""


_staged: dict[str, tuple[Kernel, tuple[str, ...]]] = {}
_default: str | None = None
version = 0
"""How often it has changed which kernel serves a call."""


def register_staged(operator: str, launch: Callable[..., object], stages: Sequence[str]) -> None:
    """Give a composite operator a form made of other operators, run on the target asked for.

    Args:
        operator: The composite operator.
        launch: Runs it through ``run``; called when no kernel of the target serves the call whole.
        stages: The operators it runs: a target that has them all has the composite.
    """
    global version
    _staged[operator] = (Kernel(launch), tuple(stages))
    _candidates.cache_clear()
    version += 1


def registered_targets(op: str | None = None) -> list[str]:
    """Return the names of the targets that are installed and load.

    Args:
        op: Only those that have this operator, such as ``"moe_grouped_gemm_fwd"``, whole or through
            its stages.

    Raises:
        ValueError: If no target has an operator of that name.
    """
    loaded = {name: load(name) for name in (*IN_TREE, *third_party())}
    names = [name for name, target in loaded.items() if target is not None]
    if op is None:
        return names
    if op not in operators():
        raise ValueError(f"registered_targets: op must be one of {operators()}, got {op!r}")
    return [name for name in names if _has(name, op)]


def operators() -> list[str]:
    """Return the names of the operators that some target has, whole or through stages."""
    loaded = filter(None, map(load, (*IN_TREE, *third_party())))
    return sorted({*_staged, *(op for target in loaded for op in target.kernels)})


def _has(name: str, op: str) -> bool:
    target = load(name)
    stages = _staged[op][1] if op in _staged else ()
    return target is not None and (
        bool(target.kernels.get(op)) or bool(stages and all(_has(name, s) for s in stages))
    )


def default_target() -> str | None:
    """Return the target that ops without one run on, or None where the device decides."""
    return _default


def set_default_target(target: str | None) -> None:
    """Make ``target`` the one that every op without a ``target=`` of its own runs on.

    Args:
        target: A target's name, ``BUILTIN``, or None to let the device decide again.

    Raises:
        ValueError: If no target has that name.
    """
    global _default, version
    _default = target_argument("set_default_target", target)
    resolve.cache_clear()
    version += 1


def target_argument(op: str, target: object) -> str | None:
    """Return ``target`` if it is None, ``BUILTIN`` or the name of a target; raise otherwise."""
    if target is not None and not isinstance(target, str):
        raise TypeError(f"{op}: target must be a name, BUILTIN or None, got {target!r}")
    if target in (None, BUILTIN, *IN_TREE):
        return target
    if target not in third_party() or load(target) is None:
        raise ValueError(
            f"{op}: target must be one of {[BUILTIN, *registered_targets()]} or None, "
            f"got {target!r}{failure_note()}"
        )
    return target


@lru_cache(maxsize=256)
def resolve(target: str | None, device: torch.device) -> str:
    """Return the name of the target that runs a call on ``device``."""
    target = _default if target is None else target
    if target not in (None, BUILTIN):
        return target
    if target is None:
        claims = [name for name in third_party() if detects(name, device)]
        if len(claims) > 1:
            raise ValueError(
                f"several targets claim {device}: {claims}; "
                f"pass target= or call set_default_target()"
            )
        if claims:
            return claims[0]
    if device.type not in ("cpu", "cuda"):
        raise NoKernelError(
            f"no in-tree target serves {device}; target='reference' runs on any device"
            + failure_note()
        )
    return device.type


@lru_cache(maxsize=1024)
def _candidates(op: str, target: str) -> tuple[Kernel, ...]:
    loaded = load(target)
    own = tuple(loaded.kernels.get(op, ())) if loaded else ()
    if op in _staged and all(_has(target, stage) for stage in _staged[op][1]):
        return (*own, _staged[op][0])
    return own


def find_kernel(op: str, target: str, *args: object, **named: object) -> Kernel:
    """Return the first kernel of ``target`` that serves ``op`` called with these arguments.

    Raises:
        NoKernelError: If there is none.
    """
    for kernel in _candidates(op, target):
        if kernel.refuse(*args, target=target, **named) is None:
            return kernel
    _no_kernel(op, target, *args, **named)


def run(op: str, target: str | None, *args: torch.Tensor | object, **named: object) -> Any:
    """Run ``op`` on the target that ``target`` stands for on the device of the first argument.

    Args:
        op: The operator's name.
        target: What the caller asked for.
        *args: The arguments of the operator's schema before ``target``, layouts as spec objects.
        **named: ``out=``, where the operator writes a buffer.
    """
    name = resolve(target, args[0].device)  # type: ignore[union-attr]
    kernel = find_kernel(op, name, *args, **named)
    with repeat.watched():
        return kernel.launch(*args, target=name, **named)


def repeats(target: str | None, device: torch.device) -> bool:
    """Return whether calls on what ``target`` stands for on a device may be repeated."""
    try:
        loaded = load(resolve(target, device))
    except Exception:  # the call itself tells, after what else is wrong; or it is on meta tensors
        return False
    return loaded is not None and loaded.repeats


def _no_kernel(op: str, target: str, *args: Any, **named: object) -> NoReturn:
    def refusals(name: str) -> list[tuple[Kernel, str | None]]:
        return [(k, k.refuse(*args, target=name, **named)) for k in _candidates(op, name)]

    device = args[0].device
    able = [
        name
        for name in registered_targets(op)
        if (name in ("reference", device.type) or detects(name, device))
        and any(reason is None for _, reason in refusals(name))
    ]
    lines = [
        f"target {target!r} cannot run {op} on this call; "
        + (f"these targets can: {able} (pass one as target=)" if able else "nor can another target")
    ]
    lines += [f"{_name(kernel)}: {reason}" for kernel, reason in refusals(target)]
    if len(lines) == 1:
        lines.append(f"target {target!r} has no kernel for {op}")
    raise NoKernelError("\n  ".join(lines) + failure_note())


def _name(kernel: Kernel) -> str:
    return f"{kernel.launch.__module__}.{getattr(kernel.launch, '__name__', 'launch')}"
