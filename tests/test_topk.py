import math

import pytest
import torch
from formulas import route

from tileops.kernels.cuda import topk_merge
from tileops.moe import FusedTopKFwdOp

NAN, INF = math.nan, math.inf
MANY = 4100
SCORINGS = ["softmax", "sigmoid"]
# every count that a power-of-two, a warp or a table of known models would miss
EXPERTS = [1, 2, 3, 5, 12, 60, 62, 96, 128, 160, 192, 257, 320, 384, 448, 512, 576, 896]
EXPERTS += [1023, 1024, 1025, 2048]


def logits_without_ties(num_tokens, num_experts, device="cpu", dtype=torch.float32):
    order = torch.rand(num_tokens, num_experts).argsort(-1)
    return torch.linspace(-4, 4, num_experts)[order].to(device, dtype)


def check(op, logits, bias=None, *, atol=0.0, rtol=1e-5):
    """Compare with the float64 formula, ids exactly; the ids must also be distinct and in range."""
    weights, ids = op(logits, bias)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    settings = op.top_k, op.scoring_func, op.renormalize, op.num_expert_group, op.topk_group
    want_weights, want_ids = route(logits, *settings, op.routed_scaling_factor, bias)
    assert torch.equal(ids.cpu(), want_ids)
    assert all(len(set(row)) == op.top_k for row in ids.tolist())
    torch.testing.assert_close(
        weights.cpu().double(), want_weights, atol=atol, rtol=rtol, equal_nan=True
    )


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_any_number_of_experts(target, device, scoring, num_experts):
    op = FusedTopKFwdOp(min(6, num_experts), scoring, target=target)
    check(op, logits_without_ties(5, num_experts, device))


@pytest.mark.parametrize("top_k", [1, 3, 5, 6, 7, 9, 10, 16, 22, 31, 32, 33, 64])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_any_top_k(target, device, scoring, top_k):
    check(
        FusedTopKFwdOp(top_k, scoring, renormalize=True, target=target),
        logits_without_ties(4, 64, device),
    )


@pytest.mark.parametrize("num_experts", [8, 16, 60, 64, 128, 160, 256, 384])
@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8])
def test_weights_are_the_unbiased_scores(target, device, num_experts, top_k):
    logits = torch.randn(7, num_experts, device=device)
    bias = torch.empty(num_experts, device=device).uniform_(-3, 3)
    op = FusedTopKFwdOp(top_k, "sigmoid", target=target)
    weights, ids = op(logits, bias)
    torch.testing.assert_close(
        weights, torch.sigmoid(logits).gather(1, ids.long()), atol=1e-6, rtol=0
    )
    op = FusedTopKFwdOp(top_k, "softmax", target=target)
    weights, ids = op(logits)
    torch.testing.assert_close(
        weights, torch.softmax(logits, 1).gather(1, ids.long()), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_logit_dtypes(target, device, scoring, logits_dtype):
    logits = logits_without_ties(9, 32, device, logits_dtype)
    check(FusedTopKFwdOp(4, scoring, renormalize=True, target=target), logits)


def test_renormalize_divides_the_selected_scores(target, device):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    for renormalize, want in ((False, [0.643914, 0.236883]), (True, [0.731059, 0.268941])):
        weights, ids = FusedTopKFwdOp(2, renormalize=renormalize, target=target)(logits)
        assert ids.tolist() == [[0, 1]]
        torch.testing.assert_close(weights.cpu(), torch.tensor([want]), atol=1e-6, rtol=0)


def test_scaling_factor_is_applied_once_after_renormalizing(target, device):
    logits = logits_without_ties(6, 16, device)
    weights, _ = FusedTopKFwdOp(4, "sigmoid", True, routed_scaling_factor=2.5, target=target)(
        logits
    )
    torch.testing.assert_close(weights.sum(1).cpu(), torch.full((6,), 2.5))


def test_negative_biased_scores_do_not_let_excluded_groups_in(target, device):
    bias = torch.tensor([-0.6, -0.7, -0.9, -1, -2, -2, -3, -3], device=device)
    op = FusedTopKFwdOp(3, "sigmoid", True, num_expert_group=4, topk_group=2, target=target)
    weights, ids = op(torch.zeros(1, 8, device=device), bias)
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights.cpu(), torch.full((1, 3), 1 / 3))


def test_group_score_is_the_sum_of_two_with_a_bias_and_the_best_without(target, device):
    logits = torch.tensor([[2.19722, -2.19722, 0.405465, 0.405465]], device=device)
    op = FusedTopKFwdOp(2, "sigmoid", num_expert_group=2, topk_group=1, target=target)
    assert op(logits, torch.zeros(4, device=device))[1].tolist() == [[2, 3]]
    assert op(logits)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "groups", "kept", "top_k"),
    [(256, 8, 4, 8), (64, 8, 3, 6), (8, 8, 4, 2), (60, 4, 1, 15), (160, 5, 2, 8), (1040, 4, 2, 9)],
)
def test_grouped_routing(target, device, num_experts, groups, kept, top_k, with_bias):
    logits = logits_without_ties(33, num_experts, device)
    bias = torch.linspace(-1, 1, num_experts, device=device)[torch.randperm(num_experts)]
    op = FusedTopKFwdOp(top_k, "sigmoid", True, groups, kept, 2.5, target=target)
    check(op, logits, bias if with_bias else None)


def test_grouped_softmax(target, device):
    op = FusedTopKFwdOp(3, "softmax", False, 4, 2, target=target)
    check(op, logits_without_ties(17, 16, device))


def test_ties_go_to_the_lower_index(target, device):
    for scoring in SCORINGS:
        op = FusedTopKFwdOp(3, scoring, target=target)
        assert op(torch.zeros(2, 70, device=device))[1].tolist() == [[0, 1, 2]] * 2
        signed = torch.tensor([[0.0, -0.0, 0.0, -1.0]], device=device).flip(1)
        assert op(signed)[1].tolist() == [[1, 2, 3]]
    grouped = FusedTopKFwdOp(3, "sigmoid", False, 4, 2, target=target)
    assert grouped(torch.zeros(1, 16, device=device))[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_nan_stays_in_its_row_and_ranks_last(target, device, scoring, groups, with_bias):
    if with_bias and scoring == "softmax":
        pytest.skip("a bias belongs to sigmoid scoring")
    logits = logits_without_ties(3, 8)
    clean = logits.clone()
    logits[0] = NAN
    logits[2, 5] = NAN
    bias = torch.linspace(-0.3, 0.3, 8) if with_bias else None
    op = FusedTopKFwdOp(4, scoring, True, groups, max(1, groups // 2), target=target)
    on_device = None if bias is None else bias.to(device)
    weights, ids = op(logits.to(device), on_device)
    clean_weights, clean_ids = op(clean.to(device), on_device)
    assert torch.equal(ids[1], clean_ids[1])
    assert torch.equal(weights[1], clean_weights[1])
    assert ids[0].tolist() == [0, 1, 2, 3]
    check(op, logits.to(device), on_device)


def test_minus_infinity_is_selected_before_nan_only(target, device):
    logits = torch.tensor([[-INF, 1.0, NAN, -INF, -INF, 2.0]], device=device)
    for scoring in SCORINGS:
        assert FusedTopKFwdOp(6, scoring, target=target)(logits)[1].tolist() == [[5, 1, 0, 3, 4, 2]]


def test_infinite_bias_masks_or_forces_an_expert(target, device):
    bias = torch.tensor([0.0, -INF, INF, 0.0, NAN], device=device)
    logits = torch.tensor([[0.0, 9.0, -9.0, 1.0, 9.0]], device=device)
    check(FusedTopKFwdOp(5, "sigmoid", target=target), logits, bias)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_non_finite_logits(target, device, scoring):
    rows = [[INF, 0.0, 1.0, -1.0], [-INF] * 4, [INF, INF, 0.0, 1.0], [3e38, -3e38, 1.0, 0.0]]
    logits = torch.tensor(rows, device=device)
    for renormalize in (False, True):
        check(FusedTopKFwdOp(3, scoring, renormalize, target=target), logits)


def test_sigmoid_keeps_its_tails(target, device):
    logits = torch.tensor(
        [[-20.0, -30.0, -80.0, 90.0], [-60.0, -70.0, -80.0, -85.0]], device=device
    )
    check(FusedTopKFwdOp(4, "sigmoid", target=target), logits)
    check(FusedTopKFwdOp(2, "sigmoid", True, target=target), logits[1:])


def test_renormalizing_zeros_gives_zeros(target, device):
    logits = torch.tensor([[-INF, -INF, -INF]], device=device)
    weights, ids = FusedTopKFwdOp(2, "sigmoid", True, target=target)(logits)
    assert weights.tolist() == [[0.0, 0.0]]
    assert ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 31, 1000, 70_000])
def test_token_counts(target, device, num_tokens):
    logits = torch.randn(num_tokens, 8, device=device)
    weights, ids = FusedTopKFwdOp(2, renormalize=True, target=target)(logits)
    assert weights.shape == ids.shape == (num_tokens, 2)
    best = torch.sort(logits, dim=1, descending=True, stable=True)
    assert torch.equal(ids.long(), best.indices[:, :2])
    torch.testing.assert_close(weights, torch.softmax(best.values[:, :2], 1))


def test_many_tokens_are_those_that_share_warps():
    assert topk_merge.takes(MANY, 512, 10, 8)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("scoring", "num_experts", "groups", "kept", "top_k"),
    [
        ("softmax", 128, 1, 1, 8),
        ("softmax", 60, 1, 1, 4),
        ("softmax", 512, 8, 3, 10),
        ("sigmoid", 16, 1, 1, 1),
        ("sigmoid", 160, 5, 2, 6),
    ],
)
def test_many_tokens(target, device, scoring, num_experts, groups, kept, top_k, logits_dtype):
    logits = torch.randn(MANY, num_experts).mul(4).round().div(4)  # many ties
    logits[::7, ::3] = -INF
    logits[::9, 1::5] = NAN
    logits[13] = NAN
    for renormalize in (False, True):
        settings = top_k, scoring, renormalize, groups, kept, 2.5
        given = logits.to(device, logits_dtype)
        weights, ids = FusedTopKFwdOp(*settings, target=target)(given)
        want_weights, want_ids = FusedTopKFwdOp(*settings, target="reference")(given)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights, equal_nan=True)


@pytest.mark.parametrize(
    ("num_experts", "groups", "kept", "top_k"),
    [
        (128, 1, 1, 8),
        (60, 1, 1, 4),
        (64, 1, 1, 6),
        (1024, 1, 1, 16),
        (1025, 1, 1, 8),
        (160, 8, 3, 6),
        (96, 3, 2, 8),
    ],
)
def test_logits_that_differ_in_their_last_bits(kernels, device, num_experts, groups, kept, top_k):
    logits = logits_without_ties(MANY, num_experts)
    order = logits.argsort(-1, descending=True)
    starts = torch.arange(0, num_experts, num_experts // groups)
    close = [
        order[:, :2],
        order[:, top_k - 2 : top_k],
        order[:, top_k - 1 : top_k + 1],
        order[:, 1 : top_k + 3],
        order,
        logits.view(MANY, groups, -1).argmax(-1) + starts,  # the best of each group
    ]
    row = torch.arange(MANY)
    every = row // 512 % 2 == 0  # elsewhere they share warps with rows of no such logits
    for n, experts in enumerate(close):
        value = logits.gather(1, experts[:, :1])
        bits = value.view(torch.int32) + torch.randint(0, 3, experts.shape, dtype=torch.int32)
        near = logits.scatter(1, experts, bits.view(torch.float32))
        rows = (row // 64 % len(close) == n) & (every | (row % 5 == 0))
        logits[rows] = near[rows]
    logits[1::7] = logits[1::7].bfloat16().float()
    logits[3::35] = -logits[3::35].abs()
    logits[::11, ::4] = -INF
    logits[::13, 1::4] = NAN
    logits[::17, 2::4] = 0.0
    logits[::17, 3::8] = -0.0
    for renormalize in (False, True):
        settings = top_k, "softmax", renormalize, groups, kept
        weights, ids = FusedTopKFwdOp(*settings, target=kernels)(logits.to(device))
        want_weights, want_ids = FusedTopKFwdOp(*settings, target="reference")(logits)
        assert torch.equal(ids.cpu(), want_ids)
        torch.testing.assert_close(weights.cpu(), want_weights, equal_nan=True)


def test_one_expert_is_not_merged():
    assert not topk_merge.takes(MANY, 128, 1, 1)


def test_many_tokens_with_a_bias(target, device):
    bias = torch.linspace(-1, 1, 256, device=device)[torch.randperm(256)]
    op = FusedTopKFwdOp(8, "sigmoid", True, 8, 4, 2.5, target=target)
    check(op, logits_without_ties(MANY, 256, device), bias)


def test_logits_may_be_a_view(target, device):
    storage = torch.randn(10, 50, device=device)
    view = storage[::2, 3:35]
    for scoring in SCORINGS:
        op = FusedTopKFwdOp(4, scoring, target=target)
        for got, want in zip(op(view), op(view.contiguous()), strict=True):
            assert torch.equal(got, want)
    op = FusedTopKFwdOp(4, target=target)
    rows = storage[:1, :16].expand(6, 16)
    assert torch.equal(op(rows)[1], op(rows.contiguous())[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, r"top_k must be at least 1, got 0"),
        ({"top_k": 2, "scoring_func": "tanh"}, r"scoring_func must be one of .*, got 'tanh'"),
        ({"top_k": 2, "num_expert_group": 0}, r"num_expert_group must be at least 1, got 0"),
        (
            {"top_k": 2, "num_expert_group": 4, "topk_group": 5},
            r"topk_group must be in \[1, 4\], got 5",
        ),
        (
            {"top_k": 2, "routed_scaling_factor": 0.0},
            r"routed_scaling_factor must be finite and positive",
        ),
        (
            {"top_k": 2, "routed_scaling_factor": NAN},
            r"routed_scaling_factor must be finite and positive",
        ),
        (
            {"top_k": 2, "target": "tpu"},
            r"target must be one of \['builtin', .*'reference'.*got 'tpu'",
        ),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=f"FusedTopKFwdOp: {message}"):
        FusedTopKFwdOp(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 2.0},
        {"top_k": True},
        {"top_k": 2, "renormalize": 1},
        {"top_k": 2, "scoring_func": 3},
    ],
)
def test_wrong_kinds_of_settings(settings):
    with pytest.raises(TypeError, match="FusedTopKFwdOp: "):
        FusedTopKFwdOp(**settings)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"top_k": 9}, (2, 8), "top_k must be at most 8"),
        (
            {"top_k": 3, "num_expert_group": 4},
            (2, 8),
            "top_k must be at most 2, the experts of topk_group = 1",
        ),
        (
            {"top_k": 2, "num_expert_group": 4},
            (2, 10),
            "num_expert_group must divide E = 10, got 4",
        ),
        ({"top_k": 2}, (2, 3, 8), r"gating_output must be \[T, E\], got \(2, 3, 8\)"),
    ],
)
def test_wrong_calls(target, device, settings, shape, message):
    with pytest.raises(ValueError, match=message):
        FusedTopKFwdOp(**settings, target=target)(torch.randn(shape, device=device))


def test_wrong_bias(target, device):
    logits = torch.randn(2, 8, device=device)
    with pytest.raises(
        ValueError, match=r"correction_bias must be None with scoring_func='softmax'"
    ):
        FusedTopKFwdOp(2, target=target)(logits, torch.zeros(8, device=device))
    op = FusedTopKFwdOp(2, "sigmoid", target=target)
    with pytest.raises(ValueError, match=r"correction_bias must be \[E\] = \[8\], got \(7,\)"):
        op(logits, torch.zeros(7, device=device))
    with pytest.raises(
        ValueError, match=r"correction_bias must be torch.float32, got torch.bfloat16"
    ):
        op(logits, torch.zeros(8, device=device, dtype=torch.bfloat16))
