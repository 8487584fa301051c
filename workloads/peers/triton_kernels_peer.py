"""triton_kernels, of Triton's repository: ``matmul_ogs`` with its fused SwiGLU.

Follows the signatures of Triton 3.5.1's: ``matmul_ogs.py``, ``routing.py``, ``topk.py`` and
``swiglu.py``, as they are in the folder ``vllm/third_party`` of vLLM 0.33.0, which may be put on
the path. Later versions lack ``routing``, and the package of this name on PyPI is another one. Each
call sorts the routes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

from tileops.workloads.draw import Outputs
from tileops.workloads.problems import Problem

# alpha and limit; an infinite limit clamps nothing
_SWIGLU = {"silu_and_mul": (1.0, math.inf), "swigluoai": (1.702, 7.0)}


def prepare(problem: Problem) -> Callable[[], Outputs] | None:
    """Return the call; None for other ops, gelu, dropped routes or a K that is no power of 2."""
    inputs, activation = problem.inputs, problem.settings.get("activation")
    if problem.op != "fused_moe_experts_fwd" or activation not in _SWIGLU:
        return None
    ids, (num_experts, _, width) = inputs["topk_ids"], inputs["w_down"].shape
    top_k = ids.shape[1]
    if top_k & (top_k - 1) or int(ids.max()) >= num_experts:
        return None
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.routing import routing_from_bitmatrix
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.topk import topk

    specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
    swiglu = FusedActivation(specs, _SWIGLU[activation], 2)
    hidden = inputs["hidden_states"]
    halves = activation == "silu_and_mul"
    w1, w2 = _by_columns(inputs["w_gate_up"], halves), _by_columns(inputs["w_down"], False)
    b1, b2 = inputs["b_gate_up"], inputs["b_down"]
    if halves:
        # its SwiGLU adds 1 to up, which the bias takes off before
        b1 = hidden.new_zeros(num_experts, 2 * width) if b1 is None else b1
        gate, up = b1.float().chunk(2, 1)
        b1 = torch.stack((gate, up - 1), 2).flatten(1)
    b1, b2 = (None if bias is None else bias.float() for bias in (b1, b2))
    # with given ids its top-k only gathers the scores, here the weights themselves
    scores = hidden.new_zeros(len(ids), num_experts, dtype=torch.float32)
    scores.scatter_(1, ids.long(), inputs["topk_weights"])

    def call() -> Outputs:
        weights, chosen, bits = topk(scores, top_k, apply_softmax=False, y_indx=ids)
        routes, gather, scatter = routing_from_bitmatrix(bits, weights, chosen, num_experts, top_k)
        inner = matmul_ogs(hidden, w1, b1, routes, gather_indx=gather, fused_activation=swiglu)
        out = matmul_ogs(inner, w2, b2, routes, scatter_indx=scatter, gammas=routes.gate_scal)
        return (out.view(hidden.shape),)

    return call


_made: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def _by_columns(weight: torch.Tensor, halves: bool) -> torch.Tensor:
    """Return the weight as `[E, K, N]`, gate and up interleaved; problems share what they can."""
    if (made := _made.get(id(weight))) is None:
        E, N, K = weight.shape
        made = _made[id(weight)] = weight.new_empty(E, K, N)
        rows = weight.unflatten(1, (2, -1)).transpose(1, 2) if halves else weight[:, :, None]
        made.view(E, K, *rows.shape[1:3]).copy_(rows.movedim(3, 1))
    return made
