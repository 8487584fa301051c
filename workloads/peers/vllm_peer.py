"""vLLM: its Triton kernels, through ``fused_experts``.

Follows the signatures of vLLM 0.33.0: ``fused_moe.py``, ``activation.py`` and ``config.py`` in
``vllm/model_executor/layers/fused_moe``. It takes the weights in our order and sorts the routes in
each call; tile sizes are those that it ships for the GPU, or else its defaults.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops.workloads.draw import Outputs
from tileops.workloads.problems import Problem

_ACTIVATIONS = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "swigluoai": "swigluoai"}


def prepare(problem: Problem) -> Callable[[], Outputs] | None:
    """Return the call, or None for any op but the experts."""
    if problem.op != "fused_moe_experts_fwd":
        return None
    from vllm.model_executor.layers.fused_moe import MoEActivation, fused_experts
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config

    inputs = problem.inputs
    b_gate_up, b_down = inputs["b_gate_up"], inputs["b_down"]
    biased = b_gate_up is not None or b_down is not None
    expert_map = _expert_map(inputs["topk_ids"], inputs["w_down"].shape[0])
    arguments = {
        "hidden_states": inputs["hidden_states"],
        "w1": inputs["w_gate_up"],
        "w2": inputs["w_down"],
        "topk_weights": inputs["topk_weights"],
        "topk_ids": inputs["topk_ids"],
        "activation": MoEActivation(_ACTIVATIONS[problem.settings["activation"]]),
        "global_num_experts": -1 if expert_map is None else len(expert_map),
        "expert_map": expert_map,
        "quant_config": biased_moe_quant_config(b_gate_up, b_down) if biased else None,
    }
    return lambda: (fused_experts(**arguments),)


def _expert_map(ids: torch.Tensor, num_local: int) -> torch.Tensor | None:
    """Return where each expert is, -1 for elsewhere, or None if all that tokens choose are here."""
    if (total := int(ids.max()) + 1) <= num_local:
        return None
    places = torch.arange(total, dtype=torch.int32, device=ids.device)
    return places.masked_fill_(places >= num_local, -1)
