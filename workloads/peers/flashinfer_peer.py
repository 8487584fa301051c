"""FlashInfer: ``cutlass_fused_moe``, tuned for the number of tokens.

Follows the signatures of flashinfer-python 0.7.4: ``fused_moe/core.py`` and
``autotuner/autotuner.py``. Each call sorts the routes. Its results may differ from run to run, as
the last step adds experts up in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from tileops.workloads.draw import Outputs
from tileops.workloads.problems import Problem

# by name: plain SwiGLU with an alpha, beta or limit is swigluoai's
_ACTIVATIONS = {"silu_and_mul": "Swiglu", "gelu_and_mul": "Geglu", "swigluoai": "Swiglu"}


def prepare(problem: Problem) -> Callable[[], Outputs] | None:
    """Return the call, or None for any op but the experts."""
    if problem.op != "fused_moe_experts_fwd":
        return None
    from flashinfer.autotuner import autotune
    from flashinfer.fused_moe import ActivationType, cutlass_fused_moe

    inputs, activation = problem.inputs, problem.settings["activation"]
    hidden, ids, w_down = inputs["hidden_states"], inputs["topk_ids"], inputs["w_down"]
    interleaved = activation == "swigluoai"
    arguments = {
        "input": hidden,
        "token_selected_experts": ids,
        "token_final_scales": inputs["topk_weights"],
        "fc1_expert_weights": _up_first(inputs["w_gate_up"], interleaved),
        "fc2_expert_weights": w_down,
        "output_dtype": hidden.dtype,
        "quant_scales": None,
        "fc1_expert_biases": _up_first(inputs["b_gate_up"], interleaved),
        "fc2_expert_biases": inputs["b_down"],
        "output": (out := torch.empty_like(hidden)),
        # routes to experts of further ranks are dropped
        "ep_size": int(ids.max()) // w_down.shape[0] + 1,
        "activation_type": ActivationType[_ACTIVATIONS[activation]],
    }
    if interleaved:
        one = hidden.new_ones(w_down.shape[0], dtype=torch.float32)
        arguments |= {"swiglu_alpha": 1.702 * one, "swiglu_beta": one, "swiglu_limit": 7.0 * one}
    buckets = (len(hidden),)

    def call(tune: bool = False) -> Outputs:
        # what was tuned for a set of buckets is found only under the same set
        with autotune(tune, tuning_buckets=buckets):
            cutlass_fused_moe(**arguments)
        return (out,)

    call(tune=True)
    return call


_made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def _up_first(rows: torch.Tensor | None, interleaved: bool) -> torch.Tensor | None:
    """Return the rows of up before those of gate; problems that share weights share the copy."""
    if rows is None:
        return None
    if (made := _made.get(id(rows))) is None:
        gate, up = (rows[:, 0::2], rows[:, 1::2]) if interleaved else rows.chunk(2, 1)
        made = _made[id(rows)] = torch.cat((up, gate), 1)
    return made
