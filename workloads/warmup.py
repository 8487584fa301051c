"""Warming up: the kernels that the cases of a manifest need, found without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from typing_extensions import override

from tileops.compilation import Build, collecting
from tileops.kernels.cpu import compiler
from tileops.kernels.cuda.device import COMPILE_TARGET
from tileops.targets import NoKernelError
from tileops.workloads import fp8_layer, quantized_layer
from tileops.workloads.draw import Draw, Outputs
from tileops.workloads.layer import uncommitted
from tileops.workloads.problems import PROBLEMS
from tileops.workloads.verify import Step

GPU = COMPILE_TARGET["arch"]

TOKENS = tuple(2**i for i in range(18))
"""Which kernel serves a call depends on the number of tokens: these find all that there are."""


class Shapes(Draw):
    """A draw whose tensors have shapes and no values: what nothing reads takes no memory."""

    def _blank(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return uncommitted(shape, dtype or self.dtype, self.device)

    @cached_property
    @override
    def tokens(self) -> dict[str, torch.Tensor]:
        layer, count = self.layer, self.num_tokens
        return {
            "hidden_states": self._blank(count, layer.hidden_size),
            "gating_output": self._blank(count, layer.num_experts, dtype=torch.float32),
        }

    @cached_property
    @override
    def weights(self) -> dict[str, torch.Tensor | None]:
        return self.layer.empty_weights(self.dtype, self.device)

    @cached_property
    @override
    def fp8(self) -> dict[str, torch.Tensor]:
        return fp8_layer.empty(self.layer, self.device)

    @cached_property
    @override
    def fp8_of_all(self) -> dict[str, torch.Tensor]:
        return self.fp8

    @override
    def quantised(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = *x.shape[:-1], x.shape[-1] // 128
        q = self._blank(*x.shape, dtype=torch.float8_e4m3fn)
        return q, self._blank(*scales, dtype=torch.float32)

    @override
    def slab(self, width: int) -> torch.Tensor:
        layer = self.layer
        height = -(-self.num_tokens * layer.top_k // layer.num_experts)
        return self._blank(layer.local_experts, height, width)

    @cached_property
    @override
    def quantized(self) -> dict[str, torch.Tensor]:
        return quantized_layer.empty(self.layer, self.dtype, self.device)

    @cached_property
    @override
    def routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.num_tokens, self.layer.top_k
        return self._blank(*shape, dtype=torch.float32), self._blank(*shape, dtype=torch.int32)

    @cached_property
    @override
    def chosen(self) -> torch.Tensor:
        return self.routes[1].flatten()

    @cached_property
    @override
    def rows(self) -> Outputs:
        count = self.chosen.numel()
        return (
            self._blank(count, self.layer.hidden_size),
            self._blank(self.layer.local_experts, dtype=torch.int32),
            self._blank(count, dtype=torch.int32),
        )

    @cached_property
    @override
    def inner_rows(self) -> torch.Tensor:
        return self._blank(self.chosen.numel(), self.layer.ffn_size)

    @property
    @override
    def output(self) -> torch.Tensor:
        return self._blank(*self.tokens["hidden_states"].shape)

    @cached_property
    @override
    def shared_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        size, hidden = self.layer.shared_size or 0, self.layer.hidden_size
        return self._blank(2 * size, hidden), self._blank(hidden, size)

    @property
    @override
    def num_chosen_experts(self) -> int:
        return min(self.layer.local_experts, self.chosen.numel())


def architectures() -> list[str]:
    """Return what kernels can be compiled for: the GPU's, and the levels of CPUs like this one."""
    return [GPU, *(level.name for level in compiler.levels())]


def needed(
    steps: Sequence[Step],
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Build], dict[str, str]]:
    """List the builds that the calls of some steps need, whatever the routing.

    Router logits may come in float32 or in the tokens' dtype: both are listed.

    Args:
        steps: What is going to run.
        arch: One of `architectures`.
        dtype: Of tokens and weights.

    Returns:
        The builds, each once, and for each operator that the target cannot run a reason.
    """
    target = "cuda" if arch == GPU else "cpu"
    refused: dict[str, str] = {}
    with collecting(arch) as builds:
        for step in steps:
            draw = Shapes(step.case.layer, step.tokens, dtype, torch.device("cpu"))
            for op in step.ops:
                for problem in PROBLEMS[op](draw):
                    calls = [problem]
                    logits = problem.inputs.get("gating_output")
                    if logits is not None:
                        narrow = uncommitted(tuple(logits.shape), dtype, logits.device)
                        inputs = {**problem.inputs, "gating_output": narrow}
                        calls.append(replace(problem, inputs=inputs))
                    try:
                        for call in calls:
                            call.prepared(target)()
                    except NoKernelError as error:
                        refused[op] = str(error)
    return builds, refused
