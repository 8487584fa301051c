"""The demonstration: one layer of Qwen3-30B-A3B, timed and checked from 1 to 64 tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tileops.moe import FusedMoEFwdOp, FusedTopKFwdOp
from tileops.workloads.accuracy import bound, relative_error
from tileops.workloads.layer import Layer, eager_experts
from tileops.workloads.manifest import layers
from tileops.workloads.timing import microseconds

LAYER = layers()["qwen3-30b-a3b"]
TOKENS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Row:
    """What was measured at one number of tokens.

    Attributes:
        target: The target that ran the layer.
        tokens: T.
        milliseconds: Median time of a call.
        error: Relative error against the reference.
        bound: The largest error allowed: see ``accuracy.bound``.
    """

    target: str
    tokens: int
    milliseconds: float
    error: float
    bound: float

    @property
    def accurate(self) -> bool:
        """Whether the error is within its bound; a NaN is not."""
        return self.error <= self.bound


def best_target() -> str:
    """Return ``"cuda"`` where the current device is a Hopper GPU, else ``"cpu"``."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return "cuda"
    return "cpu"


def run(
    target: str,
    tokens: Sequence[int] = TOKENS,
    progress: Callable[[str], None] = lambda message: None,
    layer: Layer = LAYER,
) -> Iterator[Row]:
    """Yield a row for each number of tokens.

    Args:
        target: The target to run on.
        tokens: Numbers of tokens, each at least 1.
        progress: Told in words what happens next.
        layer: The layer to run, in bfloat16.

    Raises:
        NoKernelError: If the target cannot run the layer here.
    """
    on_gpu = target == "cuda" or (target != "cpu" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    op = FusedMoEFwdOp(**layer.settings(), target=target)
    progress("drawing weights")
    weights = layer.weights(torch.bfloat16, device)
    inputs = layer.tokens(max(tokens), torch.bfloat16, device)

    def call(count: int) -> torch.Tensor:
        return op(**{name: rows[:count] for name, rows in inputs.items()}, **weights)

    progress(f"compiling or loading the kernels of target {target!r}")
    call(1)
    progress("computing the reference")
    exact = FusedMoEFwdOp(**layer.settings(), target="reference")(**inputs, **weights)
    eager = _eager(layer, inputs, weights)
    for count in tokens:
        progress(f"running {count} token{'s' if count > 1 else ''}")
        error = relative_error(call(count), exact[:count])
        spent, _ = microseconds([lambda count=count: call(count)], device, graph=False)
        yield Row(target, count, spent / 1000, error, bound(eager[:count], exact[:count]))


def _eager(layer: Layer, inputs: dict[str, torch.Tensor], weights: dict[str, Any]) -> torch.Tensor:
    """Run the layer as a plain torch loop over experts, in the tensors' own dtype."""
    settings, weights = layer.settings(), dict(weights)
    activation, bias = settings.pop("activation"), weights.pop("correction_bias")
    route = FusedTopKFwdOp(**settings, target="reference")
    topk_weights, topk_ids = route(inputs["gating_output"], bias)
    return eager_experts(
        inputs["hidden_states"],
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=activation,
        **weights,
    )
