"""The public package tileops 0.1, in a process of its own: it has the import name of this library.

The module is both sides. Imported, it starts itself as a script with the package's folder first on
the path, and hands it the tensors of this process through CUDA's inter-process memory handles, so
that both run on the very same inputs. Run as a script, it answers on its standard output.
"""

from __future__ import annotations

import base64
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing  # makes tensors picklable by handle


def measure(problems, check, graph, folder: str) -> tuple[float, str]:
    """Run the ops of the package in ``folder``; see ``peers.measure``."""
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
    process = _waiting.pop(folder, None) or _begin(folder)
    with process:
        try:
            message = base64.b64encode(ForkingPickler.dumps(task)).decode()
            answer = _ask(process, message)
            check(first.live(outputs))
            answer = _ask(process, "time")
        finally:
            process.kill()
    return answer["microseconds"], answer["how"]


def arguments(cls: type) -> list[str]:
    """Return the names of the arguments that the package's op has too: all but the buffer."""
    names = list(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]
    return [name for name in names if name not in ("output", "out")]


_waiting: dict[str, subprocess.Popen] = {}


def start(folder: str) -> None:
    """Start a process for the next call of ``measure``: it imports the package meanwhile.

    It ends with this one, when its input does.
    """
    if Path(folder, "tileops").is_dir():
        _waiting[folder] = _begin(folder)


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


def _ask(process: subprocess.Popen, line: str) -> dict:
    from tileops.workloads.peers import PeerError

    assert process.stdin is not None
    assert process.stdout is not None
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


def serve() -> None:
    """Answer the two questions: the outputs, which are written in place, and the time."""
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
        sys.stdin.readline()
        device = task["outputs"][0].device
        microseconds, how = _load("timing").microseconds(calls, device, task["graph"])
        print(json.dumps({"microseconds": microseconds, "how": how}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), flush=True)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    serve()
