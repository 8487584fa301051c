"""The targets that are installed: what a target is, where they come from, and loading them.

The in-tree ones are ``cuda``, ``cpu`` and ``reference``; others come from packages with an entry
point in the group ``tileops.targets``, whose name is the target's name and whose value is the
module. All are looked up the same way, and none is imported before a call needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import torch

BUILTIN = "builtin"
"""As ``target=``: the in-tree target of the tensors' device, whatever else is installed."""

IN_TREE = {
    "cuda": "tileops.kernels.cuda",
    "cpu": "tileops.kernels.cpu",
    "reference": "tileops.workloads",
}


def _accepts(*args: object, **named: object) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operator on one target.

    Attributes:
        launch: Runs the operator: called with the arguments that ``kernels/README.md`` lists for
            it, layouts as spec objects, then ``target=`` the resolved name. An operator that writes
            a buffer is only ever launched with ``out=``.
        refuse: Takes the same arguments; returns why this kernel cannot serve the call, else None.
    """

    launch: Callable[..., object]
    refuse: Callable[..., str | None] = _accepts


@dataclass(frozen=True)
class Target:
    """A named set of kernels.

    Attributes:
        name: The name that ``target=`` takes.
        kernels: For each operator its kernels, the most specialised first.
        detect: Whether this target claims a ``torch.device`` when no target is named.
        repeats: Whether its kernels do nothing but allocate, view, and launch what
            ``tileops.compilation.jit`` builds, and whether all that depends on nothing that
            ``tileops.repeat.signature`` leaves out: such calls may be repeated without asking.
    """

    name: str
    kernels: Mapping[str, Sequence[Kernel]]
    detect: Callable[[torch.device], bool] = field(default=lambda device: False)
    repeats: bool = False


_failures: dict[str, str] = {}


@cache
def third_party() -> dict[str, EntryPoint]:
    """Return the entry points of other packages, by target; a name that is taken is left out."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group="tileops.targets"):
        if point.name in (*IN_TREE, BUILTIN):
            _failures[point.name] = f"{point.value}: the name is taken by the library itself"
        elif point.name in found:
            _failures[point.name] = (
                f"{point.value}: {found[point.name].value} has that name already"
            )
        else:
            found[point.name] = point
    return found


def _load_in_tree(module: str) -> Target:
    try:
        return import_module(module).TARGET
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        link = module.replace(".", "/")
        raise ImportError(
            f"{link} is missing: this checkout lacks its symbolic links, as one unpacked from a "
            f".zip archive does; clone the repository with git, or install a wheel"
        ) from error


@cache
def load(name: str) -> Target | None:
    """Import a target; a third-party one that fails is recorded and left out."""
    if name in IN_TREE:
        return _load_in_tree(IN_TREE[name])
    point = third_party()[name]
    try:
        target = import_module(point.module).TARGET
        if not isinstance(target, Target):
            raise TypeError(f"TARGET is a {type(target).__name__}, not a tileops.targets.Target")
    except Exception as error:
        _failures[name] = f"{point.value}: {type(error).__name__}: {error}"
        return None
    return target


def load_failures() -> dict[str, str]:
    """Return why third-party targets could not be loaded, by name. Loads those not yet tried."""
    for name in third_party():
        load(name)
    return dict(_failures)


def detects(name: str, device: torch.device) -> bool:
    """Say whether a target claims a device; what goes wrong is recorded."""
    target = load(name)
    try:
        return target is not None and bool(target.detect(device))
    except Exception as error:
        _failures[name] = f"detect({device}): {type(error).__name__}: {error}"
        return False


def failure_note() -> str:
    """Say why targets did not load, as the end of a message; empty if all did."""
    if not _failures:
        return ""
    return "".join(f"\n  target {name!r} did not load: {why}" for name, why in _failures.items())
