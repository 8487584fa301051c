import math

import pytest
import torch

from tileops.moe import MoEFwdOp, MoERouterFwdOp

NAN, INF = math.nan, math.inf
SCORINGS = ["sqrt_softplus", "softmax", "sigmoid"]
LOWEST = {torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -1e4}


def affinity(row, scoring):
    if scoring == "softmax":
        top = max(row)
        exps = [math.exp(x - top) for x in row]
        return [x / sum(exps) for x in exps]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    return [math.sqrt(max(x, 0) + math.log1p(math.exp(-abs(x)))) for x in row]


def formula(scores, topk, scoring, bias=None, ids=None):
    """The weight of every expert, in float64; slots that choose nothing weigh nothing."""
    mass = torch.zeros(scores.shape, dtype=torch.float64)
    for t, row in enumerate(scores.double().tolist()):
        a = affinity(row, scoring)
        if ids is None:
            ranked = a if bias is None else [x + b for x, b in zip(a, bias.tolist(), strict=True)]
            usable = [e for e, v in enumerate(ranked) if v > -3.4e38]
            chosen = sorted(usable, key=lambda e: (-ranked[e], e))[:topk]
        else:
            chosen = [e for e in ids[t].tolist() if 0 <= e < len(row)]
        total = sum(a[e] for e in chosen)
        for e in chosen:
            mass[t, e] += a[e] / total if total > 0 else 0.0
    return mass


def check(op, scores, mass, bias=None, ids=None, rtol=1e-5):
    start, count = op.local_expert_start, op.local_expert_count
    probs, scale = op(scores, bias, ids)
    local = mass[:, start : start + count]
    assert probs.shape == local.shape
    assert probs.dtype == op.dtype
    assert scale.dtype == torch.float32
    assert probs.isfinite().all()
    torch.testing.assert_close(
        scale.cpu().double(), op.route_scale * local.sum(1, keepdim=True), rtol=1e-5, atol=1e-30
    )
    low = torch.tensor(LOWEST[op.dtype]).to(op.dtype)
    assert torch.equal(probs.cpu() == low, local == 0)
    want = torch.where(local > 0, local.log(), low.double())
    unit = {torch.float32: rtol, torch.bfloat16: 2**-8, torch.float16: 2**-10}[op.dtype]
    torch.testing.assert_close(probs.cpu().double(), want, rtol=unit, atol=2e-5)


def spread(num_tokens, num_experts, device, low=-4.0, high=4.0):
    order = torch.rand(num_tokens, num_experts).argsort(-1)
    return torch.linspace(low, high, num_experts)[order].to(device)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scorings_and_dtypes(target, device, scoring, out, with_bias):
    scores = spread(19, 32, device)
    bias = torch.linspace(-2, 2, 32)[torch.randperm(32)] if with_bias else None
    op = MoERouterFwdOp(8, 6, 16, scoring, "noaux_tc", 2.5, out, target=target)
    mass = formula(scores, 6, scoring, bias)
    check(op, scores, mass, None if bias is None else bias.to(device))


@pytest.mark.parametrize("num_experts", [1, 3, 31, 33, 60, 257, 1025, 2500])
@pytest.mark.parametrize("topk", [1, 5, 32])
def test_any_number_of_experts(target, device, num_experts, topk):
    topk = min(topk, num_experts)
    scores = spread(3, num_experts, device)
    op = MoERouterFwdOp(num_experts, topk, scoring="sigmoid", selection="topk", target=target)
    check(op, scores, formula(scores, topk, "sigmoid"))


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_given_ids(target, device, scoring, ids_dtype):
    scores = spread(5, 8, device)
    ids = torch.tensor([[0, 1, 2], [3, 3, 5], [-1, 8, 4], [-1, -1, 9], [7, 7, 7]])
    op = MoERouterFwdOp(8, 3, scoring=scoring, selection="topk", target=target)
    bias = torch.full((3,), NAN, device=device)  # takes no part, whatever it is
    check(op, scores, formula(scores, 3, scoring, ids=ids), bias, ids.to(device, ids_dtype))


def test_wide_ids_are_not_narrowed(target, device):
    scores = spread(1, 8, device)
    ids = torch.tensor([[2**32 + 1, 2, -(2**32) + 3]])
    op = MoERouterFwdOp(8, 3, selection="topk", target=target)
    check(op, scores, formula(scores, 3, "sqrt_softplus", ids=ids), None, ids.to(device))


@pytest.mark.parametrize("scoring", ["sqrt_softplus", "sigmoid"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_tails_keep_their_weight(target, device, scoring, out):
    scores = torch.tensor([[5.0, 4.0, -60.0, -70.0], [-20.0, -25.0, -30.0, -80.0]], device=device)
    op = MoERouterFwdOp(4, 3, scoring=scoring, selection="topk", dtype=out, target=target)
    mass = formula(scores, 3, scoring)
    probs, _ = op(scores)
    chosen = mass > 0
    assert probs.isfinite().all()
    for row, mask in zip(probs.cpu(), chosen, strict=True):
        assert row[mask].min() > row[~mask].max()
    if out == torch.float32:
        check(op, scores, mass, rtol=2e-5)


def test_the_root_of_softplus_does_not_underflow(target, device):
    scores = torch.tensor([[-110.0, -110.0, -120.0, -150.0], [-19.0, -21.0, -20.0, -40.0]])
    op = MoERouterFwdOp(4, 3, selection="topk", target=target)
    check(op, scores.to(device), formula(scores, 3, "sqrt_softplus"), rtol=2e-5)


def test_nothing_to_select_leaves_slots_empty(target, device):
    scores = torch.tensor([[1.0, NAN, 2.0, 0.0], [NAN] * 4, [1.0, 2.0, 3.0, 4.0]], device=device)
    bias = torch.tensor([0.0, 0.0, -INF, 0.0], device=device)
    op = MoERouterFwdOp(4, 3, scoring="sigmoid", target=target)
    probs, scale = op(scores, bias)
    assert (probs[0] > -1e29).tolist() == [True, False, False, True]
    assert (probs[1] == -1e30).all()
    assert scale[1].item() == 0.0
    assert (probs[2] > -1e29).tolist() == [True, True, False, True]
    probs, scale = MoERouterFwdOp(4, 2, scoring="softmax", target=target)(scores[:1])
    assert (probs == -1e30).all()
    assert scale.item() == 0.0


def test_ties_go_to_the_lower_index(target, device):
    op = MoERouterFwdOp(70, 3, selection="topk", target=target)
    probs, _ = op(torch.zeros(1, 70, device=device))
    assert (probs[0] > -1e29).nonzero()[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_scores_are_widened(target, device, dtype):
    scores = torch.linspace(-3, 3, 16, device=device)[torch.randperm(16)][None].to(dtype)
    op = MoERouterFwdOp(16, 4, target=target)
    assert all(torch.equal(a, b) for a, b in zip(op(scores), op(scores.float()), strict=True))


def test_views_and_no_tokens(target, device):
    op = MoERouterFwdOp(8, 4, target=target)
    store = torch.randn(12, 40, device=device)
    view = store[::3, 5:21]
    assert all(torch.equal(a, b) for a, b in zip(op(view), op(view.contiguous()), strict=True))
    probs, scale = op(view[:0])
    assert probs.shape == (0, 8)
    assert scale.shape == (0, 1)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_four_ranks_make_the_single_rank_answer(kernels, device, scoring):
    """Each rank routes to its eight experts and runs its MoE; scaled and added it is the whole."""
    T, E, K, H, F = 13, 32, 6, 24, 16
    x = torch.randn(T, H, device=device).bfloat16()
    scores = spread(T, E, device)
    bias = torch.linspace(-1, 1, E)[torch.randperm(E)].to(device)
    fc1 = (torch.randn(E, 2 * F, H, device=device) / H**0.5).bfloat16()
    fc2 = (torch.randn(E, H, F, device=device) / F**0.5).bfloat16()
    total = torch.zeros(T, H, dtype=torch.float64)
    for start in range(0, E, 8):
        router = MoERouterFwdOp(8, K, start, scoring, route_scale=1.5, target=kernels)
        probs, scale = router(scores, bias)
        moe = MoEFwdOp(6, "swiglu", swiglu_fusion=2, target=kernels)
        mine = slice(start, start + 8)
        y = moe(x, probs.bfloat16(), fc1[mine], None, fc2[mine])
        total += (y.double() * scale.double()).cpu()
    mass = formula(scores, K, scoring, bias.cpu())
    want = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for e in mass[t].nonzero()[:, 0].tolist():
            gate, up = (x[t].double().cpu() @ fc1[e].double().cpu().T).chunk(2)
            want[t] += 1.5 * mass[t, e] * ((gate * gate.sigmoid() * up) @ fc2[e].double().cpu().T)
    # the router row is rounded to bfloat16 on its way: weights get 2^-8 of its logarithm
    assert torch.linalg.vector_norm(total - want) < 0.02 * torch.linalg.vector_norm(want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topk": 33}, r"topk must be in \[1, 32\], got 33"),
        ({"local_expert_start": -1}, "local_expert_start must be at least 0"),
        ({"scoring": "relu"}, "scoring must be one of"),
        ({"selection": "all"}, "selection must be one of"),
        ({"route_scale": NAN}, "route_scale must be finite"),
        ({"dtype": torch.int32}, "dtype must be one of"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=f"MoERouterFwdOp: {message}"):
        MoERouterFwdOp(4, **settings)


def test_wrong_calls():
    scores = torch.randn(2, 8)
    with pytest.raises(ValueError, match="topk must be at most E = 8, got 9"):
        MoERouterFwdOp(8, 9)(scores)
    with pytest.raises(ValueError, match=r"must be at most E = 8, got 4 \+ 5"):
        MoERouterFwdOp(5, 1, 4)(scores)
    with pytest.raises(ValueError, match="bias must be None with selection='topk'"):
        MoERouterFwdOp(8, selection="topk")(scores, torch.zeros(8))
    with pytest.raises(ValueError, match=r"bias must be \[E\] = \[8\], got \(7,\)"):
        MoERouterFwdOp(8)(scores, torch.zeros(7))
    with pytest.raises(
        ValueError, match=r"expert_ids must be \[T, topk\] = \[2, 3\], got \(2, 2\)"
    ):
        MoERouterFwdOp(8, 3)(scores, None, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="expert_ids must be torch.int64 or torch.int32"):
        MoERouterFwdOp(8, 3)(scores, None, torch.zeros(2, 3))
