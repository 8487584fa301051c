import formulas
import pytest
import torch

from tileops.moe import FusedMoEFwdOp, FusedMoESharedExpertFwdOp, SharedExpertMLPFwdOp


def case(dtype, device, T=7, H=40, S=48):
    x = torch.randn(T, H, device=device).to(dtype)
    w_gate_up = (torch.randn(2 * S, H, device=device) / H**0.5).to(dtype)
    w_down = (torch.randn(H, S, device=device) / S**0.5).to(dtype)
    return x, w_gate_up, w_down


def plain(x, w_gate_up, w_down):
    gate, up = (x @ w_gate_up.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w_down.T


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 100])
def test_mlp(target, device, dtype, num_tokens, assert_accurate):
    x, w_gate_up, w_down = case(dtype, device, num_tokens)
    got = SharedExpertMLPFwdOp(target=target)(x, w_gate_up, w_down)
    exact = formulas.expert(x, 0, w_gate_up[None], w_down[None], "silu_and_mul")
    assert got.dtype == dtype
    assert_accurate(got, exact, plain(x, w_gate_up, w_down))


def test_views(target, device, dtype):
    x, w_gate_up, w_down = case(dtype, device)
    op = SharedExpertMLPFwdOp(target=target)
    want = op(x, w_gate_up, w_down)
    wide = torch.zeros(96, 56, device=device, dtype=dtype)
    wide[:, 8:48] = w_gate_up
    assert torch.equal(op(x, wide[:, 8:48], w_down), want)
    assert torch.equal(op(x, w_gate_up.view(2, 48, 40), w_down), want)


def routed_case(device, dtype=torch.bfloat16, T=9, E=4, H=40, F=24, S=48):
    x, shared_w_gate_up, shared_w_down = case(dtype, device, T, H, S)
    logits = torch.linspace(-2, 2, E)[torch.rand(T, E).argsort(-1)].to(device)
    w_gate_up = (torch.randn(E, 2 * F, H, device=device) / H**0.5).to(dtype)
    w_down = (torch.randn(E, H, F, device=device) / F**0.5).to(dtype)
    shared = {"shared_w_gate_up": shared_w_gate_up, "shared_w_down": shared_w_down}
    return (x, logits, w_gate_up, w_down), shared


def test_both_halves_are_the_ops_of_their_own(target, device):
    args, shared = routed_case(device)
    got_shared, got_routed = FusedMoESharedExpertFwdOp(2, renormalize=True, target=target)(
        *args, **shared
    )
    assert torch.equal(got_routed, FusedMoEFwdOp(2, renormalize=True, target=target)(*args))
    assert torch.equal(got_shared, SharedExpertMLPFwdOp(target=target)(args[0], *shared.values()))
    nothing, routed = FusedMoESharedExpertFwdOp(2, renormalize=True, target=target)(*args)
    assert nothing is None
    assert torch.equal(routed, got_routed)


def test_the_factor_scales_the_routed_output_only(target, device):
    args, shared = routed_case(device)
    one = FusedMoESharedExpertFwdOp(2, target=target)(*args, **shared)
    four = FusedMoESharedExpertFwdOp(2, routed_scaling_factor=4.0, target=target)(*args, **shared)
    assert torch.equal(four[0], one[0])
    assert torch.equal(four[1], 4 * one[1])


def test_correction_bias(target, device):
    args, shared = routed_case(device)
    bias = torch.tensor([9.0, -9.0, 9.0, -9.0], device=device)
    settings = {"scoring_func": "sigmoid", "renormalize": True, "target": target}
    _, routed = FusedMoESharedExpertFwdOp(2, **settings)(*args, bias, **shared)
    assert torch.equal(routed, FusedMoEFwdOp(2, **settings)(*args, bias))


@pytest.mark.parametrize("tp_size", [2, 3])
def test_ranks_add_up(target, device, dtype, tp_size, assert_accurate):
    args, shared = routed_case(device, dtype)
    total = torch.zeros(args[0].shape, dtype=torch.float64, device=device)
    for rank in range(tp_size):
        op = FusedMoESharedExpertFwdOp(2, tp_size=tp_size, tp_rank=rank, target=target)
        part, routed = op(*args, **shared)
        total += part.double()
        assert torch.equal(routed, FusedMoEFwdOp(2, target=target)(*args))
    w_gate_up, w_down = shared.values()
    exact = formulas.expert(args[0], 0, w_gate_up[None], w_down[None], "silu_and_mul")
    assert_accurate(total.to(dtype), exact, plain(args[0], w_gate_up, w_down))


def test_a_rank_takes_its_rows_of_both_halves(target, device):
    """With F = 16 and two ranks, rank 1 has gate rows 8 to 15 and up rows 24 to 31."""
    S, H = 16, 32
    x = torch.eye(H, device=device).bfloat16()
    w_gate_up = torch.zeros(2 * S, H, device=device).bfloat16()
    w_gate_up[torch.arange(2 * S), torch.arange(2 * S)] = 1.0
    w_gate_up[:S] += 1  # gate j answers 1 to every token, 2 to token j; up j answers to 16 + j
    w_down = torch.ones(H, S, device=device).bfloat16()
    args, _ = routed_case(device, T=H, H=H)
    op = FusedMoESharedExpertFwdOp(2, tp_size=2, tp_rank=1, target=target)
    part, _ = op(x, args[1], *args[2:], shared_w_gate_up=w_gate_up, shared_w_down=w_down)
    answered = (part[:, 0] != 0).nonzero()[:, 0].tolist()
    assert answered == list(range(24, 32))


def test_messages_name_the_op_that_was_called():
    args, shared = routed_case("cpu")
    with pytest.raises(ValueError, match="^FusedMoESharedExpertFwdOp: top_k must be at least 1"):
        FusedMoESharedExpertFwdOp(0)
    with pytest.raises(ValueError, match="^FusedMoESharedExpertFwdOp: w_down must be"):
        FusedMoESharedExpertFwdOp(2)(*args[:3], args[3][:, :-1], **shared)
    with pytest.raises(TypeError, match="^SharedExpertMLPFwdOp: w_gate_up must be a torch.Tensor"):
        SharedExpertMLPFwdOp()(args[0], None, shared["shared_w_down"])


def test_errors():
    args, shared = routed_case("cpu")
    with pytest.raises(ValueError, match=r"tp_rank must be in \[0, 1\], got 2"):
        FusedMoESharedExpertFwdOp(2, tp_size=2, tp_rank=2)
    with pytest.raises(ValueError, match="tp_size must divide S = 48, got 5"):
        FusedMoESharedExpertFwdOp(2, tp_size=5)(*args, **shared)
    # S = 3 does not divide by 2, although the 6 stacked rows do
    odd = {
        "shared_w_gate_up": torch.zeros(6, 40).bfloat16(),
        "shared_w_down": torch.zeros(40, 3).bfloat16(),
    }
    with pytest.raises(ValueError, match="tp_size must divide S = 3, got 2"):
        FusedMoESharedExpertFwdOp(2, tp_size=2)(*args, **odd)
    with pytest.raises(
        ValueError, match="shared_w_down must be given with the other shared weight"
    ):
        FusedMoESharedExpertFwdOp(2)(*args, shared_w_gate_up=shared["shared_w_gate_up"])
    with pytest.raises(
        ValueError, match=r"shared_w_down must be \[H, S\] = \[40, 48\], got \(48, 40\)"
    ):
        FusedMoESharedExpertFwdOp(2)(
            *args,
            shared_w_gate_up=shared["shared_w_gate_up"],
            shared_w_down=shared["shared_w_down"].T.contiguous(),
        )
    with pytest.raises(
        ValueError, match=r"w_gate_up must be \[2S, H\] = \[2S, 40\] .*got \(95, 40\)"
    ):
        SharedExpertMLPFwdOp()(args[0], shared["shared_w_gate_up"][:95], shared["shared_w_down"])
