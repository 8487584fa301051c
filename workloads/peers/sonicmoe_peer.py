"""SonicMoE: its forward for given routes, ``moe_general_routing_inputs``.

Follows the signature of sonic-moe 0.1.2.post1 (``sonicmoe/functional/__init__.py``). Each call
sorts the routes. Its GEGLU is that of the tanh approximation, which ours is not.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from tileops.workloads.draw import Outputs
from tileops.workloads.peers import contiguous_experts
from tileops.workloads.problems import Problem


def prepare(problem: Problem) -> Callable[[], Outputs] | None:
    """Return the call, or None for other ops and activations, biases and dropped routes."""
    inputs, activation = problem.inputs, problem.settings.get("activation")
    if problem.op != "fused_moe_experts_fwd" or activation != "silu_and_mul":
        return None
    if not contiguous_experts(problem):
        return None
    from sonicmoe import moe_general_routing_inputs
    from sonicmoe.enums import ActivationType

    ids = inputs["topk_ids"]
    num_tokens, top_k = ids.shape
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=ids.device)
    arguments = {
        "x": inputs["hidden_states"],
        "router_scores": inputs["topk_weights"].flatten(),
        "token_indices": tokens.repeat_interleave(top_k),
        "expert_indices": ids.flatten(),
        # experts come last in the shapes and first in memory
        "w1": _interleaved(inputs["w_gate_up"]).permute(1, 2, 0),
        "b1": None,
        "w2": inputs["w_down"].permute(1, 2, 0),
        "b2": None,
        "E": inputs["w_down"].shape[0],
        "stream_id": 0,  # not used: it runs on the current stream
        "activation_type": ActivationType.SWIGLU,
        "is_inference_mode_enabled": True,
    }
    return lambda: (moe_general_routing_inputs(**arguments)[0],)


_made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Return gate and up rows in turn; problems that share the weight share the copy."""
    if (made := _made.get(id(weight))) is None:
        made = _made[id(weight)] = torch.stack(weight.chunk(2, 1), 2).flatten(1, 2)
    return made
