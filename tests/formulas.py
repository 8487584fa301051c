"""The ops' formulas in float64, a route at a time, written apart from the references."""

import math

import torch


def rank(values):
    """Indices from best to worst: larger first, NaN last, equal values by index."""
    return sorted(
        range(len(values)),
        key=lambda i: (math.isnan(values[i]), -values[i] if values[i] == values[i] else 0, i),
    )


def route(logits, top_k, scoring, renormalize=False, groups=1, kept=1, scale=1.0, bias=None):
    """Weights (float64) and ids of every token."""
    all_weights, all_ids = [], []
    for row in logits.double().tolist():
        if scoring == "softmax":
            top = max(row) if not any(map(math.isnan, row)) else math.nan
            exps = [math.exp(x - top) if x - top == x - top else math.nan for x in row]
            scores, ranked = [x / sum(exps) for x in exps], row
        else:
            scores = [1 / (1 + math.exp(-x)) if x > -700 else math.exp(x) for x in row]
            ranked = (
                scores
                if bias is None
                else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
            )
        size = len(row) // groups
        group_scores = []
        for g in range(groups):
            members = ranked[g * size : (g + 1) * size]
            best = [members[i] for i in rank(members)]
            group_scores.append(sum(best[:2]) if bias is not None else best[0])
        chosen_groups = rank(group_scores)[:kept]
        allowed = [e for e in range(len(row)) if e // size in chosen_groups]
        ids = [allowed[i] for i in rank([ranked[e] for e in allowed])][:top_k]
        weights = [scores[e] for e in ids]
        if renormalize:
            total = sum(weights)
            weights = [0.0 if total == 0 else w / total for w in weights]
        all_weights.append([w * scale for w in weights])
        all_ids.append(ids)
    shape = (len(all_ids), top_k)
    return (
        torch.tensor(all_weights, dtype=torch.float64).reshape(shape),
        torch.tensor(all_ids, dtype=torch.int32).reshape(shape),
    )


def gated(gate_up, activation):
    """The gated activations in float64."""
    x = gate_up.double()
    F = x.shape[-1] // 2
    if activation == "swigluoai":
        gate = torch.where(x[..., 0::2] > 7, 7.0, x[..., 0::2])
        up = x[..., 1::2]
        up = torch.where(up > 7, 7.0, torch.where(up < -7, -7.0, up))
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    gate, up = x[..., :F], x[..., F:]
    if activation == "gelu_and_mul":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    return gate / (1 + torch.exp(-gate)) * up


def expert(x, e, w_gate_up, w_down, activation, b_gate_up=None, b_down=None):
    """One expert on rows ``x``, in float64."""
    gate_up = x.double() @ w_gate_up[e].double().T
    if b_gate_up is not None:
        gate_up = gate_up + b_gate_up[e].double()
    down = gated(gate_up, activation) @ w_down[e].double().T
    return down if b_down is None else down + b_down[e].double()


def experts(x, w_gate_up, w_down, weights, ids, activation, b_gate_up=None, b_down=None, scale=1.0):
    """The combined output of routed tokens, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if 0 <= e < w_down.shape[0]:
                y = expert(x[t], e, w_gate_up, w_down, activation, b_gate_up, b_down)
                out[t] += scale * weights[t, k].double() * y
    return out
