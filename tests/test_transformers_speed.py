"""The benchmark inside Transformers, on a model of tiny sizes."""

import json

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
    forward = FusedMoEExpertsFwdOp.forward

    def fail(self, *args):
        if self.target != "reference":
            raise ValueError("no such expert\nand more")
        return forward(self, *args)

    monkeypatch.setattr(FusedMoEExpertsFwdOp, "forward", fail)
    assert run("--by", "tileops", "eager") == 1
    out = capsys.readouterr().out
    assert "ValueError: no such expert" in out
    assert "and more" not in out


def test_a_wrong_result_shows(monkeypatch, tmp_path):
    forward = FusedMoEExpertsFwdOp.forward

    def doubled(self, output, *args):
        result = forward(self, output, *args)
        return result if self.target == "reference" else result.mul_(2)

    monkeypatch.setattr(FusedMoEExpertsFwdOp, "forward", doubled)
    file = tmp_path / "speed.json"
    run("--by", "tileops", "--json", str(file))
    errors = [r["error"] for r in json.loads(file.read_text())["rows"] if r["part"] == "experts"]
    assert errors == pytest.approx([1, 1], abs=0.02)


def test_the_layer_is_the_published_one():
    from tileops.workloads.manifest import layers

    layer, sizes = layers()["qwen3-30b-a3b"], transformers_speed.QWEN3_30B_A3B
    assert layer.hidden_size == sizes["hidden_size"]
    assert layer.ffn_size == sizes["moe_intermediate_size"]
    assert (layer.num_experts, layer.top_k) == (sizes["num_experts"], sizes["num_experts_per_tok"])
