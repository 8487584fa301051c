"""The FP8 layer: against float64 with the same quantisations and without, edges, messages."""

import dataclasses
import math

import formulas
import pytest
import torch
from test_grouped_gemm_fp8 import E4M3, dequantised, fp8, scales
from test_modular import Doubled, Shard

from tileops.compilation import collecting
from tileops.kernels.cuda.sm90 import fused_experts_fp8
from tileops.moe import (
    FusedMoEExpertsFwdOp,
    FusedMoEFP8FwdOp,
    FusedMoEPrepareAndFinalize,
    PrepareResult,
    quantize_fp8_blockwise,
    quantize_fp8_rowwise,
)
from tileops.moe.modular import PrepareAndFinalizeNoOp
from tileops.targets import NoKernelError
from tileops.workloads.accuracy import bound, relative_error
from tileops.workloads.manifest import layers

MODELS = "qwen3-30b-a3b deepseek-v3 gpt-oss-20b llama-4-maverick"
SMALL = {
    name: dataclasses.replace(layers()[name], num_experts=32, hidden_size=256, ffn_size=128)
    for name in MODELS.split()
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
H, F = 256, 128


def fp8_weights(w):
    """Quantise what a layer has; names as the op takes them."""
    found = {name: w[name] for name in ("correction_bias", "b_gate_up", "b_down")}
    for name in ("w_gate_up", "w_down"):
        q, scale = quantize_fp8_blockwise(w[name], target="reference")
        found |= {name: q, f"{name}_scale": scale}
    return found


def rounded_rows(x):
    """What is left of rows that were quantised; for finite values."""
    blocks = x.unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(-1, keepdim=True).float()
    scale = amax / torch.full_like(amax, 448)  # a GPU would multiply by the inverse of a number
    scale = torch.where(scale == 0, 1.0, scale)
    return ((blocks / scale).to(E4M3).to(x.dtype) * scale.to(x.dtype)).flatten(-2)


def plain(x, w, weights, ids, activation, compute, out_dtype, rows=rounded_rows):
    """The layer's experts in plain torch, quantised where the op quantises."""
    out = torch.zeros(x.shape, dtype=compute, device=x.device)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        w_gate_up, w_down = (
            dequantised(w[name][e], w[f"{name}_scale"][e], 128).to(compute)
            for name in ("w_gate_up", "w_down")
        )
        product = rows(x[token].to(compute)) @ w_gate_up.T
        if w["b_gate_up"] is not None:
            product += w["b_gate_up"][e].to(compute)
        act = formulas.gated(product, activation).to(compute)
        down = rows(act) @ w_down.T
        if w["b_down"] is not None:
            down += w["b_down"][e].to(compute)
        if compute == torch.float32:
            down = down.to(out_dtype)
        out.index_add_(0, token, down.to(compute) * weights[token, slot, None].to(compute))
    return out.to(out_dtype if compute == torch.float32 else compute)


def check(got, x, w, weights, ids, activation):
    """Twice torch's error and a rounding, with the quantisations counted as error and without."""
    args = x, w, weights, ids, activation
    same = plain(*args, torch.float32, got.dtype)
    exact = plain(*args, torch.float64, got.dtype, rows=lambda x: x)
    assert relative_error(got, exact) <= bound(same, exact)
    quantised = plain(*args, torch.float64, got.dtype)
    # an activation between two numbers of e4m3 may fall to either side: the further apart sums are
    # in their last bits, the more of them do
    either = 5e-3 if got.device.type == "cuda" else 2e-4
    assert relative_error(got, quantised) <= bound(same, quantised) + either


def assert_near(got, want):
    """Compare what two ways of the same layer give; on a GPU they may add up in other orders."""
    assert got.dtype == want.dtype
    limit = 1e-2 if got.device.type == "cuda" else 1e-6
    assert relative_error(got, want) <= limit


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_tokens", [0, 1, 20])
def test_layers_of_models(target, device, name, num_tokens, poison):
    layer, dtype = SMALL[name], torch.bfloat16
    x = layer.tokens(num_tokens, dtype, device)
    w = fp8_weights(layer.weights(dtype, device))
    poison(num_tokens * layer.top_k * 256, num_tokens * layer.top_k * 512)
    got = FusedMoEFP8FwdOp(**layer.settings(), target=target)(**x, **w)
    assert got.dtype == dtype
    assert got.shape == x["hidden_states"].shape
    settings = layer.routing_settings()
    names = "top_k", "scoring_func", "renormalize", "num_expert_group", "topk_group"
    routing = [settings[n] for n in names] + [layer.routed_scaling_factor, w["correction_bias"]]
    weights, ids = formulas.route(x["gating_output"], *routing)
    routes = weights.float().to(device), ids.to(device)
    check(got, x["hidden_states"], w, *routes, layer.activation)


def case(device, dtype=torch.bfloat16, T=13, E=6, biases=False, hidden=H):
    x = torch.randn(T, hidden, device=device).to(dtype)
    logits = torch.linspace(-2, 2, E)[torch.rand(T, E).argsort(-1)].to(device)
    w = {
        "w_gate_up": torch.randn(E, 2 * F, hidden, device=device) / hidden**0.5,
        "w_down": 2 * torch.randn(E, hidden, F, device=device) / F**0.5,
        "b_gate_up": torch.randn(E, 2 * F, device=device).to(dtype) if biases else None,
        "b_down": torch.randn(E, hidden, device=device).to(dtype) if biases else None,
        "correction_bias": None,
    }
    return x, logits, fp8_weights(w)


@every_dtype
@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_and_mul", "swigluoai"])
@pytest.mark.parametrize("biases", [False, True])
def test_settings(target, device, dtype, activation, biases):
    x, logits, w = case(device, dtype, biases=biases)
    op = FusedMoEFP8FwdOp(3, "softmax", True, 2.5, activation=activation, target=target)
    got = op(x, logits, **w)
    assert got.dtype == dtype
    weights, ids = formulas.route(logits, 3, "softmax", True, scale=2.5)
    check(got, x, w, weights.float().to(device), ids.to(device), activation)


@pytest.mark.parametrize("E", [1, 6])
def test_all_rows_on_one_expert(target, device, E):
    x, logits, w = case(device, E=E)
    logits[:, E // 2] = 100
    got = FusedMoEFP8FwdOp(1, target=target)(x, logits, **w)
    weights, ids = formulas.route(logits, 1, "softmax")
    check(got, x, w, weights.float().to(device), ids.to(device), "silu_and_mul")


def test_special_tokens_stay_in_their_rows(target, device):
    x, logits, w = case(device)
    op = FusedMoEFP8FwdOp(3, target=target)
    want = op(x, logits, **w)
    x = x.clone()
    x[3, 5], x[4], x[5, :128], x[6] = math.nan, 0, 0, math.inf
    got = op(x, logits, **w)
    rest = [t for t in range(13) if t not in (3, 4, 5, 6)]
    assert torch.equal(got[rest], want[rest])
    assert got[3].isnan().all()
    assert (got[4] == 0).all()
    # infinities count as 448, and the scale of a block without a finite value is 1
    x[6] = 448
    assert torch.equal(got[6], op(x, logits, **w)[6])


def test_views(target, device):
    x, logits, w = case(device)
    want = FusedMoEFP8FwdOp(3, target=target)(x, logits, **w)
    wide = torch.zeros(26, H + 16, device=device, dtype=x.dtype)
    wide[::2, 16:] = x
    moved = {}
    for name, tensor in w.items():
        moved[name] = tensor
        if tensor is not None and tensor.dtype == E4M3:
            room = torch.zeros(*tensor.shape[:2], tensor.shape[2] + 16, device=device).to(E4M3)
            moved[name] = room[..., 16:].copy_(tensor)
        elif tensor is not None:
            moved[name] = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    got = FusedMoEFP8FwdOp(3, target=target)(wide[::2, 16:], logits, **moved)
    assert torch.equal(got, want)


def few_routes(device, T=5, K=3, E=16, H=H, F=F):
    """Fewer routes than experts, and a magnitude of its own for every block of 128 columns."""

    def uneven(*shape):
        blocks = torch.randn(*shape, device=device).unflatten(-1, (-1, 128))
        return (blocks * (0.1 + torch.rand(*blocks.shape[:-1], 1, device=device))).flatten(-2)

    w = {"w_gate_up": uneven(E, 2 * F, H) / H**0.5, "w_down": 2 * uneven(E, H, F) / F**0.5}
    for name in w:
        rows = w[name].unflatten(1, (-1, 128))
        w[name] = (rows * (0.1 + torch.rand(*rows.shape[:2], 1, 1, device=device))).flatten(1, 2)
    w |= dict.fromkeys(("correction_bias", "b_gate_up", "b_down"))
    ids = torch.rand(T, E, device=device).argsort(-1)[:, :K].int()
    return uneven(T, H).bfloat16(), fp8_weights(w), torch.rand(T, K, device=device), ids


@pytest.mark.parametrize("activation", ["silu_and_mul", "swigluoai"])
@pytest.mark.parametrize("biases", [False, True])
def test_few_rows_of_an_expert_and_many(target, device, activation, biases, poison):
    """They are multiplied in tiles of two kinds, and an expert may have both."""
    counts = 300, 65, 128, 1, 0, 64, 17
    x, _, w = case(device, T=sum(counts), E=len(counts), biases=biases)
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.rand(sum(counts)).argsort()].int()[:, None].to(device)
    weights = torch.rand(sum(counts), 1, device=device)
    poison(sum(counts) * F, sum(counts) * H * 2)
    got = run_experts(target, x, w, weights, ids, activation)
    check(got, x, w, weights, ids, activation)


@pytest.mark.gpu
def test_many_short_jobs_of_two_products():
    """Blocks are several jobs ahead, and have more than they are told of at a time."""
    x, _, w = case("cuda", T=90_000, hidden=128)
    ids = torch.rand(90_000, 6, device="cuda").topk(2).indices.int()
    weights = torch.rand(90_000, 2, device="cuda")
    got = run_experts("cuda", x, w, weights, ids)
    assert_near(got, run_experts("reference", x, w, weights, ids))


def run_experts(target, x, w, weights, ids, activation="silu_and_mul", factor=1.0):
    names = "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale"
    args = *(w[name] for name in names), weights, ids, w["b_gate_up"], w["b_down"]
    run = torch.ops.tileops.fused_moe_experts_fp8_fwd.default
    return run(x, None, *args, factor, activation, x.dtype, target)


@pytest.mark.parametrize(("T", "K"), [(1, 8), (5, 3), (15, 1)])
@pytest.mark.parametrize(
    ("H", "F", "dtype"),
    [(256, 128, torch.bfloat16), (384, 640, torch.float16), (2048, 384, torch.bfloat16)],
)
def test_few_routes(target, device, T, K, H, F, dtype, poison):
    x, w, weights, ids = few_routes(device, T, K, H=H, F=F)
    if K == 1:
        ids[:12] = 7  # more than are multiplied together
    x = x.to(dtype)
    poison(T * K * F * 4, T * K * H * 2)
    got = run_experts(target, x, w, weights, ids, factor=2.5)
    assert got.dtype == dtype
    check(got, x, w, 2.5 * weights, ids, "silu_and_mul")
    assert torch.equal(run_experts(target, x, w, weights, ids, factor=2.5), got)


def test_few_routes_with_work_for_the_whole_gpu(target, device, poison):
    """The form of many routes takes them on ``cuda``."""
    x, w, weights, ids = few_routes(device, T=12, K=8, E=128, H=512, F=256)
    poison(96 * 256, 96 * 512 * 2)
    check(run_experts(target, x, w, weights, ids), x, w, weights, ids, "silu_and_mul")


def test_few_routes_with_ids_outside_the_experts(target, device):
    x, w, weights, ids = few_routes(device)
    ids[0], ids[1, 1], ids[2, 2], ids[3, 0] = -1, 16, 2**31 - 1, -(2**31)
    got = run_experts(target, x, w, weights, ids)
    assert (got[0] == 0).all()
    outside = (ids < 0) | (ids >= 16)
    check(got, x, w, weights.masked_fill(outside, 0), ids.masked_fill(outside, 0), "silu_and_mul")


def test_few_routes_of_special_tokens(target, device):
    x, w, weights, ids = few_routes(device)
    ids[:, 0] = 7
    want = run_experts(target, x, w, weights, ids)
    x = x.clone()
    x[1, 5], x[2], x[3] = math.nan, 0, math.inf
    got = run_experts(target, x, w, weights, ids)
    assert torch.equal(got[[0, 4]], want[[0, 4]])
    assert got[1].isnan().all()
    assert (got[2] == 0).all()
    x[3] = 448
    assert torch.equal(got[3], run_experts(target, x, w, weights, ids)[3])


def test_few_routes_with_activations_past_float32(kernels, device):
    x, w, weights, ids = few_routes(device, F=256)
    w["w_gate_up_scale"][7] *= 1e30  # products of gate and up overflow
    w["w_gate_up_scale"][3] *= 1e-19  # and here they have a scale without a finite inverse
    w["w_gate_up_scale"][2, 0] = math.nan
    ids[:] = torch.tensor([7, 4, 5])
    ids[0, 1], ids[1, 1] = 3, 2
    got = run_experts(kernels, x, w, weights, ids)
    want = run_experts("reference", x, w, weights, ids)
    assert got[1].isnan().all()
    rest = [0, 2, 3, 4]
    assert want[rest].isfinite().all()
    torch.testing.assert_close(got[rest], want[rest], rtol=2e-2, atol=2e-2 * want[2].std().item())


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "indexed_experts_fp8"),
        ({"T": 6}, "sm90.multiply_tiles_fp8"),  # as many routes as experts or more
        ({"E": 200, "T": 40}, "sm90.multiply_tiles_fp8"),  # jobs for most multiprocessors
        ({"activation": "gelu_and_mul"}, "sm90.multiply_tiles_fp8"),
        ({"biases": True}, "sm90.multiply_tiles_fp8"),
    ],
)
def test_the_cuda_kernel_follows_the_number_of_routes(change, kernel):
    x, w, weights, ids = few_routes("cpu", T=change.get("T", 5), E=change.get("E", 16))
    if "biases" in change:
        w["b_gate_up"], w["b_down"] = (
            torch.zeros(16, 2 * F).bfloat16(),
            torch.zeros(16, H).bfloat16(),
        )
    with collecting("sm_90a") as builds:
        run_experts("cuda", x, w, weights, ids, change.get("activation", "silu_and_mul"))
    products = [b.module for b in builds if "multiply" in b.module or "indexed" in b.module]
    assert products == [f"tileops.kernels.cuda.{kernel}"] * 2


def shared_case(device, S=384):
    names = "shared_w_gate_up", "shared_w_down"
    shapes = (2 * S, H), (H, S)
    found = {}
    for name, shape in zip(names, shapes, strict=True):
        w = torch.randn(shape, device=device) / shape[1] ** 0.5
        found[name], found[f"{name}_scale"] = quantize_fp8_blockwise(w, target="reference")
    return found


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_the_shared_expert_is_an_expert_of_every_token(target, device, num_tokens):
    x, logits, w = case(device, T=num_tokens)
    shared = shared_case(device)
    op = FusedMoEFP8FwdOp(3, routed_scaling_factor=2.5, target=target)
    shared_output, routed_output = op(x, logits, **w, **shared)
    assert torch.equal(routed_output, op(x, logits, **w))
    alone = {name.removeprefix("shared_"): tensor[None] for name, tensor in shared.items()}
    alone |= {"b_gate_up": None, "b_down": None}
    once = torch.ones(num_tokens, 1, device=device)
    check(shared_output, x, alone, once, torch.zeros_like(once).int(), "silu_and_mul")


@pytest.mark.parametrize("movement", [PrepareAndFinalizeNoOp(), Doubled()])
def test_moved_tokens(target, device, movement):
    args = case(device, torch.float32, biases=True)
    x, logits, w = args
    want = FusedMoEFP8FwdOp(3, "sigmoid", True, 2.5, target=target)(x, logits, **w)
    op = FusedMoEFP8FwdOp(3, "sigmoid", True, 2.5, prepare_finalize=movement, target=target)
    assert_near(op(x, logits, **w), want)


class Quantised(FusedMoEPrepareAndFinalize):
    """Sends FP8 tokens and their scales, as ranks do to save bandwidth."""

    def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
        q, scale = quantize_fp8_rowwise(hidden_states)
        return PrepareResult(q, topk_weights, topk_ids, scale)

    def finalize(self, output, expert_output, topk_weights, topk_ids, weighted_reduce):
        assert expert_output.dtype == output.dtype
        weighted_reduce.apply(output, expert_output, topk_weights, topk_ids)


@every_dtype
@pytest.mark.parametrize("num_tokens", [0, 13])
def test_tokens_that_come_quantised(target, device, dtype, num_tokens):
    # the scales of a token are permuted as 16-byte words on cuda
    x, logits, w = case(device, dtype, T=num_tokens, hidden=512)
    want = FusedMoEFP8FwdOp(3, target=target)(x, logits, **w)
    op = FusedMoEFP8FwdOp(3, prepare_finalize=Quantised(), target=target)
    assert_near(op(x, logits, **w), want)


def test_ranks_with_local_weights_add_up(target, device):
    x, logits, w = case(device, torch.float32)
    want = FusedMoEFP8FwdOp(3, target=target)(x, logits, **w)
    total = torch.zeros_like(want)
    for first in (0, 2, 4):
        op = FusedMoEFP8FwdOp(3, prepare_finalize=Shard(first), target=target)
        mine = {n: None if t is None else t[first : first + 2] for n, t in w.items()}
        total += op(x, logits, **mine)
    assert_near(total, want)


def test_messages():
    x, logits, w = case("cpu")
    op = FusedMoEFP8FwdOp(3)
    wrong = [
        (
            r"w_gate_up must have F a multiple of 128.* got F = 64 in \(6, 128, 256\)",
            {"w_gate_up": fp8(6, 128, H)},
        ),
        (
            r"w_gate_up must have H a multiple of 128",
            {"hidden_states": x[:, :72], "w_gate_up": fp8(6, 256, 72)},
        ),
        (
            r"w_gate_up must be torch.float8_e4m3fn, got torch.bfloat16",
            {"w_gate_up": w["w_gate_up"].bfloat16()},
        ),
        (
            r"w_gate_up_scale must be \[E, 2F/128, H/128\] = \[6, 2, 2\], got \(6, 1, 2\)",
            {"w_gate_up_scale": scales(6, 1, 2)},
        ),
        (
            r"w_down must be \[E, H, F\] = \[6, 256, 128\], got \(6, 128, 256\)",
            {"w_down": fp8(6, 128, 256)},
        ),
        (
            r"w_down_scale must be \[E, H/128, F/128\] = \[6, 2, 1\], got \(6, 1, 2\)",
            {"w_down_scale": scales(6, 1, 2)},
        ),
        (r"w_down_scale must be torch.float32", {"w_down_scale": w["w_down_scale"].bfloat16()}),
        (r"b_down must be torch.bfloat16, got torch.float32", {"b_down": torch.zeros(6, H)}),
        (r"hidden_states must be torch.float32 or", {"hidden_states": fp8(13, H)}),
    ]
    right = {"hidden_states": x, "gating_output": logits, **w}
    for message, change in wrong:
        with pytest.raises(ValueError, match=f"^FusedMoEFP8FwdOp: {message}"):
            op(**{**right, **change})
    shared = shared_case("cpu")
    for name in shared:
        with pytest.raises(ValueError, match=f"{name} must be given with the other tensors"):
            op(**right, **{**shared, name: None})
    with pytest.raises(ValueError, match="shared_w_gate_up must have S a multiple of 128"):
        op(**right, **{**shared, "shared_w_gate_up": fp8(2 * 192, H)})
    with pytest.raises(
        ValueError, match=r"shared_w_down_scale must be \[H/128, S/128\] = \[2, 3\]"
    ):
        op(**right, **{**shared, "shared_w_down_scale": scales(3, 2)})
    with pytest.raises(ValueError, match="experts must be None, got .* gets no scales"):
        FusedMoEFP8FwdOp(3, experts=FusedMoEExpertsFwdOp())
    with pytest.raises(ValueError, match="^FusedMoEFP8FwdOp: top_k must be at least 1"):
        FusedMoEFP8FwdOp(0)


def test_messages_about_prepared_tokens():
    x, logits, w = case("cpu")

    class Prepared(Quantised):
        def __init__(self, hidden_states, scale):
            self.tokens = hidden_states, scale

        def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
            return PrepareResult(self.tokens[0], topk_weights, topk_ids, self.tokens[1])

    for tokens, message in (
        ((x, scales(13, 2)), "hidden_states must be torch.float8_e4m3fn, got torch.bfloat16"),
        ((fp8(13, H), None), "hidden_states must be torch.bfloat16, got torch.float8_e4m3fn"),
        ((fp8(13, H), scales(13, 1)), r"scale must be \[T', H/128\] = \[13, 2\], got \(13, 1\)"),
    ):
        op = FusedMoEFP8FwdOp(3, prepare_finalize=Prepared(*tokens))
        with pytest.raises(ValueError, match=f"^FusedMoEFP8FwdOp: prepared {message}"):
            op(x, logits, **w)


def test_messages_about_prepared_routes():
    x, logits, w = case("cpu")

    class Prepared(Quantised):
        def __init__(self, change):
            self.change = change

        def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
            return PrepareResult(hidden_states, *self.change(topk_weights, topk_ids))

    for change, message in (
        (lambda w, i: (w, i.long()), r"topk_ids must be torch.int32, got torch.int64"),
        (lambda w, i: (w, i[:3]), r"topk_ids must be \[T', K\] = \[13, 3\], got \(3, 3\)"),
        (lambda w, i: (w[:, :2], i[:, :1]), r"topk_ids must be \[T', K\] = \[13, 2\]"),
        (lambda w, i: (w, i.T.contiguous().T), "topk_ids must have a last dimension of stride 1"),
        (lambda w, i: (w.bfloat16(), i), "topk_weights must be torch.float32"),
        (lambda w, i: (w[:3], i), r"topk_weights must be \[T', K\]"),
    ):
        op = FusedMoEFP8FwdOp(3, prepare_finalize=Prepared(change))
        with pytest.raises(ValueError, match=f"^FusedMoEFP8FwdOp: prepared {message}"):
            op(x, logits, **w)


@pytest.mark.parametrize("num_routes", [3, 40])
def test_what_cuda_does_not_take(num_routes):
    """Fewer routes than experts and more have kernels of their own, which must both refuse."""
    _, _, w = case("cpu")
    x = torch.zeros(num_routes, H).bfloat16()

    def run(w):
        ids = torch.zeros(num_routes, 1, dtype=torch.int32)
        with collecting("sm_90a"):
            run_experts("cuda", x, w, torch.ones(num_routes, 1), ids)

    run(w)
    shifted = torch.zeros(6 * 2 * F * H + 8).to(E4M3)[8:].view(6, 2 * F, H)
    with pytest.raises(NoKernelError, match="16-byte"):
        run(w | {"w_gate_up": shifted})
    if num_routes > 6:
        with pytest.raises(NoKernelError, match="expanded dimensions"):
            run(w | {"w_down": w["w_down"][:1].expand(6, -1, -1)})


def test_cuda_counts_rows_in_32_bits():
    _, _, w = case("cpu")
    matrices = w["w_gate_up"], w["w_gate_up_scale"], w["w_down"], w["w_down_scale"]
    for num_tokens, reason in ((2**27, ""), (2**27 + 2, "less than 2**35 bytes in FP8")):
        x = torch.zeros(1, H).bfloat16().expand(num_tokens, H)
        weights = torch.ones(1, 1).expand(num_tokens, 1)
        routes = weights, torch.zeros(1, 1, dtype=torch.int32).expand(num_tokens, 1)
        settings = None, None, 1.0, "silu_and_mul"
        with collecting("sm_90a"):
            found = fused_experts_fp8.refuse(
                x, *matrices, *routes, *settings, target="cuda", out=torch.empty(0, H).bfloat16()
            )
        assert (found or "").startswith("takes") is bool(reason)
        assert reason in (found or "")
