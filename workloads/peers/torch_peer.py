"""Plain torch: ``torch._grouped_mm`` on a GPU, a loop over experts on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops.workloads.draw import Outputs
from tileops.workloads.grouped_gemm import activate
from tileops.workloads.layer import eager_experts
from tileops.workloads.problems import Problem


def prepare(problem: Problem) -> Callable[[], Outputs] | None:
    """Return the call, or None for an op that torch has no fast form of."""
    make = _CALLS.get(problem.op)
    return None if make is None else make(problem.settings, **problem.inputs)


def _route(settings, logits, bias):
    scores = logits.float()
    softmax = settings["scoring_func"] == "softmax"
    scores = scores.softmax(-1) if softmax else scores.sigmoid()
    ranked = scores if bias is None else scores + bias
    if (groups := settings["num_expert_group"]) > 1:
        parts = ranked.unflatten(-1, (groups, -1))
        best = parts.topk(1 if bias is None else 2, -1).values.sum(-1)
        kept = best.topk(settings["topk_group"], -1).indices
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        ranked = parts.masked_fill(~mask[..., None], -torch.inf).flatten(1)
    ids = ranked.topk(settings["top_k"], -1).indices
    weights = scores.gather(-1, ids)
    if settings["renormalize"]:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * settings["routed_scaling_factor"], ids.int()


def _sort(ids, num_experts):
    """Return the routes in expert order, and where each expert's end."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(num_experts, device=ids.device), right=True)
    return order, ends.int()


def _grouped(rows, weight, ends, bias):
    out = torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    if bias is None:
        return out
    lengths = ends.diff(prepend=ends.new_zeros(1))
    return out + bias.repeat_interleave(lengths, 0, output_size=rows.shape[0])


def _grouped_experts(x, w_gate_up, w_down, weights, ids, activation, b_gate_up, b_down):
    order, ends = _sort(ids, w_down.shape[0])
    inner = activate(_grouped(x[order // ids.shape[1]], w_gate_up, ends, b_gate_up), activation)
    down = _grouped(inner, w_down, ends, b_down)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    routed = down[inverse].unflatten(0, ids.shape)
    return (routed * weights[..., None]).sum(1).to(x.dtype)


def _experts(settings, hidden_states, w_gate_up, w_down, topk_weights, topk_ids, **other):
    activation = settings.get("activation", "silu_and_mul")
    biases = other.get("b_gate_up"), other.get("b_down")
    args = hidden_states, w_gate_up, w_down, topk_weights, topk_ids, activation, *biases
    if int(topk_ids.max()) >= w_down.shape[0]:
        return None
    if hidden_states.device.type == "cpu":
        return lambda: (eager_experts(*args),)
    return lambda: (_grouped_experts(*args),)


def _layer(settings, hidden_states, gating_output, w_gate_up, w_down, **other):
    run = eager_experts if hidden_states.device.type == "cpu" else _grouped_experts

    def call():
        routes = _route(settings, gating_output, other["correction_bias"])
        biases = other["b_gate_up"], other["b_down"]
        args = hidden_states, w_gate_up, w_down, *routes, settings["activation"], *biases
        return (run(*args),)

    return call


def _gemm(settings, a, b, layout_metadata, bias):
    if a.device.type == "cpu":
        return None
    activation = settings["activation"]

    def call():
        out = _grouped(a, b, layout_metadata, bias)
        return (out if activation is None else activate(out, activation),)

    return call


def _pre_permute(settings, hidden_states, local_expert_ids):
    ids = local_expert_ids
    if int(ids.max()) >= settings["num_local_experts"]:
        return None

    def call():
        order, ends = _sort(ids, settings["num_local_experts"])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=ids.device)
        return hidden_states[order // ids.shape[1]], ends, inverse.int()

    return call


def _post_permute(settings, expert_output, topk_weights, inverse_indices):
    if bool((inverse_indices < 0).any()):
        return None

    def call():
        rows = expert_output[inverse_indices].unflatten(0, topk_weights.shape)
        return ((rows * topk_weights[..., None]).sum(1).to(expert_output.dtype),)

    return call


def _topk(settings, gating_output, correction_bias):
    return lambda: _route(settings, gating_output, correction_bias)


def _shared(settings, hidden_states, w_gate_up, w_down):
    def call():
        gate, up = (hidden_states @ w_gate_up.T).chunk(2, -1)
        return ((torch.nn.functional.silu(gate) * up) @ w_down.T,)

    return call


_CALLS = {
    "fused_topk_fwd": _topk,
    "moe_pre_permute_fwd": _pre_permute,
    "moe_post_permute_fwd": _post_permute,
    "moe_grouped_gemm_fwd": _gemm,
    "fused_moe_experts_fwd": _experts,
    "indexed_expert_mlp_fwd": _experts,
    "fused_moe_fwd": _layer,
    "shared_expert_mlp_fwd": _shared,
}
