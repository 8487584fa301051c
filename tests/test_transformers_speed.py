"""The benchmark inside Transformers, on a model of tiny sizes."""

import json
import re

import pytest

from tileops.moe import FusedMoEExpertsFwdOp
from tileops.workloads import timing, transformers_speed

pytest.importorskip("transformers")
TINY = transformers_speed.QWEN3_30B_A3B | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(transformers_speed, "REPEATS", 1)


def run(*arguments, device="cpu"):
    sizes = ["--layers", "1", "--prefill", "70", "--decode", "2", "--steps", "3"]
    return transformers_speed.main([*sizes, "--device", device, *arguments], TINY)


def test_rows_of_every_part(kernels, device, tmp_path, capsys):
    file = tmp_path / "speed.json"
    assert run("--json", str(file), device=device) == 0
    content = json.loads(file.read_text())
    rows = content["rows"]
    assert [(row["part"], row["tokens"], row["by"]) for row in rows] == [
        (part, tokens, by)
        for part, tokens in [("experts", 70), ("experts", 2), ("prefill", 70), ("decode", 2)]
        for by in ("tileops", "grouped_mm")
    ]
    assert all(row["failed"] is None for row in rows)
    assert all(row["error"] < 0.02 for row in rows if row["part"] == "experts")
    assert content["model"]["num_hidden_layers"] == 1
    assert {"torch", "tilelang", "transformers"} <= content["versions"].keys()
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_a_failure_is_a_row_and_the_exit_status(monkeypatch, capsys):
    def fail(self, *args):
        raise ValueError("no such expert\nand more")

    monkeypatch.setattr(FusedMoEExpertsFwdOp, "forward", fail)
    assert run("--by", "tileops", "eager") == 1
    out = capsys.readouterr().out
    assert "ValueError: no such expert" in out
    assert "and more" not in out


def test_a_wrong_result_shows(monkeypatch, tmp_path):
    forward = FusedMoEExpertsFwdOp.forward

    def doubled(self, output, *args):
        return forward(self, output, *args).mul_(2)

    monkeypatch.setattr(FusedMoEExpertsFwdOp, "forward", doubled)
    file = tmp_path / "speed.json"
    run("--by", "tileops", "--json", str(file))
    errors = [r["error"] for r in json.loads(file.read_text())["rows"] if r["part"] == "experts"]
    assert errors == pytest.approx([1, 1], abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "tileops", "grouped_nm"], "--by must be of .*grouped_mm.*, got grouped_nm"),
        (["--json", "no_such_folder/speed.json"], "--json must be in a folder that exists"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_built(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr(transformers_speed, "build", None)
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert re.search(message, capsys.readouterr().err)


def test_a_difference_below_the_noise_is_no_time():
    spans = iter([-1.0, *range(24)])  # the first one says to take them all
    assert transformers_speed._positive_median(lambda: next(spans)) == 11
    with pytest.raises(RuntimeError, match="not measured"):
        transformers_speed._positive_median(lambda: -1.0)


def test_the_layer_is_the_published_one():
    from tileops.workloads.manifest import layers

    layer, sizes = layers()["qwen3-30b-a3b"], transformers_speed.QWEN3_30B_A3B
    assert layer.hidden_size == sizes["hidden_size"]
    assert layer.ffn_size == sizes["moe_intermediate_size"]
    assert (layer.num_experts, layer.top_k) == (sizes["num_experts"], sizes["num_experts_per_tok"])
