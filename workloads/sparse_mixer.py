"""PhiMoE's routing: reference."""

from __future__ import annotations

import torch

from tileops.workloads.accuracy import precision
from tileops.workloads.topk import descending

_NEAR = 0.02  # twice the jitter of 0.01 that training adds


def _weigh(logits: torch.Tensor, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the best expert that is not taken, and weigh it against the logits near its own."""
    order = descending(logits)
    free = order.gather(1, torch.sort(taken.gather(1, order).byte(), dim=1, stable=True).indices)
    best = free[:, :1]
    top = logits.gather(1, best)
    far = (top - logits) > _NEAR * torch.maximum(logits.abs(), top)
    terms = torch.where(far | taken, 0.0, torch.exp(logits - top))
    return 1 / terms.sum(1, keepdim=True), best


def sparse_mixer_fwd(logits, *, target):
    """Pick two experts one after the other; the first does not count for the second."""
    logits = logits.to(precision(torch.float32))
    taken = torch.zeros_like(logits, dtype=torch.bool)
    first_weight, first = _weigh(logits, taken)
    second_weight, second = _weigh(logits, taken.scatter(1, first, True))
    return torch.cat([first_weight, second_weight], 1), torch.cat([first, second], 1).int()
