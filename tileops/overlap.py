"""Whether two strided tensors share a byte of memory, decided exactly and on the host."""

from __future__ import annotations

from math import gcd

import torch

from tileops import repeat


def refuse_overlap(op: str, name: str, out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Raise a ValueError if ``out`` shares memory with itself or with one of the named inputs.

    Traced and fake tensors have no memory: they pass.

    Args:
        op: Name of the op, for the message.
        name: What the caller knows ``out`` as.
        out: The tensor about to be written.
        **inputs: Tensors that are read while ``out`` is written; None is skipped.
    """
    if torch.compiler.is_compiling() or type(out) not in (torch.Tensor, torch.nn.Parameter):
        return
    if overlaps_itself(out):
        raise ValueError(
            f"{op}: {name} must not overlap itself, got shape {tuple(out.shape)} with strides "
            f"{out.stride()}; pass a buffer whose elements have places of their own"
        )
    recorder = repeat.recording()
    for other, x in inputs.items():
        if recorder is not None and x is not None:
            recorder.keep_apart(out, _reach(out), x, _reach(x))
        if x is not None and shares_memory(out, x):
            raise ValueError(
                f"{op}: {name} must not overlap {other}, got two tensors that share memory; "
                f"pass a buffer of its own"
            )


def overlaps_itself(x: torch.Tensor) -> bool:
    """Return whether two elements of ``x`` have the same place."""
    dims = [(stride, n - 1) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]
    if x.numel() == 0 or not dims:
        return False
    dims.sort(reverse=True)
    for i, (step, last) in enumerate(dims):
        rest = dims[i + 1 :]
        reach = sum(s * n for s, n in rest)
        # count steps of this dimension, made good by differences of the smaller ones
        for count in range(1, min(last, reach // step if step else last) + 1):
            if step == 0 or _reachable(count * step + reach, [(s, 2 * n) for s, n in rest]):
                return True
    return False


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


_MOST_STEPS = 100_000
"""Of one search. Only views that overlap themselves many times over need more."""


def _reachable(target: int, terms: list[tuple[int, int]]) -> bool:
    """Return whether ``target`` is a sum of ``count * step`` with each count in ``[0, limit]``.

    A search that does not end in time answers yes, the safe side. ``terms`` come widest first.
    """
    seen: set[tuple[int, int]] = set()
    stack = [(target, 0)]
    while stack:
        left, i = stack.pop()
        if left == 0 or len(seen) > _MOST_STEPS:
            return True
        rest = terms[i:]
        if left < 0 or not rest:
            continue
        # what the narrowest steps add up to must make good the remainder of the wider ones
        step, limit = rest[-1]
        wider = [s for s, _ in rest[:-1]]
        if wider and left % gcd(*wider) > step * limit:
            continue
        if left % gcd(*(s for s, _ in rest)):
            continue
        step, limit = rest[0]
        most = sum(s * n for s, n in rest[1:])
        low = max(0, -((most - left) // step))
        for count in range(low, min(limit, left // step) + 1):
            state = (left - count * step, i + 1)
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return False
