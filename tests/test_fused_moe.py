import dataclasses

import formulas
import pytest
import torch

from tileops.moe import (
    ContiguousLayoutSpec,
    FusedMoEExpertsFwdOp,
    FusedMoEFP8FwdOp,
    FusedMoEFwdOp,
    FusedTopKFwdOp,
    MaskedLayoutSpec,
    MoEExpertMLPFwdOp,
    MoEPostPermuteFwdOp,
    MoEPrePermuteFwdOp,
    MoERouterFwdOp,
    SwiGLUFwdOp,
    quantize_fp8_blockwise,
    quantize_fp8_rowwise,
)
from tileops.workloads.layer import eager_experts
from tileops.workloads.manifest import layers

MODELS = "qwen3-30b-a3b olmoe-1b-7b mixtral-8x7b deepseek-v3 gpt-oss-20b llama-4-maverick"
SMALL = {
    name: dataclasses.replace(layers()[name], hidden_size=72, ffn_size=40)
    for name in MODELS.split()
}
TIGHT = ContiguousLayoutSpec.tight_physical_psum()


def experts_case(device, dtype, T=23, E=6, K=3, H=72, F=40, biases=True):
    x = torch.randn(T, H, device=device).to(dtype)
    w_gate_up = (torch.randn(E, 2 * F, H, device=device) / H**0.5).to(dtype)
    w_down = (2 * torch.randn(E, H, F, device=device) / F**0.5).to(dtype)
    weights = torch.rand(T, K, device=device)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int().to(device) if T else None
    ids = torch.empty(0, K, dtype=torch.int32, device=device) if ids is None else ids
    b_gate_up = torch.randn(E, 2 * F, device=device).to(dtype) if biases else None
    b_down = torch.randn(E, H, device=device).to(dtype) if biases else None
    return x, w_gate_up, w_down, weights, ids, b_gate_up, b_down


def quantized(shape, device):
    return quantize_fp8_blockwise(torch.randn(shape, device=device), target="reference")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
def test_layers_of_models(target, device, dtype, name, num_tokens, assert_accurate, poison):
    layer = SMALL[name]
    w, x = layer.weights(dtype, device), layer.tokens(num_tokens, dtype, device)
    poison(x["hidden_states"].numel() * 4, num_tokens * layer.top_k * 72 * 2)
    got = FusedMoEFwdOp(**layer.settings(), target=target)(**x, **w)
    assert got.dtype == dtype
    assert got.shape == x["hidden_states"].shape
    weights, ids = formulas.route(
        x["gating_output"],
        layer.top_k,
        layer.scoring_func,
        layer.renormalize,
        layer.num_expert_group,
        layer.topk_group,
        layer.routed_scaling_factor,
        w["correction_bias"],
    )
    args = (
        x["hidden_states"],
        w["w_gate_up"],
        w["w_down"],
        weights.float().to(device),
        ids.to(device),
        layer.activation,
        w["b_gate_up"],
        w["b_down"],
    )
    assert_accurate(got, formulas.experts(*args), eager_experts(*args))


@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_and_mul", "swigluoai"])
@pytest.mark.parametrize("biases", [False, True])
def test_experts(target, device, dtype, activation, biases, assert_accurate):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, dtype, biases=biases)
    output = torch.full_like(x, float("nan"))
    op = FusedMoEExpertsFwdOp(2.5, activation=activation, target=target)
    assert op(output, x, wg, wd, weights, ids, bg, bd) is output
    args = x, wg, wd, 2.5 * weights, ids, activation, bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


@pytest.mark.parametrize("which", ["b_gate_up", "b_down"])
def test_biases_are_independent(target, device, which, assert_accurate):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, torch.bfloat16)
    bg, bd = (bg, None) if which == "b_gate_up" else (None, bd)
    output = torch.empty_like(x)
    FusedMoEExpertsFwdOp(target=target)(output, x, wg, wd, weights, ids, bg, bd)
    args = x, wg, wd, weights, ids, "silu_and_mul", bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_the_down_bias_is_weighted(target, device):
    H, F = 8, 8
    x = torch.randn(1, H, device=device).bfloat16()
    wg = torch.zeros(2, 2 * F, H, device=device).bfloat16()
    wd = torch.zeros(2, H, F, device=device).bfloat16()
    bd = torch.tensor([[1.0] * H, [-2.0] * H], device=device).bfloat16()
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    for pair, want in (([0.5, 0.25], 0.0), ([1.0, 0.25], 0.5), ([0.25, 0.5], -0.75)):
        weights = torch.tensor([pair], device=device)
        out = FusedMoEExpertsFwdOp(target=target)(
            torch.empty_like(x), x, wg, wd, weights, ids, None, bd
        )
        assert out.tolist() == [[want] * H]


def test_ids_outside_the_experts_add_nothing(target, device, dtype, assert_accurate):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, dtype)
    ids[0] = -1
    ids[1, 0], ids[2, 1], ids[3, 2] = 6, 2**31 - 1, -(2**31)
    output = torch.full_like(x, float("nan"))
    FusedMoEExpertsFwdOp(target=target)(output, x, wg, wd, weights, ids, bg, bd)
    assert (output[0] == 0).all()
    args = x, wg, wd, weights, ids, "silu_and_mul", bg, bd
    assert_accurate(output, formulas.experts(*args), eager_experts(*args))


def test_local_slices_of_the_experts_add_up(target, device, assert_accurate):
    """Four ranks with two experts each, ids shifted to the local range, against all eight."""
    x, wg, wd, weights, ids, bg, bd = experts_case(device, torch.bfloat16, E=8, K=4)
    assert bg is not None
    assert bd is not None
    op = FusedMoEExpertsFwdOp(target=target)
    total = torch.zeros(x.shape, device=device)
    for rank in range(4):
        mine = slice(2 * rank, 2 * rank + 2)
        local = ids - 2 * rank
        total += op(torch.empty_like(x), x, wg[mine], wd[mine], weights, local, bg[mine], bd[mine])
    args = x, wg, wd, weights, ids, "silu_and_mul", bg, bd
    assert_accurate(total.bfloat16(), formulas.experts(*args), eager_experts(*args))


@pytest.mark.parametrize(
    "layout",
    [
        TIGHT,
        ContiguousLayoutSpec.aligned_physical_psum(16),
        ContiguousLayoutSpec.tight_per_row(),
        ContiguousLayoutSpec.aligned_per_row(8),
        MaskedLayoutSpec(23),
    ],
    ids=repr,
)
def test_stages_on_any_layout_make_the_layer(
    target, device, dtype, layout, assert_accurate, poison
):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, dtype)
    rows, metadata, inverse = MoEPrePermuteFwdOp(layout, 6, target=target)(x, ids)
    mlp = MoEExpertMLPFwdOp(layout, "gelu_and_mul", target=target)
    poison(rows.numel() * rows.element_size(), rows.numel() * 40 * 2 // 72)
    down = mlp(rows, wg, wd, metadata, b_gate_up=bg, b_down=bd)
    out = MoEPostPermuteFwdOp(layout, target=target)(down, weights, inverse)
    args = x, wg, wd, weights, ids, "gelu_and_mul", bg, bd
    assert_accurate(out, formulas.experts(*args), eager_experts(*args))
    buffer = torch.empty_like(rows)
    assert mlp(rows, wg, wd, metadata, buffer, b_gate_up=bg, b_down=bd) is buffer
    assert torch.equal(MoEPostPermuteFwdOp(layout, target=target)(buffer, weights, inverse), out)


def test_the_scaling_factor_is_applied_exactly_once(target, device):
    layer = SMALL["qwen3-30b-a3b"]
    w, x = layer.weights(torch.bfloat16, device), layer.tokens(9, torch.bfloat16, device)
    settings = layer.settings()
    one = FusedMoEFwdOp(**settings, target=target)(**x, **w)
    # a power of two commutes with every rounding
    four = FusedMoEFwdOp(**{**settings, "routed_scaling_factor": 4.0}, target=target)(**x, **w)
    assert torch.equal(four, 4 * one)


def test_same_call_same_bits(target, device):
    layer = SMALL["qwen3-30b-a3b"]
    w, x = layer.weights(torch.bfloat16, device), layer.tokens(64, torch.bfloat16, device)
    op = FusedMoEFwdOp(**layer.settings(), target=target)
    first = op(**x, **w)
    for _ in range(20):
        assert torch.equal(op(**x, **w), first)


def test_a_nan_token_stays_alone(target, device):
    layer = SMALL["mixtral-8x7b"]
    w, x = layer.weights(torch.bfloat16, device), layer.tokens(12, torch.bfloat16, device)
    op = FusedMoEFwdOp(**layer.settings(), target=target)
    clean = op(**x, **w)
    x["hidden_states"][3] = float("nan")
    x["gating_output"][7] = float("nan")
    got = op(**x, **w)
    rest = [t for t in range(12) if t not in (3, 7)]
    assert got[[3, 7]].isnan().all()
    assert torch.equal(got[rest], clean[rest])


@pytest.mark.parametrize("logits", [torch.float32, torch.bfloat16, torch.float16])
def test_logit_dtypes(target, device, logits):
    layer = SMALL["mixtral-8x7b"]
    w, x = layer.weights(torch.bfloat16, device), layer.tokens(8, torch.bfloat16, device)
    x["gating_output"] = x["gating_output"].to(logits)
    got = FusedMoEFwdOp(**layer.settings(), target=target)(**x, **w)
    weights, ids = FusedTopKFwdOp(2, renormalize=True, target=target)(x["gating_output"])
    want = FusedMoEExpertsFwdOp(target=target)(
        torch.empty_like(got), x["hidden_states"], w["w_gate_up"], w["w_down"], weights, ids
    )
    assert torch.equal(got, want)


def test_many_tokens(target, device):
    """More routes than a grid axis holds, through the whole layer."""
    x, wg, wd, _, _, _, _ = experts_case(device, torch.bfloat16, T=1, E=4, H=16, F=16)
    hidden = x.expand(70_000, 16).contiguous()
    logits = torch.randn(70_000, 4, device=device)
    got = FusedMoEFwdOp(1, target=target)(hidden, logits, wg, wd)
    few = FusedMoEFwdOp(1, target=target)(hidden[-5:], logits[-5:], wg, wd)
    torch.testing.assert_close(got[-5:], few, rtol=2**-7, atol=1e-3)


def test_views(target, device):
    x, wg, wd, weights, ids, _, _ = experts_case(device, torch.bfloat16, T=8, E=3, K=2, H=64, F=32)
    wide = torch.zeros(16, 96, device=device).bfloat16()
    wide[::2, 16:80] = x
    padded = torch.zeros(6, 64, 72, device=device).bfloat16()
    padded[::2, :, :64] = wg
    op = FusedMoEExpertsFwdOp(target=target)
    want = op(torch.empty_like(x), x, wg, wd, weights, ids)
    out = torch.zeros(8, 128, device=device).bfloat16()[:, 64:]
    got = op(out, wide[::2, 16:80], padded[::2, :, :64], wd, weights, ids)
    assert torch.equal(got, want)


def test_rows_that_are_all_one_token(target, device):
    case = experts_case(device, torch.bfloat16, T=40, E=4, K=2, H=512, F=64, biases=False)
    x, wg, wd, weights, ids, _, _ = case
    x = x[:1].expand(40, 512)  # of stride 0
    op = FusedMoEExpertsFwdOp(target=target)
    want = op(torch.empty(40, 512).to(x), x.contiguous(), wg, wd, weights, ids)
    assert torch.equal(op(torch.empty(40, 512).to(x), x, wg, wd, weights, ids), want)


def test_output_must_not_overlap(target, device):
    x, wg, wd, weights, ids, bg, bd = experts_case(device, torch.bfloat16, H=64, F=32)
    op = FusedMoEExpertsFwdOp(target=target)
    before = x.clone()
    with pytest.raises(
        ValueError, match="FusedMoEExpertsFwdOp: output must not overlap hidden_states"
    ):
        op(x, x, wg, wd, weights, ids)
    with pytest.raises(ValueError, match="output must not overlap w_down"):
        op(wd.view(-1)[: x.numel()].view(x.shape), x, wg, wd, weights, ids)
    assert torch.equal(x, before)
    mlp = MoEExpertMLPFwdOp(TIGHT, target=target)
    ends = torch.full((6,), 23, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="MoEExpertMLPFwdOp: out must not overlap w_down"):
        mlp(x, wg, wd, ends, wd.view(-1)[: x.numel()].view(x.shape))
    # the input is spent when the down GEMM writes, so its memory may be used again
    want = mlp(x, wg, wd, ends)
    assert torch.equal(mlp(x, wg, wd, ends, x), want)


def test_errors(target, device):
    op = FusedMoEFwdOp(2, target=target)
    x, logits = torch.randn(5, 16, device=device).bfloat16(), torch.randn(5, 4, device=device)
    wg = torch.randn(4, 16, 16, device=device).bfloat16()
    wd = torch.randn(4, 16, 8, device=device).bfloat16()
    with pytest.raises(
        ValueError,
        match=r"FusedMoEFwdOp: w_down must be \[E, H, F\] = \[4, 16, 8\], got \(4, 8, 16\)",
    ):
        op(x, logits, wg, wd.transpose(1, 2).contiguous())
    with pytest.raises(
        ValueError,
        match=r"w_gate_up must be \[E, 2F, H\] = \[4, 2F, 16\] with 2F even, got \(4, 15, 16\)",
    ):
        op(x, logits, wg[:, :15], wd)
    with pytest.raises(ValueError, match="w_down must be torch.bfloat16, got torch.float16"):
        op(x, logits, wg, wd.half())
    with pytest.raises(
        ValueError, match=r"gating_output must be \[T, E\] = \[5, E\], got \(4, 4\)"
    ):
        op(x, logits[:4], wg, wd)
    with pytest.raises(ValueError, match=r"hidden_states must be \[T, H\], got \(1, 5, 16\)"):
        op(x[None], logits, wg, wd)
    with pytest.raises(ValueError, match=r"w_down must be on cpu|w_down must be on cuda"):
        op(x, logits, wg, wd.to("meta"))
    with pytest.raises(ValueError, match="top_k must be at most 4"):
        FusedMoEFwdOp(5, target=target)(x, logits, wg, wd)
    with pytest.raises(
        ValueError, match="correction_bias must be None with scoring_func='softmax'"
    ):
        op(x, logits, wg, wd, torch.zeros(4, device=device))
    with pytest.raises(RuntimeError, match="w_gate_up requires grad"):
        op(x, logits, wg.clone().requires_grad_(), wd)
    experts = FusedMoEExpertsFwdOp(target=target)
    ids = torch.zeros(5, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"topk_ids must be \[T, K\] = \[5, 3\], got \(5, 2\)"):
        experts(torch.empty_like(x), x, wg, wd, torch.rand(5, 3, device=device), ids)
    with pytest.raises(
        ValueError, match=r"topk_ids must be torch.int32, got torch.int64; use topk_ids.int\(\)"
    ):
        experts(torch.empty_like(x), x, wg, wd, torch.rand(5, 2, device=device), ids.long())
    with pytest.raises(ValueError, match=r"output must be \[T, H\] = \[5, 16\], got \(5, 8\)"):
        experts(x[:, :8].clone(), x, wg, wd, torch.rand(5, 2, device=device), ids)


@pytest.mark.gpu
def test_float32_on_cuda_names_the_target_that_takes_it():
    x, wg, wd, weights, ids, _, _ = experts_case("cuda", torch.float32)
    with pytest.raises(ValueError, match="target 'cuda' cannot run .*'reference'"):
        FusedMoEExpertsFwdOp()(torch.empty_like(x), x, wg, wd, weights, ids)


def test_no_tokens_of_numpy(target, device):
    """An empty array of NumPy has strides of 0 only, which ``.contiguous()`` keeps."""

    def none(width, dtype=torch.bfloat16):
        return torch.empty_strided((0, width), (0, 0), dtype=dtype, device=device)

    _, w_gate_up, w_down, *_ = experts_case(device, torch.bfloat16, biases=False)
    x, logits = none(72), none(6)
    assert FusedMoEFwdOp(3, target=target)(x, logits, w_gate_up, w_down).shape == (0, 72)
    assert [found.shape for found in FusedTopKFwdOp(3, target=target)(logits)] == [(0, 3)] * 2
    rows, ends, inverse = MoEPrePermuteFwdOp(TIGHT, 6, target=target)(x, none(3, torch.int32))
    assert (rows.shape, inverse.shape) == ((0, 72), (0,))
    assert not ends.any()
    assert SwiGLUFwdOp(target=target)(x).shape == (0, 36)
    router = MoERouterFwdOp(6, 3, dtype=torch.bfloat16, target=target)
    assert router(logits)[0].shape[0] == 0
    found = (quantized(shape, device) for shape in ((6, 512, 256), (6, 256, 256)))
    weights = [x for pair in found for x in pair]
    assert FusedMoEFP8FwdOp(2, target=target)(none(256), logits, *weights).shape == (0, 256)
    assert quantize_fp8_rowwise(none(256), target=target)[0].shape == (0, 256)
