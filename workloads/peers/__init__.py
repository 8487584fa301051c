"""Peers: other implementations that the benchmark sets beside ours, each in a module of its own.

A peer's module has ``prepare(problem)``, which returns a function that runs the problem's call and
returns its outputs, or None where the peer has no such op. Weights are brought into the peer's own
order there, outside the time. It imports its library inside ``prepare``; an ImportError says that
the peer is absent. ``tileops_0_1`` has a process of its own, since its library shares our name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from tileops.workloads.draw import Outputs
from tileops.workloads.peers import tileops_0_1
from tileops.workloads.problems import Problem
from tileops.workloads.timing import microseconds

PEERS = ("torch", "tileops-0.1", "vllm", "deep_gemm", "triton_kernels", "flashinfer", "sonicmoe")

Check = Callable[[Outputs], None]
Timed = Callable[[], tuple[float, str]]


class PeerError(Exception):
    """Why a peer has no time for a problem."""


def start(peers: Sequence[str]) -> None:
    """Start what takes time to start, for one more call of ``prepare``."""
    for peer in peers:
        name, _, folder = peer.partition("=")
        if name == "tileops-0.1":
            tileops_0_1.start(folder)


def prepare(peer: str, problems: Sequence[Problem], check: Check, graph: bool | None) -> Timed:
    """Run a peer on the first problem and check the result; return what times it on all of them.

    Args:
        peer: One of `PEERS`, and for one that needs a folder `NAME=FOLDER`.
        problems: The same call on several sets of inputs.
        check: Raises PeerError if outputs are wrong.
        graph: As ``microseconds`` takes it.

    Returns:
        A function to be called once, which returns what ``microseconds`` returns. It too may raise
        PeerError.

    Raises:
        PeerError: If the peer is absent, has no such op, fails or is wrong.
    """
    name, _, folder = peer.partition("=")
    if name == "tileops-0.1":
        return tileops_0_1.prepare(problems, check, graph, folder)
    try:
        module = import_module(f"tileops.workloads.peers.{name}_peer")
        calls = [module.prepare(problem) for problem in problems]
    except ImportError as error:
        raise PeerError(f"not installed ({error})") from None
    if None in calls:
        raise PeerError("has no such op")
    check(calls[0]())
    device = next(x.device for x in problems[0].inputs.values() if x is not None)
    return partial(microseconds, calls, device, graph)


def contiguous_experts(problem: Problem) -> bool:
    """Return whether every expert is here and there is no bias: what all peers take."""
    inputs = problem.inputs
    plain = inputs.get("b_gate_up") is None and inputs.get("b_down") is None
    limit = inputs["topk_ids"].max() if "topk_ids" in inputs else -math.inf
    return plain and bool(limit < inputs["w_down"].shape[0])
