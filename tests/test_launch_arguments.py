"""The table of kernels/README.md says what kernels are called with: third parties rely on it."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tileops import targets
from tileops.compilation import collecting
from tileops.moe import (
    FusedMoEFP8FwdOp,
    FusedMoEFwdOp,
    IndexedExpertMLPFwdOp,
    MoEFwdOp,
    MoEPermuteAlignFwdOp,
    MoERouterFwdOp,
    QMoEFwdOp,
    SharedExpertMLPFwdOp,
    SwiGLUFwdOp,
    quantize_fp8_blockwise,
)
from tileops.workloads import TARGET as REFERENCE

README = Path(__file__).parents[1] / "kernels" / "README.md"
ROW = re.compile(r"^\| `(\w+_fwd)` \| (.*) \| (.*) \|$", re.MULTILINE)
TABLE = {
    name: (re.findall(r"`(\w+)`", arguments), result == "`out=`")
    for name, arguments, result in ROW.findall(README.read_text())
}


def test_every_operator_has_a_row():
    assert set(TABLE) == {*REFERENCE.kernels, *targets._staged}


@pytest.fixture
def calls(monkeypatch):
    """How each operator is launched, from here on: number of arguments, names of others."""
    found, find = {}, targets.find_kernel

    def record(op, target, *args, **named):
        found[op] = len(args), sorted(named)
        return find(op, target, *args, **named)

    monkeypatch.setattr(targets, "find_kernel", record)
    return found


def test_rows_match_the_launches(calls):
    x, logits, ids = torch.ones(3, 4), torch.randn(3, 2), torch.zeros(3, 1, dtype=torch.int32)
    up, down, on = torch.ones(2, 12, 4), torch.ones(2, 4, 6), {"target": "reference"}
    FusedMoEFwdOp(1, **on)(x, logits, up, down)
    IndexedExpertMLPFwdOp(**on)(torch.empty(3, 4), x, up, down, torch.ones(3, 1), ids)
    SharedExpertMLPFwdOp(**on)(x, up[0], down[0])
    MoEFwdOp(2, use_sparse_mixer=True, **on)(x, logits, up[:, :6], None, down)
    codes, scales = torch.zeros(2, 4, 4, dtype=torch.uint8), torch.ones(2, 4)
    QMoEFwdOp(8, **on)(x, logits, codes, scales, None, codes, scales)
    MoEPermuteAlignFwdOp(2, **on)(ids)
    MoERouterFwdOp(2, **on)(logits)
    SwiGLUFwdOp(**on)(x)
    x, up, down = torch.ones(3, 128), torch.ones(2, 256, 128), torch.ones(2, 128, 128)
    up, down = (quantize_fp8_blockwise(w, **on) for w in (up, down))
    names = "shared_w_gate_up", "shared_w_gate_up_scale", "shared_w_down", "shared_w_down_scale"
    shared = dict(zip(names, (w[0] for w in (*up, *down)), strict=True))
    FusedMoEFP8FwdOp(1, **on)(x, logits, *up, *down, **shared)
    assert calls == {
        name: (len(arguments), ["out"] if writes else [])
        for name, (arguments, writes) in TABLE.items()
    }


class Allocations(TorchDispatchMode):
    """Counts the bytes of the buffers that are made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.new_empty, torch.ops.aten.empty):
            self.bytes += result.numel() * result.element_size()
        return result


@pytest.mark.parametrize("tokens", [5, 600])
def test_the_routed_experts_allocate_two_rows_a_route(tokens):
    """The activated one and the result: no copy of the tokens, no products of gate and up."""
    experts, top_k, hidden, ffn = 64, 4, 256, 128
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
    up, down = x.new_empty(experts, 2 * ffn, hidden), x.new_empty(experts, hidden, ffn)
    weights, ids = torch.empty(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    args = x, up, down, weights, ids, None, None, 1.0, "silu_and_mul"
    with collecting("sm_90a"), Allocations() as made:
        targets.run("fused_moe_experts_fwd", "cuda", *args, out=torch.empty_like(x))
    rows = 2 * tokens * top_k * (hidden + ffn)
    assert rows <= made.bytes <= rows + 16 * tokens * top_k + 32 * experts
