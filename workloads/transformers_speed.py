"""Speed inside Transformers: a model on our experts, beside the implementations that it has.

`python -m tileops.workloads.transformers_speed --json FILE` takes a few layers of Qwen3-30B-A3B
with random weights in bfloat16, and measures three parts of each implementation: the experts of a
layer by themselves, the prefill of a prompt, and a step of greedy decoding in `generate`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tileops.integrations.transformers import register
from tileops.workloads.accuracy import relative_error
from tileops.workloads.report import machine, today, versions
from tileops.workloads.timing import microseconds

QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
PROMPT = 128
"""Tokens that each sequence has when decoding begins."""
REPEATS = 5
MOST_REPEATS = 25
"""Of a step whose first repeats give no time above 0."""
MOST_CHECKED = 64


@dataclass(frozen=True)
class Row:
    """One implementation on one part.

    Attributes:
        part: ``"experts"`` of one layer, ``"prefill"`` of one prompt, or ``"decode"``, one step.
        tokens: That the part works on: a prompt's, or one of each sequence.
        by: The implementation's name in Transformers.
        milliseconds: Median time.
        error: Of ``"experts"``: relative error of the first tokens against float64.
        failed: The error in the place of a time, or None.
    """

    part: str
    tokens: int
    by: str
    milliseconds: float | None = None
    error: float | None = None
    failed: str | None = None


def build(sizes: dict[str, Any], layers: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a Qwen3-MoE model of these sizes with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=layers, **sizes)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def run(
    model: Any,
    implementations: Sequence[str],
    prefill: Sequence[int],
    decode: Sequence[int],
    steps: int,
    static_cache: bool = False,
) -> Iterator[Row]:
    """Yield a row for each part, size and implementation.

    Args:
        model: What ``build`` returns.
        implementations: Names that ``set_experts_implementation`` takes.
        prefill: Lengths of the prompts to measure.
        decode: Numbers of sequences to decode at a time.
        steps: Decoding steps to measure in one call of ``generate``.
        static_cache: Decode with a static cache, for which ``generate`` compiles the model on GPUs.
    """
    register()
    cache = {"cache_implementation": "static"} if static_cache else {}
    for tokens in dict.fromkeys((*prefill, *decode)):
        experts, exact = _experts(model, tokens)
        take = partial(_time_and_error, model, experts, exact)
        yield from _rows("experts", tokens, implementations, model, take)
    for tokens in prefill:
        call = partial(model, _prompt(model, 1, tokens), logits_to_keep=1)
        yield from _rows("prefill", tokens, implementations, model, partial(_time, model, call))
    for count in decode:
        take = partial(_step_time, model, _prompt(model, count, PROMPT), steps, cache)
        yield from _rows("decode", count, implementations, model, take)


def _rows(
    part: str,
    tokens: int,
    implementations: Sequence[str],
    model: Any,
    take: Callable[[], tuple[float, float | None]],
) -> Iterator[Row]:
    for name in implementations:
        model.set_experts_implementation(name)
        try:
            with torch.inference_mode():
                row = Row(part, tokens, name, *take())
        except Exception as error:
            lines = str(error).splitlines() or [""]
            row = Row(part, tokens, name, failed=f"{type(error).__name__}: {lines[0]}")
        yield row


def _experts(model: Any, tokens: int) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """Return a function that calls the first layer's experts on random tokens, or the first few.

    And what the first few give exactly.
    """
    block, config = model.model.layers[0].mlp, model.config
    options: Any = {"device": model.device, "dtype": model.dtype}
    hidden = torch.randn(tokens, config.hidden_size, **options)
    logits = torch.randn(tokens, config.num_experts, device=model.device)
    weights, ids = logits.softmax(-1).topk(config.num_experts_per_tok)
    weights = (weights / weights.sum(-1, keepdim=True)).to(model.dtype)

    @torch.inference_mode()
    def call(count: int = tokens) -> torch.Tensor:
        return block.experts(hidden[:count], ids[:count], weights[:count])

    few = slice(MOST_CHECKED)
    return call, _exact(block.experts, hidden[few], ids[few], weights[few])


@torch.inference_mode()
def _exact(
    experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return what the experts give in float64, on the same tokens, weights and routes."""
    out = torch.zeros_like(hidden, dtype=torch.float64)
    for expert in ids.unique().tolist():
        rows, choice = torch.where(ids == expert)
        both = hidden[rows].double() @ experts.gate_up_proj[expert].double().T
        gate, up = both.chunk(2, dim=-1)
        result = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].double().T
        out.index_add_(0, rows, result * weights[rows, choice, None].double())
    return out


def _time(model: Any, call: Callable[..., object]) -> tuple[float, None]:
    return microseconds([call], model.device, graph=False)[0] / 1000, None


def _time_and_error(
    model: Any, call: Callable[..., torch.Tensor], exact: torch.Tensor
) -> tuple[float, float]:
    return _time(model, call)[0], relative_error(call(MOST_CHECKED), exact)


def _prompt(model: Any, count: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (count, length), device=model.device)


def _step_time(
    model: Any, ids: torch.Tensor, steps: int, cache: dict[str, str]
) -> tuple[float, None]:
    """Return what ``steps`` further tokens cost each; one token's call has the prefill and rest."""

    def generate(tokens: int) -> float:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        begin = time.perf_counter()
        out = model.generate(ids, do_sample=False, **length, **cache)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        assert out.shape[1] == ids.shape[1] + tokens
        return time.perf_counter() - begin

    generate(1)
    generate(steps + 1)
    return 1000 * _positive_median(lambda: generate(steps + 1) - generate(1)) / steps, None


def _positive_median(take: Callable[[], float]) -> float:
    """Return the median of differences of times, of more of them if noise is the larger part."""
    spans = [take() for _ in range(REPEATS)]
    if median(spans) <= 0:
        spans += [take() for _ in range(MOST_REPEATS - REPEATS)]
    if median(spans) <= 0:
        raise RuntimeError("not measured: the steps take less than the noise; give more --steps")
    return median(spans)


def main(arguments: Sequence[str] | None = None, sizes: dict[str, Any] = QWEN3_30B_A3B) -> int:
    """Measure, print the rows as they come, and write them; return 1 if one of ours failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tileops.workloads.transformers_speed", description=(__doc__ or "").strip()
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--layers", type=int, default=4, help="default: 4")
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096], help="default: 4096")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64], help="default: 1 8 64")
    parser.add_argument("--steps", type=int, default=32, help="of decoding; default: 32")
    parser.add_argument(
        "--by",
        nargs="+",
        default=["tileops", "grouped_mm"],
        help="implementations; default: tileops grouped_mm, which generate() replaces by batched_mm"
        " for decoding on a GPU",
    )
    parser.add_argument(
        "--static-cache", action="store_true", help="decode as generate() compiles it on a GPU"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(arguments)
    _check(parser, asked)

    device = torch.device(asked.device)
    torch.manual_seed(0)
    model = build(sizes, asked.layers, torch.bfloat16, device)
    parts = asked.by, asked.prefill, asked.decode, asked.steps, asked.static_cache
    rows = []
    print(f"{'part':<8}  {'tokens':>6}  {'implementation':<14}  {'ms':>9}  {'error':>8}")
    for row in run(model, *parts):
        rows.append(row)
        spent = "-" if row.milliseconds is None else f"{row.milliseconds:.3f}"
        error = "-" if row.error is None else f"{row.error:.1e}"
        line = f"{row.part:<8}  {row.tokens:>6}  {row.by:<14}  {spent:>9}  {error:>8}"
        print(line + (f"  {row.failed}" if row.failed else ""), flush=True)
    if asked.json:
        given = sys.argv[1:] if arguments is None else arguments
        found = {
            "command": " ".join([parser.prog, *map(str, given)]),
            "machine": machine(device),
            "versions": versions() | {"transformers": __import__("transformers").__version__},
            "date": today(),
            "model": {**sizes, "num_hidden_layers": asked.layers, "dtype": "bfloat16"},
            "static_cache": asked.static_cache,
            "steps": asked.steps,
            "rows": [asdict(row) for row in rows],
        }
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row.failed and row.by == "tileops" for row in rows))


def _check(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Refuse what would fail after the model is built, or after everything is measured."""
    register()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    known = ["eager", *ALL_EXPERTS_FUNCTIONS]
    for name in asked.by:
        if name not in known:
            parser.error(f"--by must be of {', '.join(sorted(known))}, got {name}")
    if asked.json and not asked.json.absolute().parent.is_dir():
        parser.error(f"--json must be in a folder that exists, got {asked.json}")
    if asked.steps < 1:
        parser.error(f"--steps must be at least 1, got {asked.steps}")


if __name__ == "__main__":
    sys.exit(main())
