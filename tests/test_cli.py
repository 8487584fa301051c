import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from tileops import targets
from tileops.__main__ import app
from tileops.cli import machine
from tileops.kernels.cuda import device
from tileops.workloads import demo, timing, verify
from tileops.workloads.layer import Layer

SMALL = Layer("small", num_experts=16, top_k=4, hidden_size=64, ffn_size=48)


def run(*args, **env):
    return CliRunner().invoke(app, args, env=env)


@pytest.fixture
def small_layer(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(demo, "run", partial(demo.run, layer=SMALL))


@pytest.mark.usefixtures("small_layer")
def test_demo_shows_a_row_for_each_size(kernels):
    result = run("demo", "--target", kernels, "--tokens", "1", "--tokens", "5")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if kernels in line]
    assert [row[row.index("│", 1) + 1] for row in rows] == ["1", "5"]


@pytest.mark.usefixtures("small_layer")
def test_demo_tells_what_it_does_where_nobody_watches_a_terminal():
    result = run("demo", "--target", "reference", "--tokens", "1")
    assert "computing the reference ..." in result.stderr
    assert "running 1 token ..." in result.stderr


def test_demo_measures_the_error_of_what_the_target_returned(monkeypatch):
    class Doubling(demo.FusedMoEFwdOp):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return out if self.target == "reference" else 2 * out

    monkeypatch.setattr(demo, "FusedMoEFwdOp", Doubling)
    (row,) = demo.run("cpu", [3], layer=SMALL)
    assert row.error == pytest.approx(1, abs=0.02)
    assert not row.accurate


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_demo_fails_on_an_error_out_of_bounds(monkeypatch, error):
    rows = [demo.Row("cpu", 1, 1.0, 0.001, 0.01), demo.Row("cpu", 2, 1.0, error, 0.01)]
    monkeypatch.setattr(demo, "run", lambda *args: iter(rows))
    result = run("demo", "--target", "cpu")
    assert result.exit_code == 1
    assert result.stderr.strip() == "a relative error is larger than allowed"


@pytest.mark.usefixtures("small_layer")
def test_demo_says_why_no_kernel_serves_it():
    result = run("demo", "--target", "cpu", CXX="no-such-compiler")
    assert result.exit_code == 1
    assert "no C++ compiler" in result.stderr
    assert "Traceback" not in result.output


def test_demo_lists_the_targets_when_one_is_unknown():
    result = run("demo", "--target", "tpu")
    assert result.exit_code == 1
    assert "--target must be one of ['cuda', 'cpu', 'reference'], got 'tpu'" in result.stderr


@pytest.mark.parametrize("tokens", ["0", "many"])
def test_demo_refuses_a_wrong_number_of_tokens(tokens):
    result = run("demo", "--tokens", tokens)
    assert result.exit_code == 2
    assert "--tokens" in result.stderr


def test_verify_writes_its_results_after_each_step(monkeypatch, tmp_path):
    """A run that is killed leaves those of the steps before."""
    path, left, steps = tmp_path / "results.json", [], verify.verify

    def watched(*args):
        for rows in steps(*args):
            yield rows
            left.append(len(json.loads(path.read_text())["rows"]))

    monkeypatch.setattr(verify, "verify", watched)
    options = ("--case", "olmoe-1b-7b", "--op", "fused_topk_fwd", "--routing", "uniform")
    options += ("--tokens", "1", "--tokens", "2", "--target", "reference", "--json", str(path))
    assert run("verify", *options).exit_code == 0
    assert left == [1, 2]


def test_targets_lists_what_is_installed_and_what_did_not_load(monkeypatch):
    monkeypatch.setattr(targets, "load_failures", lambda: {"acme": "acme.ops: ImportError: gone"})
    result = run("targets")
    assert result.exit_code == 0, result.output
    for name in ("cuda", "cpu", "reference"):
        assert any(name in line.split() for line in result.stdout.splitlines())
    assert "acme did not load: acme.ops: ImportError: gone" in result.stdout


def test_targets_shows_why_a_target_cannot_serve_its_device():
    result = run("targets", CXX="no-such-compiler")
    assert "no, see below" in result.stdout
    assert "no C++ compiler" in result.stdout


@pytest.mark.parametrize("there", [True, False])
def test_targets_tells_that_nvcc_is_missing(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "_device_title", str)
    monkeypatch.setattr(machine, "_service", lambda *args: "yes")
    monkeypatch.setattr(device, "has_compiler", lambda: there)
    result = run("targets")
    assert result.exit_code == 0, result.output
    assert ("TileLang finds no nvcc" in result.stdout) is not there


@pytest.mark.parametrize("package", ["psutil", "pydantic", "rich", "typer", "yaml"])
def test_without_its_extra_the_command_says_what_to_install(package):
    code = f"import sys, runpy; sys.modules[{package!r}] = None; runpy.run_module('tileops')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"the command line needs more packages, {package} for one: "
        "python -m pip install psutil pydantic pyyaml rich typer"
    ]
