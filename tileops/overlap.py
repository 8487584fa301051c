"""Whether two strided tensors share a byte of memory, decided exactly and on the host."""

from __future__ import annotations

from math import gcd

import torch


def refuse_overlap(op: str, name: str, out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Raise a ValueError if ``out`` shares memory with one of the named inputs.

    Args:
        op: Name of the op, for the message.
        name: What the caller knows ``out`` as.
        out: The tensor about to be written.
        **inputs: Tensors that are read while ``out`` is written; None is skipped.
    """
    for other, x in inputs.items():
        if x is not None and shares_memory(out, x):
            raise ValueError(
                f"{op}: {name} must not overlap {other}, got two tensors that share memory; "
                f"pass a buffer of its own"
            )


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether any byte belongs to an element of both tensors.

    Two views of one buffer, columns of one matrix say, may interleave without sharing a byte. After
    an interval test, the question is whether a bounded sum of strides can equal the distance of the
    two bases; it is answered by a search over the strides from the widest down.
    """
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    distance = b.data_ptr() - a.data_ptr()
    reach_a, reach_b = _reach(a), _reach(b)
    if distance >= reach_a or -distance >= reach_b:
        return False
    # a + sum(i * s) == b + sum(j * t) for some bytes; with j -> last - j every term is positive
    limits: dict[int, int] = {1: a.element_size() - 1 + b.element_size() - 1}
    target = distance + b.element_size() - 1
    for x, sign in ((a, 0), (b, 1)):
        for size, stride in zip(x.shape, x.stride(), strict=True):
            if size > 1 and stride:
                step = stride * x.element_size()
                limits[step] = limits.get(step, 0) + size - 1
                target += sign * step * (size - 1)
    return _reachable(target, sorted(limits.items(), reverse=True))


def _reach(x: torch.Tensor) -> int:
    """Bytes from the base of ``x`` to the end of its last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _reachable(target: int, terms: list[tuple[int, int]]) -> bool:
    """Return whether ``target`` is a sum of ``count * step`` with each count in ``[0, limit]``."""
    if target == 0:
        return True
    if target < 0 or not terms:
        return False
    if target % gcd(*(step for step, _ in terms)):
        return False
    (step, limit), rest = terms[0], terms[1:]
    most = sum(s * n for s, n in rest)
    low = max(0, -((most - target) // step))
    return any(
        _reachable(target - count * step, rest)
        for count in range(min(limit, target // step), low - 1, -1)
    )
