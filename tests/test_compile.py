"""torch.compile, opcheck, fake and meta tensors, inference mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tileops.moe import (
    ContiguousLayoutSpec,
    FusedMoEExpertsFwdOp,
    FusedMoEFP8FwdOp,
    FusedMoEFwdOp,
    FusedMoESharedExpertFwdOp,
    FusedTopKFwdOp,
    IndexedExpertMLPFwdOp,
    MaskedLayoutSpec,
    MoEExpertMLPFwdOp,
    MoEFwdOp,
    MoEGroupedGemmFP8FwdOp,
    MoEGroupedGemmFwdOp,
    MoEPermuteAlignFwdOp,
    MoEPostPermuteFwdOp,
    MoEPrePermuteFwdOp,
    MoERouterFwdOp,
    QMoEFwdOp,
    SharedExpertMLPFwdOp,
    SwiGLUFwdOp,
    quantize_fp8_blockwise,
    quantize_fp8_rowwise,
)

E, K, H, F = 4, 2, 128, 24  # H is a block of FP8
LAYOUTS = [ContiguousLayoutSpec.tight_physical_psum(), ContiguousLayoutSpec.aligned_per_row(4)]
LAYOUTS += [MaskedLayoutSpec(3)]


def weights(device):
    w_gate_up = torch.randn(E, 2 * F, H, device=device).bfloat16()
    w_down = torch.randn(E, H, F, device=device).bfloat16()
    return w_gate_up, w_down


def fp8_weights(device):
    """w_gate_up, w_down and their scales, for an F of 128."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (E, 2 * 128, H), (E, H, 128)
    found = (torch.randn(shape, device=device, generator=generator) for shape in shapes)
    return [x for w in found for x in quantize_fp8_blockwise(w, target="reference")]


def fp8_programs(target, device):
    """What `programs` returns, for the ops with FP8."""
    w = fp8_weights(device)
    layer = FusedMoEFP8FwdOp(K, renormalize=True, target=target)
    names = "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale"
    shared = {f"shared_{name}": x[0] for name, x in zip(names, w, strict=True)}
    topk = FusedTopKFwdOp(K, target=target)

    def quantized(x, g):
        rows = quantize_fp8_rowwise(x, power_of_two=True, target=target)
        blocks = quantize_fp8_blockwise(x[:, None].expand(-1, 128, -1), target=target)
        return tuple(y.view(torch.uint8) for y in (*rows, *blocks))

    found = {
        "quantize FP8": quantized,
        "FusedMoEFP8": lambda x, g: layer(x, g, *w),
        "FusedMoEFP8, shared": lambda x, g: layer(x, g, *w, **shared),
    }
    for layout in LAYOUTS:
        pre = MoEPrePermuteFwdOp(layout, E, target=target)
        post = MoEPostPermuteFwdOp(layout, target=target)
        gemm = MoEGroupedGemmFP8FwdOp(layout, target=target)

        def stages(x, g, pre=pre, post=post, gemm=gemm):
            scores, ids = topk(g)
            rows, metadata, inverse = pre(x, ids)
            q = quantize_fp8_rowwise(rows, target=target)
            out = torch.empty(*rows.shape[:-1], 2 * 128, dtype=torch.bfloat16, device=x.device)
            gemm(*q, *w[:2], metadata, out)
            return post(out, scores, inverse), post(gemm(*q, *w[:2], metadata), scores, inverse)

        found[f"FP8 stages {layout!r}"] = stages
    return found


def programs(target, device):
    """For each op a function of (hidden_states, gating_output): nothing else varies in size."""
    wg, wd = weights(device)
    topk = FusedTopKFwdOp(K, renormalize=True, target=target)
    layer, experts = FusedMoEFwdOp(K, target=target), FusedMoEExpertsFwdOp(target=target)
    shared = FusedMoESharedExpertFwdOp(K, target=target, tp_size=3, tp_rank=1)
    indexed, mlp_of_all = IndexedExpertMLPFwdOp(target=target), SharedExpertMLPFwdOp(target=target)
    align, router = MoEPermuteAlignFwdOp(E, 8, target=target), MoERouterFwdOp(2, K, target=target)
    swiglu, onnx_moe = (
        SwiGLUFwdOp(7.0, target=target),
        MoEFwdOp(K, "swiglu", True, 1, target=target),
    )
    sparse = MoEFwdOp(2, "silu", use_sparse_mixer=True, target=target)
    qmoe = QMoEFwdOp(8, None, K, "swiglu", True, 1, target=target)
    codes = [w.view(torch.uint8)[..., : w.shape[-1]] for w in (wg, wd)]
    found = {
        "FusedTopK": lambda x, g: topk(g),
        "FusedMoE": lambda x, g: layer(x, g, wg, wd),
        "FusedMoEExperts": lambda x, g: experts(torch.empty_like(x), x, wg, wd, *topk(g)),
        "IndexedExpertMLP": lambda x, g: indexed(torch.empty_like(x), x, wg, wd, *topk(g)),
        "FusedMoESharedExpert": lambda x, g: shared(x, g, wg, wd, None, wg[0], wd[0]),
        "SharedExpertMLP": lambda x, g: mlp_of_all(x, wg[0], wd[0]),
        "MoEPermuteAlign": lambda x, g: align(topk(g)[1]),
        "MoERouter": lambda x, g: router(g),
        "SwiGLU": lambda x, g: (swiglu(x), swiglu(x, x)),
        "MoE": lambda x, g: onnx_moe(x, g.bfloat16(), wg, None, wd),
        "MoE, sparse mixer": lambda x, g: sparse(x, g.bfloat16(), wg[:, :F], None, wd),
    }
    found["QMoE"] = lambda x, g: qmoe(
        x,
        g.bfloat16(),
        codes[0],
        wg[..., :1],
        None,
        codes[1],
        wd[..., :1],
        None,
        None,
        None,
        x[:, :E],
    )
    for layout in LAYOUTS:
        pre, mlp = (
            MoEPrePermuteFwdOp(layout, E, target=target),
            MoEExpertMLPFwdOp(layout, target=target),
        )
        gemm = MoEGroupedGemmFwdOp(layout, out_dtype=torch.float32, target=target)
        post = MoEPostPermuteFwdOp(layout, target=target)

        def stages(x, g, pre=pre, mlp=mlp, gemm=gemm, post=post):
            scores, ids = topk(g)
            rows, metadata, inverse = pre(x, ids)
            out = torch.empty_like(x)
            post(mlp(rows, wg, wd, metadata), scores, inverse, out)
            wide = gemm(rows, wg, metadata)
            return out, post(wide, scores, inverse)

        found[f"stages {layout!r}"] = stages
    return found | fp8_programs(target, device)


NAMES = list(programs("reference", "cpu"))


def tokens(num_tokens, device):
    return torch.randn(num_tokens, H, device=device).bfloat16(), torch.randn(
        num_tokens, E, device=device
    )


def equal(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_every_token_count(kernels, device, name):
    torch._dynamo.reset()
    program = programs(kernels, device)[name]
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (9, 7, 9, 51, 2, E, H):
        args = tokens(num_tokens, device)
        equal(compiled(*args), program(*args))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "name", ["FusedMoE", "FusedMoESharedExpert", "FusedMoEFP8", "MoE", f"stages {LAYOUTS[-1]!r}"]
)
def test_inductor(kernels, device, name):
    torch._dynamo.reset()
    program = programs(kernels, device)[name]
    compiled = torch.compile(program, fullgraph=True, dynamic=True)
    for num_tokens in (5, 12, 0, 1):
        args = tokens(num_tokens, device)
        equal(compiled(*args), program(*args))


def test_two_ops_with_other_settings_in_one_graph(kernels, device):
    torch._dynamo.reset()
    wg, wd = weights(device)
    a = FusedMoEFwdOp(1, target=kernels)
    b = FusedMoEFwdOp(3, "sigmoid", True, 2.5, activation="gelu_and_mul", target=kernels)

    def program(x, g):
        return b(a(x, g, wg, wd), g, wg, wd)

    args = tokens(6, device)
    equal(torch.compile(program, fullgraph=True, dynamic=True)(*args), program(*args))


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_have_the_shapes_of_real_ones(kernels, device, name):
    program = programs(kernels, device)[name]
    for num_tokens in (0, 1, 9):
        args = tokens(num_tokens, device)
        real = program(*args)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = program(*(mode.from_tensor(a) for a in args))
        real, fake = (x if isinstance(x, tuple) else (x,) for x in (real, fake))
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.dtype, r.stride(), r.device) == (
                f.shape,
                f.dtype,
                f.stride(),
                f.device,
            )


def test_meta_tensors():
    wg, wd = (w.to("meta") for w in weights("cpu"))
    x, g = (a.to("meta") for a in tokens(9, "cpu"))
    out = FusedMoEFwdOp(K)(x, g, wg, wd)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (9, H), torch.bfloat16)


def test_inference_mode(kernels, device):
    program = programs(kernels, device)["FusedMoE"]
    args = tokens(5, device)
    with torch.inference_mode():
        inferred = program(*args)
    equal(inferred, program(*args))


def test_export(kernels, device):
    wg, wd = weights(device)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.op = FusedMoEFwdOp(K, target=kernels)
            self.wg, self.wd = torch.nn.Buffer(wg), torch.nn.Buffer(wd)

        def forward(self, x, g):
            return self.op(x, g, self.wg, self.wd)

    layer, args = Layer(), tokens(6, device)
    num_tokens = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(layer, args, dynamic_shapes=({0: num_tokens}, {0: num_tokens}))
    args = tokens(11, device)
    equal(program.module()(*args), layer(*args))


def operator_calls(target, device):
    layout = repr(LAYOUTS[0])
    x, g = tokens(5, device)
    wg, wd = weights(device)
    ops = torch.ops.tileops
    ids = torch.randint(0, E, (5, K), dtype=torch.int32, device=device)
    rows, ends, inverse = ops.moe_pre_permute_fwd(x, ids, layout, E, target)
    scores = torch.rand(5, K, device=device)
    gemm = rows, wd.transpose(1, 2).contiguous(), ends, None, layout, None
    experts = x, wg, wd, scores, ids, None, None, 1.0, "silu_and_mul", target
    w8 = fp8_weights(device)
    q, q_scale = ops.quantize_fp8_rowwise_fwd(rows, False, target)
    gemm8 = q, q_scale, *w8[:2], ends, layout, target

    def codes(rows, columns):
        """Packed weights of 4 bits."""
        return torch.randint(0, 256, (E, rows, columns // 2), device=device).to(torch.uint8)

    return {
        "quantize_fp8_rowwise_fwd": (x, True, target),
        "quantize_fp8_blockwise_fwd": (wg.repeat(1, 16, 1), False, target),
        "moe_grouped_gemm_fp8_fwd": gemm8,
        "moe_grouped_gemm_fp8_fwd_out": (*gemm8, rows.new_empty(rows.shape[0], 2 * 128)),
        "fused_moe_experts_fp8_fwd": (x, None, *w8, scores, ids, None, None, 1.0)
        + ("silu_and_mul", torch.bfloat16, target),
        "fused_moe_fp8_fwd": (x, g, *w8, None, None, None, K, "softmax", True, 1, 1, 1.0)
        + ("silu_and_mul", target),
        "shared_expert_mlp_fp8_fwd": (x, *(w[0] for w in w8), target),
        "fused_topk_fwd": (g, None, K, "softmax", True, 1, 1, 1.0, target),
        "moe_pre_permute_fwd": (x, ids, layout, E, target),
        "moe_post_permute_fwd": (rows, scores, inverse, layout, 1.0, torch.float32, target),
        "moe_post_permute_fwd_out": (
            rows,
            scores,
            inverse,
            layout,
            1.0,
            target,
            torch.empty_like(x),
        ),
        "moe_grouped_gemm_fwd": (*gemm, torch.bfloat16, target),
        "moe_grouped_gemm_fwd_out": (*gemm, target, rows.new_empty(rows.shape[0], F)),
        "fused_moe_experts_fwd_out": (*experts, torch.empty_like(x)),
        "fused_moe_fwd": (x, g, wg, wd, None, None, None, K, "softmax", True, 1, 1, 1.0)
        + ("silu_and_mul", target),
        "indexed_expert_mlp_fwd_out": (*experts[:5], 1.0, target, torch.empty_like(x)),
        "shared_expert_mlp_fwd": (x, *wg[0].chunk(2), wd[0], target),
        "moe_permute_align_fwd": (ids, E, 8, target),
        "moe_router_fwd": (g, None, None, 2, K, 1, "sigmoid", 1.5, torch.float16, target),
        "swiglu_fwd": (x, None, 7.0, 1.0, 0.0, target),
        "qmoe_fwd": (x, g.bfloat16(), codes(2 * 64, H), wg[:, :1, :1].repeat(1, 2 * 64, 1), None)
        + (codes(H, 64), wd[..., :1], None, None, None, None, 4, 0, K)
        + ("swiglu", True, 1, 7.0, 1.702, 1.0, False, target),
        "moe_fwd": (x, g.bfloat16(), wg, None, wd, None, None, None, K, "swiglu", True, 2, 7.0)
        + (1.0, 0.0, False, target),
    }


@pytest.mark.parametrize("name", list(operator_calls("reference", "cpu")))
def test_opcheck(kernels, device, name):
    args = operator_calls(kernels, device)[name]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks.append("test_aot_dispatch_dynamic")
    if any(getattr(x, "dtype", None) == torch.float8_e4m3fn for x in args):
        checks.remove("test_schema")  # it multiplies its arguments, which torch cannot with FP8
    torch.library.opcheck(getattr(torch.ops.tileops, name).default, args, test_utils=checks)
