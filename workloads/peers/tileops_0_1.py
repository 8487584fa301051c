"""The public package tileops 0.1, in a process of its own: it has the import name of this library.

The module is both sides. Imported, it starts itself as a script with the package's folder first on
the path, and hands it the tensors of this process through CUDA's inter-process memory handles, so
that both run on the very same inputs. Run as a script, it answers on its standard output.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing  # makes tensors picklable by handle


def prepare(problems, check, graph, folder: str) -> Callable[[], tuple[float, str]]:
    """Run the ops of the package in ``folder``; see ``peers.prepare``."""
    from tileops.layouts import MaskedLayoutSpec
    from tileops.workloads.peers import PeerError
    from tileops.workloads.problem import as_tuple

    if not folder:
        raise PeerError("needs the folder of the package: --peers tileops-0.1=FOLDER")
    if not Path(folder, "tileops").is_dir():
        raise PeerError(f"not installed (no package tileops in {folder})")
    first = problems[0]
    masked = isinstance(first.settings.get("layout"), MaskedLayoutSpec)
    if not isinstance(first.cls, type) or (first.fp8 and not masked):
        raise PeerError("has no such op")
    with torch.inference_mode():
        outputs = as_tuple(first.prepared(None)())
    for out in outputs:
        out.fill_(torch.nan if out.is_floating_point() else -1)
    sets = [[p.inputs.get(name) for name in arguments(first.cls)] for p in problems]
    task = {
        "cls": first.cls.__name__,
        "settings": {name: repr(value) for name, value in first.settings.items()},
        "sets": sets,
        "outputs": outputs,
        "graph": graph,
    }
    torch.cuda.synchronize()
    waiting = _waiting.get(folder)
    process = waiting.pop(0) if waiting else _begin(folder)
    try:
        try:
            _ask(process, _pack(task))
        except PeerError:  # it fails now and then where several processes build kernels at once
            _end(process)
            process = _begin(folder)
            _ask(process, _pack(task))
        check(outputs)
    except BaseException:
        _end(process)
        raise
    return partial(_time, process, task)


def _pack(task: dict) -> str:
    return base64.b64encode(ForkingPickler.dumps(task)).decode()


def _time(process: subprocess.Popen, task: dict) -> tuple[float, str]:
    """Time a task, whose tensors are here and must outlive the process that has their handles."""
    try:
        answer = _ask(process, "time")
    finally:
        _end(process)
    return answer["microseconds"], answer["how"]


def arguments(cls: type) -> list[str]:
    """Return the names of the arguments that the package's op has too: all but the buffer."""
    names = list(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]
    return [name for name in names if name not in ("output", "out")]


_waiting: dict[str, list[subprocess.Popen]] = {}


def start(folder: str) -> None:
    """Start a process for one more call of ``prepare``: it imports the package meanwhile.

    It ends with this one.
    """
    if Path(folder, "tileops").is_dir():
        _waiting.setdefault(folder, []).append(_begin(folder))


def _begin(folder: str) -> subprocess.Popen:
    path = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _ask(process: subprocess.Popen, line: str) -> dict:
    from tileops.workloads.peers import PeerError

    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended, and what follows says so
        process.stdin.write(line + "\n")
        process.stdin.flush()
    for answer in process.stdout:
        if answer.startswith("{"):
            found = json.loads(answer)
            if "error" in found:
                raise PeerError(found["error"])
            return found
    raise PeerError("its process ended without an answer")


def _load(name: str):
    """Load a file beside this folder without its package, which here would be the peer's."""
    path = Path(__file__).resolve().parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _class(peer, name: str) -> type:
    """Return a class of the package, which writes some names in other capitals."""
    found = {known.lower(): known for known in vars(peer)}
    return getattr(peer, found.get(name.lower(), name))


def _end_with_parent() -> None:
    """Have Linux kill this process, whatever it does, when the one that started it ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def serve() -> None:
    """Answer the two questions: the outputs, which are written in place, and the time."""
    _end_with_parent()
    try:
        import tileops.moe as peer

        task = pickle.loads(base64.b64decode(sys.stdin.readline()))
        names = {**vars(torch), **vars(peer)}
        names["torch"] = torch
        settings = {name: eval(text, names) for name, text in task["settings"].items()}
        op = _class(peer, task["cls"])(**settings)
        calls = [lambda args=args: op(*args) for args in task["sets"]]
        found = calls[0]()
        found = found if isinstance(found, tuple | list) else (found,)
        for out, got in zip(task["outputs"], found, strict=False):
            out.copy_(got.view(out.shape) if got.numel() == out.numel() else got[: len(out)])
        torch.cuda.synchronize()
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            return
        device = task["outputs"][0].device
        microseconds, how = _load("timing").microseconds(calls, device, task["graph"])
        print(json.dumps({"microseconds": microseconds, "how": how}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), flush=True)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    serve()
