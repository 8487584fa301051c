"""Targets from installed packages: docs/example_target, and beside it one that does not load."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "example_target"

BROKEN_PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "tileops-broken"
version = "0.1"

[project.entry-points."tileops.targets"]
broken = "tileops_broken"

[tool.setuptools]
py-modules = ["tileops_broken"]
"""

# a launch of the example says so; each program below starts with this
PRELUDE = """
import functools

import torch

from tileops import targets
from tileops.moe import FusedTopKFwdOp, SwiGLUFwdOp
from tileops.targets import BUILTIN, Kernel, NoKernelError

GATE, UP = torch.randn(3, 5), torch.randn(3, 5)
EXACT = SwiGLUFwdOp(target="reference")(GATE, UP)
served = []


def watch(kernel):
    @functools.wraps(kernel.launch)
    def launch(*args, **named):
        served.append(named["target"])
        kernel.launch(*args, **named)

    return Kernel(launch, kernel.refuse)


def runs_on_the_example(op):
    served.clear()
    torch.testing.assert_close(op(GATE, UP), EXACT)
    return served == ["example"]


def message(call, error):
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError("no error")


def load_example():
    import tileops_example

    kernels = tileops_example.TARGET.kernels["swiglu_fwd"]
    kernels[:] = map(watch, kernels)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder in which the example and a package that fails to import are installed."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copytree(SOURCE, folder / "example")  # building writes beside the sources
    broken = folder / "broken"
    broken.mkdir()
    (broken / "pyproject.toml").write_text(BROKEN_PROJECT)
    (broken / "tileops_broken.py").write_text("raise OSError('libbroken.so: no such file')\n")
    offline = "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"
    command = sys.executable, "-m", "pip", "install", *offline, "--target", folder / "installed"
    pip = subprocess.run(
        [*command, folder / "example", broken], cwd=folder, capture_output=True, text=True
    )
    assert pip.returncode == 0, pip.stdout + pip.stderr
    return folder / "installed"


@pytest.fixture
def run(packages):
    """Run Python with both packages installed; ``claims``: the example claims the CPU."""

    def run(*args, claims=False):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *sys.path])}
        environment["TILEOPS_EXAMPLE"] = "1" if claims else ""
        result = subprocess.run(
            [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def test_an_installed_target_serves_by_name_and_as_default(run):
    code = """
logits = torch.tensor([[0.0, 3.0, 1.0]])
assert FusedTopKFwdOp(1)(logits)[1].item() == 1
assert targets.registered_targets() == ["cuda", "cpu", "reference", "example"]
assert "example" in targets.registered_targets("swiglu_fwd")
assert "example" not in targets.registered_targets("fused_topk_fwd")
assert list(targets.load_failures()) == ["broken"]

load_example()
assert runs_on_the_example(SwiGLUFwdOp(target="example"))
assert not runs_on_the_example(SwiGLUFwdOp())

op = SwiGLUFwdOp()
targets.set_default_target("example")
assert targets.default_target() == "example"
assert runs_on_the_example(op)
assert not runs_on_the_example(SwiGLUFwdOp(target=BUILTIN))
targets.set_default_target(None)
assert not runs_on_the_example(op)
assert FusedTopKFwdOp(1)(logits)[1].item() == 1

# what it refuses: why, who could, and what did not load
half = SwiGLUFwdOp(target="example")
text = message(lambda: half(GATE.half(), UP.half()), NoKernelError)
first, *rest = text.splitlines()
assert first.startswith("target 'example' cannot run swiglu_fwd on this call"), text
assert "'cpu'" in first and "'reference'" in first, text
assert "tileops_example.swiglu_fwd: takes float32, got torch.float16" in rest[0], text
assert "target 'broken' did not load" in rest[1] and "libbroken.so" in rest[1], text

text = message(lambda: SwiGLUFwdOp(target="broken"), ValueError)
assert "got 'broken'" in text and "OSError: libbroken.so: no such file" in text, text
assert "OSError: libbroken.so" in targets.load_failures()["broken"]
"""
    run("-c", PRELUDE + code)


def test_the_target_that_claims_the_device_wins(run):
    code = """
load_example()
assert runs_on_the_example(SwiGLUFwdOp())
assert not runs_on_the_example(SwiGLUFwdOp(target=BUILTIN))
assert not runs_on_the_example(SwiGLUFwdOp(target="cpu"))
targets.set_default_target(BUILTIN)
assert not runs_on_the_example(SwiGLUFwdOp())
targets.set_default_target(None)

# what it lacks is an error, not another target's work
text = message(lambda: FusedTopKFwdOp(1)(torch.zeros(1, 3)), NoKernelError)
assert "target 'example' has no kernel for fused_topk_fwd" in text, text
assert "these targets can: ['cpu', 'reference']" in text, text
assert FusedTopKFwdOp(1, target=BUILTIN)(torch.zeros(1, 3))[1].item() == 0
"""
    run("-c", PRELUDE + code, claims=True)


def test_the_command_line_lists_both(run):
    lines = run("-m", "tileops", "targets").splitlines()
    assert any("example" in line and "yes, if named" in line for line in lines), lines
    assert any("broken did not load" in line and "libbroken.so" in line for line in lines), lines


@pytest.mark.parametrize("name", ["pyproject.toml", "tileops_example.py"])
def test_the_documentation_shows_the_package(name):
    page = (ROOT / "docs" / "adding.md").read_text()
    assert (SOURCE / name).read_text() in page
