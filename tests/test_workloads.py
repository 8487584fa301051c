"""Manifests, verification, benchmark and plots."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import types

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tileops.__main__ import app
from tileops.cli.manifests import command_line
from tileops.compilation import collecting
from tileops.moe import (
    FusedMoEFwdOp,
    FusedTopKFwdOp,
    IndexedExpertMLPFwdOp,
    MoEPrePermuteFwdOp,
)
from tileops.workloads import bench, manifest, report, timing, verify, warmup
from tileops.workloads.accuracy import worst_row_error
from tileops.workloads.draw import Draw, Weights
from tileops.workloads.layer import Layer
from tileops.workloads.problems import INDEX_OPS, PROBLEMS
from tileops.workloads.problems_fp8 import PROBLEMS_FP8
from tileops.workloads.report import Report

SMALL = {
    "num_experts": 16,
    "top_k": 4,
    "hidden_size": 64,
    "ffn_size": 48,
    "shared_size": 32,
    "scoring_func": "sigmoid",
    "correction_bias": True,
    "num_expert_group": 4,
    "topk_group": 2,
}
CPU = torch.device("cpu")
ROUTINGS = ("uniform", "zipf", "hot", "alike")


@pytest.fixture
def small(tmp_path):
    """A manifest of one small layer, written to a file."""

    def write(**changes):
        layer = {**SMALL, **changes.pop("layer", {})}
        case = {
            "source": "nowhere",
            "tokens": [1, 5],
            "index_tokens": [7],
            "routing": ["zipf"],
            **changes,
        }
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({"small": {**case, "layer": layer}}))
        return path

    return write


def run(*args, **env):
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def test_the_manifests_hold_the_models_that_serve():
    cases = manifest.load_all()
    names = " ".join(case.name for case in cases)
    for model in (
        *("qwen3-30b", "qwen3-235b", "qwen3-next", "deepseek-v3-tp8", "deepseek-v3-ep8"),
        *("deepseek-v2-lite", "kimi-k2", "glm-4.5", "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b"),
        *("mixtral-8x22b", "phi-3.5-moe", "olmoe", "llama-4-maverick"),
    ):
        assert model in names
    for case in cases:
        assert case.source.startswith("https://")
        if case.ops is None:
            assert (min(case.tokens), max(case.tokens)) == (1, 8192)
            assert set(case.routing) == set(ROUTINGS)
    assert max(manifest.INDEX_TOKENS) == 65_536


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "wrong.yaml: while parsing"),
        ("- a", "wrong.yaml: must map names of cases to their fields"),
        ("a: 3", "wrong.yaml: a: must map fields to values, got 3"),
        ("a: {source: x}", "wrong.yaml: a: layer: Field required"),
        ("a: {source: x, layer: {top_k: 2}}", "wrong.yaml: a: layer.num_experts: Field required"),
        ("a: {source: x, laier: 1}", "wrong.yaml: a: laier: Extra inputs are not permitted, got 1"),
        ("TOP_K: -1", "wrong.yaml: a: layer.top_k: Input should be greater than 0, got -1"),
        ("TOP_K: 17", "wrong.yaml: a: layer: top_k = 17 is more than the experts to choose from"),
        ("TOP_K: two", "wrong.yaml: a: layer.top_k: Input should be a valid integer"),
        ("a: {source: x, layer: {top_k: true}}", "a: layer.top_k: Input should be a valid integer"),
        ("a: {source: x, name: b}", "wrong.yaml: a: name: is the key under which the case stands"),
        ("a: {source: x}\na: {source: y}", "'a' stands twice"),
        ("a: {source: x, source: y}", "'source' stands twice"),
        ("a: {source: x, tokens: []}", "a: tokens: List should have at least 1 item"),
        ("a: {source: x, tokens: [true]}", "a: tokens.0: Input should be a valid integer"),
        ("a: {source: x, tokens: 3}", "a: tokens: Input should be a valid list, got 3"),
        ("a: {source: x, ops: [topk]}", "a: ops: 'topk' is none of ['fused_topk_fwd', "),
        ("scoring_func: sparse_mixer", "a: layer: scoring_func: sparse_mixer needs top_k: 2"),
        ("TOPK: 2", "wrong.yaml: a: layer.TOPK: Unexpected keyword argument, got 2"),
    ],
)
def test_a_wrong_manifest_is_refused_by_file_case_and_field(tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    if content.startswith("scoring"):
        layer = "num_experts: 4, top_k: 3, hidden_size: 8, ffn_size: 8"
        content = f"a: {{source: x, layer: {{{layer}, {content}}}}}"
    elif content.startswith("TOP"):
        name, value = content.replace("TOP_K", "top_k").split(": ")
        fields = {"num_experts": 16, "top_k": 2, "hidden_size": 8, "ffn_size": 8}
        layer = {**fields, name: int(value) if value.lstrip("-").isdigit() else value}
        content = yaml.safe_dump({"a": {"source": "x", "layer": layer}})
    path.write_text(content)
    with pytest.raises(manifest.ManifestError) as error:
        manifest.load(path)
    assert message in str(error.value)
    result = run("verify", path)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")


def test_a_missing_manifest_is_an_error_in_words(tmp_path):
    result = run("verify", tmp_path / "none.yaml")
    assert result.exit_code == 1
    assert "none.yaml" in result.stderr
    assert "Traceback" not in result.output


def test_two_cases_of_one_name_are_refused(small, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(small().read_text())
    with pytest.raises(manifest.ManifestError, match="other.yaml: small: another case"):
        manifest.load_all([small(), other])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "kimi-k2"])
def test_routing_of_inputs(name, routing):
    layer = dataclasses.replace(manifest.layers()[name], hidden_size=8, ffn_size=8)
    tokens = layer.tokens(2000, torch.bfloat16, routing=routing)
    op = FusedTopKFwdOp(**layer.routing_settings(), target="reference")
    _, ids = op(tokens["gating_output"], layer.correction())
    counts = ids.flatten().bincount(minlength=layer.num_experts).float() / 2000
    expected = layer.top_k / layer.num_experts
    if routing == "uniform":
        # a count of n chosen at random varies by its root; a correction bias adds some percent
        noise = (expected * 2000) ** -0.5
        assert counts.std() / expected < 1.3 * (noise**2 + 0.1**2) ** 0.5
    elif routing == "zipf":
        assert 6 * expected < counts.max() < 1.01
        assert counts.sort().values[layer.num_experts // 2] < expected
    elif routing == "hot":
        # with groups a token may miss it: its group's second expert counts too
        assert counts.max() > 0.9
        assert counts.sort().values[-2] < 3 * expected
    else:
        assert (counts == 1).sum() == layer.top_k
        assert (tokens["hidden_states"] == tokens["hidden_states"][0]).all()


def test_many_experts_have_inputs_without_near_ties():
    layer = Layer("wide", 4096, 8, 8, 8, scoring_func="sigmoid", correction_bias=True)
    logits, bias = layer.tokens(300, torch.bfloat16)["gating_output"], layer.correction()
    assert bias is not None
    scores = logits.double().sigmoid() + bias
    assert scores.topk(9).values.diff().abs().min() > 1e-6


def test_the_command_of_a_report_names_no_folder_of_the_machine(monkeypatch):
    args = ["bench", "/home/me/a.yaml", "--peers", "tileops-0.1=/opt/x", "--json", "/tmp/o.json"]
    monkeypatch.setattr(sys, "argv", ["tileops", *args])
    got = command_line()
    assert got == "python -m tileops bench a.yaml --peers tileops-0.1=x --json o.json"


def test_an_expert_has_the_same_weights_whichever_others_are_drawn():
    layer = Layer("small", **SMALL)
    whole = layer.weights(torch.bfloat16)
    weights = Weights(layer, torch.bfloat16, CPU)
    for ids in ([3], [7, 3], [0, 15]):
        part = weights.drawn(torch.tensor(ids))
        for name in ("w_gate_up", "w_down"):
            assert all(torch.equal(part[name][e], whole[name][e]) for e in ids)
    assert not part["w_down"][5].any()  # never asked for, so never drawn


@pytest.mark.parametrize("name", [case.name for case in manifest.load_all()])
def test_problems_of_every_model(kernels, device, name):
    """Every op on every model's layer made small, both targets, all routings."""
    layer = dataclasses.replace(manifest.layers()[name], hidden_size=64, ffn_size=32)
    case = manifest.Case(name=name, source="x", layer=layer)
    steps = verify.steps([case], tokens=[1, 9])
    assert len(steps) == 8
    for rows in verify.verify(steps, kernels):
        assert len(rows) >= 7
        for row in rows:
            assert row.passed, row
            assert row.skipped is None, row


def test_steps_follow_the_manifest_and_the_arguments():
    case = manifest.Case(name="a", source="x", layer=Layer("a", **SMALL))
    steps = verify.steps([case])
    assert len(steps) == 4 * (len(manifest.TOKENS) + len(manifest.INDEX_TOKENS))
    assert all(s.ops == INDEX_OPS for s in steps if s.tokens in manifest.INDEX_TOKENS)
    assert all(s.ops == tuple(PROBLEMS) for s in steps if s.tokens not in manifest.INDEX_TOKENS)
    (step,) = verify.steps([case], tokens=[3], routing=["hot"], ops=["moe_fwd"])
    assert (step.tokens, step.routing, step.ops) == (3, "hot", ("moe_fwd",))
    few = case.model_copy(update={"ops": ("moe_fwd",)})
    assert verify.steps([few], ops=["fused_moe_fwd"]) == []


def test_the_error_is_that_of_the_worst_row():
    exact = torch.ones(1000, 8, dtype=torch.float64)
    out = exact.clone()
    out[17] = 1.5
    assert worst_row_error(out, exact) == pytest.approx(0.5)
    out[3, 2] = math.nan
    assert math.isnan(worst_row_error(out, exact))
    exact[17] = 0
    assert worst_row_error(exact, exact) == 0
    out = exact.clone()
    out[17, 0] = 1e-30
    assert worst_row_error(out, exact) == math.inf


def test_verify_command(small, tmp_path, target):
    file = tmp_path / "out.json"
    result = run("verify", small(), "--target", target, "--json", file)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    ops = {row["op"].split()[0] for row in content["rows"]}
    # sigmoid routing is none of ONNX's, and the widths are no multiples of 128
    assert ops == set(PROBLEMS) - {"moe_fwd", "qmoe_fwd"} - set(PROBLEMS_FP8)
    assert {row["tokens"] for row in content["rows"]} == {1, 5, 7}
    assert {"command", "machine", "versions", "date"} <= set(content)
    for op in ops:
        assert op in result.stdout


def test_verify_fp8(small, tmp_path, target):
    file, layer = tmp_path / "out.json", {"hidden_size": 256, "ffn_size": 128}
    ops = [arg for op in PROBLEMS_FP8 for arg in ("--op", op)]
    path = small(layer=layer, tokens=[1, 32], index_tokens=[], routing=["uniform", "hot"])
    result = run("verify", path, "--target", target, "--json", file, *ops)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    gemms = [f"moe_grouped_gemm_fp8_fwd {part}" for part in ("gate_up", "down")]
    masked = {f"{gemm} masked" for gemm in gemms}
    layers = set(PROBLEMS_FP8) - {"moe_grouped_gemm_fp8_fwd"}
    assert {row["op"] for row in rows} == {*layers, *gemms, *masked}
    assert {row["tokens"] for row in rows if row["op"] in masked} == {32}
    assert all(row["skipped"] is None for row in rows)


def test_fp8_slabs_have_the_sizes_that_are_measured():
    found = set()
    for case in manifest.load_all():
        for tokens in case.tokens if "-fp8-" in case.name else ():
            draw = warmup.Shapes(case.layer, tokens, torch.bfloat16, CPU)
            with collecting("sm_90a"):
                for problem in PROBLEMS_FP8["moe_grouped_gemm_fp8_fwd"](draw):
                    a, b = problem.inputs["a"], problem.inputs["b"]
                    assert a is not None
                    assert b is not None
                    if a.ndim == 3:
                        found.add((*a.shape[:2], *b.shape[1:]))
    gate_up, down = (4096, 7168), (7168, 2048)
    assert found >= {(4, 256, *gate_up), (8, 128, *gate_up), (32, 16, *gate_up)}
    assert found >= {(32, 128, *gate_up), (32, 128, *down), (8, 1024, *gate_up)}
    assert (8, 2048, *gate_up) in found


def test_fp8_has_a_floor_of_its_own():
    call = ("op", "case", 1, "uniform", "bfloat16", "tileops")
    row = report.Row(*call, flops=6e12, num_bytes=1e9)
    rates = report.Rates(1e12, 1e12, 2e12)
    assert row.floor(rates) == pytest.approx(6e6)
    fp8 = dataclasses.replace(row, fp8=True)
    assert fp8.floor(rates) == pytest.approx(3e6)
    assert fp8.floor(report.Rates(1e12, 1e12)) == pytest.approx(6e6)


@pytest.mark.parametrize("wrong", ["values", "ids", "nan"])
def test_verify_fails_on_a_wrong_result(small, monkeypatch, wrong):
    forward = FusedTopKFwdOp.forward

    def broken(self, *args, **inputs):
        weights, ids = forward(self, *args, **inputs)
        if self.target == "cpu" and len(ids) == 5:
            weights, ids = weights.clone(), ids.clone()
            if wrong == "ids":
                ids[4, 0] += 1
            else:
                weights[4, 0] = math.nan if wrong == "nan" else 1.001 * weights[4, 0]
        return weights, ids

    monkeypatch.setattr(FusedTopKFwdOp, "forward", broken)
    result = run("verify", small(), "--target", "cpu", "--op", "fused_topk_fwd")
    assert result.exit_code == 1
    assert "1 of 3 calls failed" in result.stderr
    assert "NO" in result.stdout


def test_verify_fails_on_an_op_that_writes_nothing(small, monkeypatch):
    """Neither what another op left in a buffer nor freed memory passes for a result."""
    monkeypatch.setattr(IndexedExpertMLPFwdOp, "forward", lambda self, output, **_: output)
    ops = ("--op", "fused_moe_experts_fwd", "--op", "indexed_expert_mlp_fwd")
    result = run("verify", small(), "--target", "cpu", "--tokens", 1, *ops)
    assert "1 of 2 calls failed" in result.stderr
    monkeypatch.setattr(
        FusedMoEFwdOp, "forward", lambda self, hidden_states, **_: torch.empty_like(hidden_states)
    )
    ops = ("--op", "fused_moe_experts_fwd", "--op", "fused_moe_fwd")
    result = run("verify", small(), "--target", "cpu", "--tokens", 8, *ops)
    assert "1 of 2 calls failed" in result.stderr


def test_verify_fails_on_a_copy_that_is_nearly_right(small, monkeypatch):
    forward = MoEPrePermuteFwdOp.forward

    def broken(self, **inputs):
        rows, *rest = forward(self, **inputs)
        return (rows.mul(1 + 2**-7) if self.target == "cpu" else rows), *rest

    monkeypatch.setattr(MoEPrePermuteFwdOp, "forward", broken)
    result = run("verify", small(), "--target", "cpu", "--op", "moe_pre_permute_fwd")
    assert "2 of 2 calls failed" in result.stderr


@pytest.mark.parametrize(
    "layer",
    [
        {"routed_scaling_factor": 2.5},
        {"num_expert_group": 4, "topk_group": 2},
        {"num_local_experts": 4},
    ],
)
def test_every_layer_that_a_manifest_describes_passes(small, layer):
    plain = {"scoring_func": "softmax", "correction_bias": False, "num_expert_group": 1}
    path = small(layer={**plain, "topk_group": 1, **layer})
    result = run("verify", path, "--target", "cpu", "--tokens", 9)
    assert result.exit_code == 0, result.output


def test_a_case_without_the_op_says_so(small):
    for command in ("verify", "bench"):
        result = run(command, small(), "--target", "cpu", "--op", "moe_fwd", "--tokens", 3)
        assert result.exit_code == 1
        assert "the layer has no such op" in result.stdout
        assert "every call was skipped" in result.stderr


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("verify", ["--json", "/nonexistent/x.json"], "--json: "),
        ("bench", ["--json", "/nonexistent/x.json"], "--json: "),
        ("bench", ["--plot", "/nonexistent/x.png"], "--plot: "),
        ("bench", ["--plot", "x.foo"], "--plot must end in .png, .svg or .pdf, got x.foo"),
        ("bench", ["--peers", "vllm=3"], "--peers vllm: takes no folder"),
        ("bench", ["--peers", "tileops-0.1"], "--peers tileops-0.1: needs =FOLDER"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(small, command, args, message):
    result = run(command, small(), "--target", "cpu", *args)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_verify_says_what_it_skipped(small):
    result = run("verify", small(), "--target", "cpu", CXX="no-such-compiler")
    assert result.exit_code == 1
    assert "every call was skipped" in result.stderr
    assert "no C++ compiler" in result.stdout


def test_what_is_too_large_for_the_machine_is_skipped_in_words(small):
    path = small(layer={"hidden_size": 2**17, "ffn_size": 2**17})
    result = run("verify", path, "--target", "cpu", "--op", "moe_grouped_gemm_fwd")
    assert result.exit_code == 1
    assert "GB of memory" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "tpu"], "--target must be one of"),
        (["--op", "topk"], "--op must be one of"),
        (["--case", "gpt-5"], "--case must be one of ['small']"),
        (["--routing", "even"], "--routing must be one of"),
        (["--dtype", "int8"], "--dtype must be one of"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_unknown_names_are_refused_in_words(small, command, args, message):
    result = run(command, small(), *args)
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")


def test_all_manifests_at_their_real_sizes():
    args = "verify", "--target", "cpu", "--tokens", 1, "--routing", "uniform"
    ops = [arg for op in PROBLEMS if op not in PROBLEMS_FP8 for arg in ("--op", op)]
    result = run(*args, *ops)
    assert result.exit_code == 0, result.output
    ops = [arg for op in PROBLEMS_FP8 for arg in ("--op", op)]
    result = run(*args, *ops, "--case", "qwen3-30b-a3b", "--case", "deepseek-v3-tp8")
    assert result.exit_code == 0, result.output


def test_bench_command(small, tmp_path):
    files = [tmp_path / name for name in ("out.json", "out.png", "out.svg")]
    args = ("--op", "fused_moe_fwd", "--op", "fused_topk_fwd", "--peers", "torch")
    args = (*args, "--peers", "vllm", "--peers", "tileops-0.1=/nowhere", "--target", "cpu")
    result = run("bench", small(), *args, "--json", files[0], "--plot", files[1])
    assert result.exit_code == 0, result.output
    assert "x torch" in result.stdout
    assert "skipped vllm on fused_" in result.stdout
    assert "not installed" in result.stdout
    assert files[1].read_bytes().startswith(b"\x89PNG")
    report = Report.from_json(json.loads(files[0].read_text()))
    rows = {(row.op, row.tokens, row.by): row for row in report.rows}
    assert len(rows) == (2 * 2 + 1) * 4
    for tokens in (1, 5):
        ours, torch_row = (rows["fused_moe_fwd", tokens, by] for by in ("tileops", "torch"))
        assert 0 < ours.error < 0.02
        assert ours.microseconds > 0
        assert torch_row.microseconds > 0
        floor = 1e6 * max(ours.flops / report.rates.flops, ours.num_bytes / report.rates.bytes)
        assert ours.floor(report.rates) == floor > 0
        assert rows["fused_moe_fwd", tokens, "tileops-0.1"].skipped.startswith("not installed")
    assert report.versions["torch"] == torch.__version__

    from tileops.workloads import plot

    plot.draw(report, files[2])
    drawn = files[2].read_text()
    assert drawn.startswith("<?xml")
    report.rows = [dataclasses.replace(row, microseconds=math.nan) for row in report.rows]
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.draw(report, files[2])


def test_a_wrong_peer_is_not_timed(monkeypatch):
    layer = Layer("small", **SMALL)
    from tileops.workloads.peers import torch_peer

    step = verify.steps([manifest.Case(name="small", source="x", layer=layer)], [4], ["zipf"])[0]
    args = step, "fused_moe_fwd", "cpu", ["torch"], None, torch.bfloat16
    monkeypatch.setattr(
        torch_peer, "prepare", lambda problem: lambda: ((1.1 * problem.exact()[0]).bfloat16(),)
    )
    ready, rows = bench._unit(*args)
    assert ready is None
    assert rows is not None
    ours, peer = rows
    assert ours.skipped is None
    assert peer.skipped.startswith("wrong: relative error")
    assert math.isnan(peer.microseconds)


@pytest.mark.parametrize("op", ["moe_permute_align_fwd", "moe_pre_permute_fwd"])
def test_a_peer_may_have_the_routes_of_an_expert_in_another_order(op):
    layer = Layer("small", **SMALL)
    (problem,) = PROBLEMS[op](Draw(layer, 40, torch.bfloat16, CPU, "zipf"))
    right = problem.exact()
    places = right[0] if op == "moe_permute_align_fwd" else right[2]
    experts = problem.inputs.get("topk_ids", problem.inputs.get("local_expert_ids")).flatten()
    busiest = (experts == experts.mode().values).nonzero().flatten()

    def exchanged(one, other):
        """Return the outputs with two routes in each other's places."""
        outputs = [x.clone() for x in right]
        if op == "moe_permute_align_fwd":
            at = [(outputs[0] == route).nonzero().item() for route in (one, other)]
            outputs[0][at] = outputs[0][at[::-1]]
        else:
            at = [outputs[2].flatten()[route].item() for route in (one, other)]
            outputs[0][at] = outputs[0][at[::-1]]
            outputs[2].flatten()[[one, other]] = outputs[2].flatten()[[other, one]]
        return tuple(outputs)

    ours, of_peer = verify.comparison(problem), verify.comparison(problem, of_peer=True)
    assert places.numel() > len(busiest) > 1
    same_expert = exchanged(int(busiest[0]), int(busiest[1]))
    assert of_peer(right)[0] == of_peer(same_expert)[0] == 0
    assert ours(right)[0] == 0
    assert ours(same_expert)[0] == math.inf
    stranger = int((experts != experts.mode().values).nonzero()[0])
    assert of_peer(exchanged(int(busiest[0]), stranger))[0] == math.inf
    lost = [x.clone() for x in right]
    lost[0][0] = lost[0][1]
    assert of_peer(tuple(lost))[0] == math.inf


def test_a_wrong_result_of_ours_is_not_timed(monkeypatch):
    layer = Layer("small", **SMALL)
    step = verify.steps([manifest.Case(name="small", source="x", layer=layer)], [4], ["zipf"])[0]
    forward = MoEPrePermuteFwdOp.forward

    def broken(self, **inputs):
        rows, ends, inverse = forward(self, **inputs)
        return (rows + 1 if self.target == "cpu" else rows), ends, inverse

    monkeypatch.setattr(MoEPrePermuteFwdOp, "forward", broken)
    args = step, "moe_pre_permute_fwd", "cpu", [], None, torch.bfloat16
    _, rows = bench._unit(*args)
    assert rows is not None
    (row,) = rows
    assert str(row.skipped).startswith("wrong")
    assert row.failed


def test_a_step_that_dies_costs_only_itself(monkeypatch):
    monkeypatch.setitem(bench.AT_ONCE, "cpu", 3)
    monkeypatch.setattr(bench, "_rates", known_rates)
    layer = Layer("small", **SMALL)
    case = manifest.Case(name="small", source="x", layer=layer)
    steps = verify.steps([case], [2, 3, 4], ["zipf"], ["fused_topk_fwd"])
    # the second asks for an op that nothing has; the third ends its process
    steps[1] = dataclasses.replace(steps[1], ops=("no_such_op",))
    steps.insert(2, Dying(case, 9, "zipf", ("fused_topk_fwd",)))
    rows = list(bench.bench(steps, "cpu"))[-1][0].rows
    assert [(row.tokens, row.failed) for row in rows] == [
        (2, False),
        (3, True),
        (9, True),
        (4, False),
    ]
    assert "its process was ended" in str(rows[2].skipped)


def known_rates(target, dtype):
    yield report.Rates(1e12, 1e11), target, verify.bytes_there(CPU)


class Dying(verify.Step):
    """A step that ends the process which unpacks it."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_unit_is_timed_alone(monkeypatch, tmp_path):
    """Of two batches, the units of the first prepare, then are timed in turn, then the second."""
    monkeypatch.setitem(bench.AT_ONCE, "cpu", 2)
    monkeypatch.setattr(bench, "_rates", known_rates)
    monkeypatch.setenv("UNITS_LOG", str(tmp_path / "log"))
    case = manifest.Case(name="small", source="x", layer=Layer("small", **SMALL))
    ops = "fused_topk_fwd", "moe_pre_permute_fwd"
    steps = [Logged(case, 2, "zipf", ops[:1]), Logged(case, 3, "zipf", ops)]
    reports, found = zip(*bench.bench(steps, "cpu"), strict=True)
    assert sorted(map(len, found)) == [0, 1, 2]
    assert [row.op for row in reports[-1].rows] == [*ops[:1], *ops]
    assert all(row.skipped is None for row in reports[-1].rows)
    events, units = zip(*map(str.split, (tmp_path / "log").read_text().splitlines()), strict=True)
    begin = 0
    for size in (2, 1):
        turns = begin + 2 * size
        assert sorted(events[begin:turns]) == ["prepared"] * size + ["preparing"] * size
        timed = turns + 2 * size
        assert events[turns:timed] == ("timing", "timed") * size
        assert units[turns:timed:2] == units[turns + 1 : timed : 2]
        assert set(units[turns:timed]) == set(units[begin:turns])
        begin = timed
    assert events[begin:] == ()


class Logged(verify.Step):
    """A step whose process writes down when it prepares and when it times."""

    def __reduce__(self):
        return logged, (self.case, self.tokens, self.routing, self.ops)


def logged(*args):
    def note(what):
        with open(os.environ["UNITS_LOG"], "a") as log:
            log.write(f"{what} {os.getpid()}\n")

    def noting(function, before=None, after=None):
        def call(*args):
            if before:
                note(before)
            found = function(*args)
            if after:
                note(after)
            return found

        return call

    comparison = bench.comparison
    bench.too_large = noting(bench.too_large, before="preparing")
    bench.comparison = lambda *args: noting(comparison(*args), after="prepared")
    timing.microseconds = noting(timing.microseconds, "timing", "timed")
    return verify.Step(*args)


def test_the_peer_torch_agrees_with_the_reference():
    for name in ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "llama-4-maverick"):
        layer = dataclasses.replace(manifest.layers()[name], hidden_size=64, ffn_size=32)
        from tileops.workloads.peers import torch_peer

        timed = set()
        for op, problems in PROBLEMS.items():
            for problem in problems(Draw(layer, 6, torch.bfloat16, CPU)):
                if (call := torch_peer.prepare(problem)) is not None:
                    error, limit = verify.comparison(problem)(call())
                    assert error <= limit, (name, op)
                    timed.add(op)
        assert {"fused_moe_fwd", "fused_moe_experts_fwd", "fused_topk_fwd"} <= timed


def test_inputs_are_rotated_past_the_cache():
    layer = Layer("small", **SMALL)
    found = list(PROBLEMS["fused_topk_fwd"](Draw(layer, 4, torch.bfloat16, CPU)))
    assert bench._sets(found, CPU) == bench.MAX_SETS
    large = dataclasses.replace(found[0], num_bytes=timing.cache_bytes(CPU))
    assert bench._sets([large], CPU) == bench.CACHES
    assert bench._sets([dataclasses.replace(large, num_bytes=1e12)], CPU) == 1


def test_time_of_a_call_on_a_cpu(monkeypatch):
    import time

    # a GPU beside it has no part in it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    spent, how = timing.microseconds([lambda: time.sleep(0.002)] * 2, CPU)
    assert 2000 <= spent < 20_000
    assert how == "cpu"


def test_only_the_default_times_both_ways(monkeypatch):
    timed = []

    def event_time(calls):
        timed.append([call() for call in calls])
        return 10.0

    replayed = types.SimpleNamespace(replay=lambda: "replay")
    monkeypatch.setattr(timing, "_event_time", event_time)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: replayed)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    calls = [lambda: "a", lambda: "b"]
    for graph, expected, ways in (
        (True, (5.0, "graph"), [["replay"]]),
        (False, (10.0, "eager"), [["a", "b"]]),
        (None, (5.0, "graph"), [["a", "b"], ["replay"]]),
    ):
        assert timing.microseconds(calls, torch.device("cuda"), graph) == expected
        assert timed == ways
        timed.clear()


def test_units_are_packed_into_batches_with_room_for_them():
    assert bench._batches([1, 5, 3, 2, 0], 6, 3) == [[1, 0, 4], [2, 3]]
    assert bench._batches([1, 1, 1], 6, 1) == [[0], [1], [2]]
    assert bench._batches([], 6, 2) == []


@pytest.mark.parametrize(("rate", "size"), [(1e9, 256), (1e11, 1024), (1e13, 2048)])
def test_the_rate_of_a_cpu_is_that_of_a_product_that_takes_a_while(monkeypatch, rate, size):
    sizes = []

    def product_rate(size, device, dtype):
        sizes.append(size)
        return rate * (2 if dtype == torch.float32 else 1)

    monkeypatch.setattr(timing, "_product_rate", product_rate)
    assert timing._cpu_rate(torch.bfloat16) == rate
    assert sizes[-1] == size
    assert timing.dense_rate(CPU, torch.bfloat16) == 2 * rate
