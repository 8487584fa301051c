from functools import partial

import formulas
import pytest
import torch
from test_fused_moe import experts_case

from tileops import targets
from tileops.kernels.cuda.sm90.fused_experts import indexed_is_faster
from tileops.moe import FusedMoEExpertsFwdOp, IndexedExpertMLPFwdOp
from tileops.workloads.layer import eager_experts


@pytest.mark.parametrize(
    ("num_tokens", "E", "K"),
    [(0, 6, 3), (1, 6, 3), (4, 6, 3), (3, 64, 8), (30, 5, 5), (32, 264, 8)],
)
@pytest.mark.parametrize(("H", "F"), [(128, 256), (72, 40)])
def test_matches_the_formula(
    target, device, dtype, num_tokens, E, K, H, F, assert_accurate, poison
):
    x, wg, wd, weights, ids, _, _ = experts_case(device, dtype, num_tokens, E, K, H, F, False)
    output = torch.full_like(x, float("nan"))
    poison(num_tokens * K * F * 4, num_tokens * K * H * 4)
    assert IndexedExpertMLPFwdOp(2.5, target=target)(output, x, wg, wd, weights, ids) is output
    args = x, wg, wd, 2.5 * weights, ids, "silu_and_mul"
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_ids_outside_the_experts_add_nothing(target, device, assert_accurate):
    x, wg, wd, weights, ids, _, _ = experts_case(device, torch.bfloat16, 4, 6, 3, 128, 256, False)
    ids[0], ids[1, 1], ids[2, 2] = -1, 6, 2**31 - 1
    output = torch.full_like(x, float("nan"))
    IndexedExpertMLPFwdOp(target=target)(output, x, wg, wd, weights, ids)
    assert (output[0] == 0).all()
    args = x, wg, wd, weights, ids, "silu_and_mul"
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_one_expert_for_all(target, device, assert_accurate):
    x, wg, wd, weights, ids, _, _ = experts_case(device, torch.bfloat16, 24, 12, 1, 128, 256, False)
    ids[:] = 7
    output = torch.empty_like(x)
    IndexedExpertMLPFwdOp(target=target)(output, x, wg, wd, weights, ids)
    args = x, wg, wd, weights, ids, "silu_and_mul"
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_same_call_same_bits(target, device):
    x, wg, wd, weights, ids, _, _ = experts_case(device, torch.bfloat16, 4, 16, 8, 128, 256, False)
    op = IndexedExpertMLPFwdOp(target=target)
    first = op(torch.empty_like(x), x, wg, wd, weights, ids)
    for _ in range(20):
        assert torch.equal(op(torch.empty_like(x), x, wg, wd, weights, ids), first)


@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_and_mul", "swigluoai"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("H", "F"), [(128, 256), (2056, 1048)])
def test_the_experts_op_with_few_routes(
    target, device, dtype, activation, biases, H, F, assert_accurate, poison
):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, dtype, 3, 16, 4, H, F, biases)
    output = torch.full_like(x, float("nan"))
    poison(12 * F * 4, 12 * H * 4)
    FusedMoEExpertsFwdOp(2.5, activation=activation, target=target)(
        output, x, wg, wd, weights, ids, bg, bd
    )
    args = x, wg, wd, 2.5 * weights, ids, activation, bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


@pytest.mark.parametrize("T", [12, 13, 32])
def test_the_experts_op_with_few_routes_of_many_experts(
    target, device, dtype, T, assert_accurate, poison
):
    """As many routes as are left to the indexed form on a GPU, more, and as many as elsewhere."""
    x, wg, wd, weights, ids, bg, bd = experts_case(device, dtype, T, 264, 8, 256, 128, True)
    output = torch.full_like(x, float("nan"))
    poison(8 * T * 128 * 4, 8 * T * 256 * 4)
    FusedMoEExpertsFwdOp(target=target)(output, x, wg, wd, weights, ids, bg, bd)
    args = x, wg, wd, weights, ids, "silu_and_mul", bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


@pytest.mark.parametrize("which", ["b_gate_up", "b_down"])
def test_biases_of_few_routes_are_independent(target, device, which, assert_accurate):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, torch.bfloat16, 2, 16, 4, 128, 264)
    bg, bd = (bg, None) if which == "b_gate_up" else (None, bd)
    output = torch.full_like(x, float("nan"))
    FusedMoEExpertsFwdOp(target=target)(output, x, wg, wd, weights, ids, bg, bd)
    args = x, wg, wd, weights, ids, "silu_and_mul", bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_an_expert_twice_in_a_token_and_more_than_eight_times_in_all(
    target, device, assert_accurate
):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, torch.bfloat16, 19, 128, 5, 72, 40)
    ids[:, 1] = ids[:, 0]
    ids[3:, 2] = 77
    ids[5], ids[6, 4] = -1, 128
    output = torch.full_like(x, float("nan"))
    FusedMoEExpertsFwdOp(target=target)(output, x, wg, wd, weights, ids, bg, bd)
    assert (output[5] == 0).all()
    args = x, wg, wd, weights, ids, "silu_and_mul", bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_no_route_to_any_expert(target, device):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, torch.bfloat16, 2, 16, 4, 128, 256)
    weights[0, 0], ids[:] = float("nan"), 16
    output = torch.full_like(x, float("nan"))
    FusedMoEExpertsFwdOp(target=target)(output, x, wg, wd, weights, ids, bg, bd)
    assert (output == 0).all()


@pytest.mark.parametrize(
    ("change", "indexed"),
    [
        ({}, True),
        ({"H": 72, "F": 40}, True),
        ({"biases": True}, True),
        ({"activation": "swigluoai"}, True),
        ({"T": 4}, True),  # two routes an expert
        ({"T": 5}, False),
        ({"T": 86, "E": 400, "H": 8, "F": 8}, False),  # 258 routes
    ],
)
def test_the_experts_op_picks_it_for_few_routes(monkeypatch, change, indexed):
    sizes = {"T": 1, "E": 6, "K": 3, "H": 128, "F": 256, "biases": False, **change}
    activation = sizes.pop("activation", "silu_and_mul")
    x, wg, wd, weights, ids, bg, bd = experts_case("cpu", torch.float32, **sizes)
    ran = []
    run = targets.run

    def record(op, *args, **named):
        ran.append(op)
        return run(op, *args, **named)

    monkeypatch.setattr(targets, "run", record)
    op = FusedMoEExpertsFwdOp(activation=activation, target="reference")
    op(torch.empty_like(x), x, wg, wd, weights, ids, bg, bd)
    assert ("indexed_expert_mlp_fwd" in ran) == indexed


def test_output_must_not_overlap(target, device):
    x, wg, wd, weights, ids, _, _ = experts_case(device, torch.bfloat16, 4, 6, 3, 128, 256, False)
    with pytest.raises(
        ValueError, match="IndexedExpertMLPFwdOp: output must not overlap hidden_states"
    ):
        IndexedExpertMLPFwdOp(target=target)(x, x, wg, wd, weights, ids)


@pytest.mark.parametrize(
    ("E", "K", "H", "F", "left", "taken"),
    [
        (128, 8, 2048, 768, 12, 13),  # 96 routes
        (256, 8, 7168, 2048, 4, 8),  # 3 GB
        (8, 2, 4096, 14336, 4, 5),
    ],
)
def test_what_the_tiles_of_a_gpu_leave_to_it(E, K, H, F, left, taken):
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    weights = empty(E, 2 * F, H), empty(E, H, F)
    assert indexed_is_faster(*weights, empty(left, K))
    assert not indexed_is_faster(*weights, empty(taken, K))
