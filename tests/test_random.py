"""Random calls of every op: the target `cpu` agrees with the reference.

A result may differ from the reference by roundings that fall the other way, and by the order of a
float32 sum. Both are relative to the sizes of what is added up, not to a sum that may cancel: the
reference run on absolute values gives these.
"""

import math
import os

import torch
from draws import Draw, assert_untouched_around, ranks_clearly
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tileops.moe import (
    ContiguousLayoutSpec,
    FusedMoEExpertsFwdOp,
    FusedMoEFP8FwdOp,
    FusedMoEFwdOp,
    FusedMoESharedExpertFwdOp,
    FusedTopKFwdOp,
    IndexedExpertMLPFwdOp,
    MoEExpertMLPFwdOp,
    MoEFwdOp,
    MoEGroupedGemmFP8FwdOp,
    MoEGroupedGemmFwdOp,
    MoEPermuteAlignFwdOp,
    MoEPostPermuteFwdOp,
    MoEPrePermuteFwdOp,
    MoERouterFwdOp,
    QMoEFwdOp,
    RoutingEpilogueSpec,
    SharedExpertMLPFwdOp,
    SwiGLUFwdOp,
    quantize_fp8_blockwise,
    quantize_fp8_rowwise,
)
from tileops.moe.router import SCORINGS
from tileops.workloads.accuracy import ROUNDING
from tileops.workloads.grouped_gemm_int import pack
from tileops.workloads.router import LOWEST, affinity

NAN, INF = math.nan, math.inf
GATED = ["silu_and_mul", "gelu_and_mul", "swigluoai"]
IN_CI = bool(os.environ.get("CI"))

settings.register_profile(
    "random calls",
    deadline=None,
    derandomize=IN_CI,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


def random_calls(count):
    """Call the test with that many different draws."""

    def decorate(test):
        profile = settings(settings.get_profile("random calls"), max_examples=count)

        def run(data):
            test(Draw(data))

        run.__name__ = run.__qualname__ = test.__name__
        return profile(given(data=st.data())(run))

    return decorate


def both(op, *args, **settings):
    """Build an op for `cpu` and for the reference."""
    return (op(*args, **settings, target=target) for target in ("cpu", "reference"))


def assert_equal(got, want):
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_close(got, want, size, roundings, additions):
    """Compare norms: `size` bounds each element's terms, `additions` is a sum's length."""
    assert got.dtype == want.dtype
    assert got.isfinite().all()
    limit = roundings * ROUNDING[got.dtype] + additions * 2.0**-22
    error, scale = (
        torch.linalg.vector_norm(x.double()).item() for x in (got.double() - want.double(), size)
    )
    assert error <= limit * scale, f"{error / scale:.2e} of the size, above {limit:.2e}"


def magnitudes(tensors):
    """The absolute values of all floating-point tensors."""
    return [
        x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in tensors
    ]


def routing(draw, max_experts_of_a_group):
    """Settings, logits and bias of a top-k selection that no last bit decides."""
    groups, size = draw.size("groups", 1, 5), draw.size("E / groups", 1, max_experts_of_a_group)
    kept = draw.size("topk_group", 1, groups)
    found = {
        "top_k": draw.size("K", 1, min(kept * size, 9)),
        "scoring_func": draw.choice("scoring", "softmax", "sigmoid"),
        "renormalize": draw.flag("renormalize"),
        "num_expert_group": groups,
        "topk_group": kept,
        "routed_scaling_factor": draw.choice("factor", 1.0, 2.5),
    }
    logits = draw.shuffled(draw.size("T", 0, 12), groups * size).to(draw.dtype())
    if found["scoring_func"] == "softmax" or not draw.flag("bias"):
        return found, draw.view(logits), None
    bias = draw.shuffled(1, groups * size, draw.choice("reach of the bias", 0.1, 1.0))[0]
    clear = ranks_clearly(logits.double().sigmoid() + bias, groups, 2)
    return found, draw.view(logits[clear], repeated=False), draw.view(bias)


@random_calls(60)
def test_topk(draw):
    found, logits, bias = routing(draw, max_experts_of_a_group=12)
    if bias is None:
        logits = draw.sprinkled(logits, NAN, INF, -INF)
    cpu, reference = both(FusedTopKFwdOp, **found)
    (weights, ids), (want, want_ids) = cpu(logits, bias), reference(logits, bias)
    assert_equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-9, equal_nan=True)


def routes(draw):
    """A layout, and routes in it."""
    E, K, T = draw.size("E", 1, 8), draw.size("K", 1, 4), draw.size("T", 0, 12)
    return draw.layout(), E, draw.ids(T, K, E)


@random_calls(60)
def test_permutes(draw):
    layout, E, ids = routes(draw)
    (T, K), H = ids.shape, draw.size("H", 1, 40)
    x = draw.view(draw.normal(T, H, dtype=draw.dtype()))
    cpu, reference = both(MoEPrePermuteFwdOp, layout, E)
    rows, _, inverse = made = cpu(x, ids)
    assert_equal(made, reference(x, ids))

    y = torch.full(rows.shape, NAN)
    owned = inverse[inverse >= 0].long()
    y.view(-1, H)[owned] = draw.normal(len(owned), H)
    y = draw.view(y.to(draw.dtype()), repeated=False)
    weights = draw.view(draw.normal(T, K))
    epilogue = RoutingEpilogueSpec(draw.choice("factor", 1.0, 2.5))
    cpu, reference = both(MoEPostPermuteFwdOp, layout, epilogue, draw.choice("out", None, x.dtype))
    want = reference(y, weights, inverse)
    size = reference(y.abs(), weights.abs(), inverse)
    out, buffer = draw.out(want.shape, want.dtype)
    assert cpu(y, weights, inverse, out) is out
    assert_close(out, want, size, roundings=1, additions=K)
    assert_untouched_around(out, buffer)


def expert_rows(draw, x_of, width):
    """Rows in a layout, with NaN where no route stands: layout, E, rows, metadata, and whose."""
    layout, E, ids = routes(draw)
    rows, metadata, inverse = MoEPrePermuteFwdOp(layout, E, target="reference")(
        x_of(ids.shape[0], width), ids
    )
    owned = torch.zeros(rows.shape[:-1], dtype=torch.bool)
    owned.view(-1)[inverse[inverse >= 0].long()] = True
    per_row = isinstance(layout, ContiguousLayoutSpec) and layout.metadata == "per_row"
    if per_row and draw.flag("labels in any order"):
        order = torch.randperm(len(metadata), generator=draw.make)
        rows, metadata, owned = rows[order], metadata[order], owned[order]
    rows = rows.masked_fill(~owned[..., None], NAN)
    return layout, E, draw.view(rows, repeated=False), metadata, owned


@random_calls(70)
def test_grouped_gemm(draw):
    """Small whole numbers: products and sums are exact, and so is a GEMM without activation."""
    dtype, K, N = draw.dtype(), draw.size("K", 1, 48), draw.size("N", 1, 40)
    activation = draw.choice("activation", None, *GATED)
    layout, E, a, metadata, owned = expert_rows(
        draw, lambda *shape: draw.integers(-2, 2, *shape).to(dtype), K
    )
    # no value beyond 32, and many beyond 7, where swigluoai clamps
    unit = 2.0 ** -math.ceil(math.log2(K / 8))
    wide = N if activation is None else 2 * N
    b = draw.view((draw.integers(-2, 2, E, wide, K) * unit).to(dtype))
    bias = draw.maybe("bias", (draw.integers(-4, 4, E, wide) * unit).to(dtype))
    out_dtype = draw.choice("out_dtype", None, torch.float32)
    settings = {"activation": activation, "out_dtype": out_dtype}
    cpu, reference = both(MoEGroupedGemmFwdOp, layout, **settings)
    want = reference(a, b, metadata, bias=bias)
    out, buffer = draw.out(want.shape, want.dtype)
    got = cpu(a, b, metadata, out, bias=bias)
    assert got is out
    if activation is None:
        assert_equal(got[owned], want[owned])
    else:
        a, b, bias = magnitudes((a, b, bias))
        size = reference(a, b, metadata, bias=bias)
        assert_close(got[owned], want[owned], size[owned], roundings=1, additions=2)
    assert_untouched_around(out, buffer)


def expert_weights(draw, E, H, F, dtype, biases=True):
    """w_gate_up, w_down, b_gate_up and b_down, for outputs of order 1."""
    return [
        draw.view(draw.normal(E, 2 * F, H, dtype=dtype, scale=H**-0.5)),
        draw.view(draw.normal(E, H, F, dtype=dtype, scale=F**-0.5)),
        *(
            draw.maybe(name, draw.normal(E, width, dtype=dtype)) if biases else None
            for name, width in (("b_gate_up", 2 * F), ("b_down", H))
        ),
    ]


@random_calls(40)
def test_expert_mlp(draw):
    dtype, H, F = draw.dtype(), draw.size("H", 1, 40), draw.size("F", 1, 40)
    layout, E, x, metadata, owned = expert_rows(
        draw, lambda *shape: draw.normal(*shape, dtype=dtype), H
    )
    *weights, b_gate_up, b_down = expert_weights(draw, E, H, F, dtype)
    cpu, reference = both(MoEExpertMLPFwdOp, layout, draw.choice("activation", *GATED))

    def call(op, x, *tensors):
        w_gate_up, w_down, b_gate_up, b_down = tensors
        return op(x, w_gate_up, w_down, metadata, b_gate_up=b_gate_up, b_down=b_down)[owned]

    tensors = x, *weights, b_gate_up, b_down
    got, want = call(cpu, *tensors), call(reference, *tensors)
    size = call(reference, *magnitudes(tensors))
    assert_close(got, want, size, roundings=2, additions=H + F)


@random_calls(50)
def test_experts(draw):
    E, K, T = draw.size("E", 1, 8), draw.size("K", 1, 4), draw.size("T", 0, 12)
    # the last of these has the sizes for which a few routes take the indexed form
    H, F = draw.choice("H, F", (1, 3), (7, 40), (40, 16), (33, 1), (128, 256))
    dtype, ids, biases = draw.dtype(), draw.ids(T, K, E), draw.flag("biases")
    x, route_weights = draw.view(draw.normal(T, H, dtype=dtype)), draw.view(draw.normal(T, K))
    *weights, b_gate_up, b_down = expert_weights(draw, E, H, F, dtype, biases)
    tensors = x, *weights, route_weights, ids, b_gate_up, b_down
    factor, activation = draw.choice("factor", 1.0, 2.5), draw.choice("activation", *GATED)
    cpu, reference = both(FusedMoEExpertsFwdOp, factor, activation=activation)
    want = reference(torch.empty_like(x.contiguous()), *tensors)
    size = reference(torch.empty_like(want), *magnitudes(tensors))
    out, buffer = draw.out((T, H), dtype)
    assert cpu(out, *tensors) is out
    assert_close(out, want, size, roundings=3, additions=H + F + K)
    assert_untouched_around(out, buffer)
    if activation == "silu_and_mul" and not biases:
        out, buffer = draw.out((T, H), dtype)
        assert IndexedExpertMLPFwdOp(factor, target="cpu")(out, *tensors[:5]) is out
        assert_close(out, want, size, roundings=3, additions=H + F + K)
        assert_untouched_around(out, buffer)


@random_calls(40)
def test_layer(draw):
    found, logits, bias = routing(draw, max_experts_of_a_group=3)
    (T, E), dtype = logits.shape, draw.dtype()
    H, F, K = draw.size("H", 1, 40), draw.size("F", 1, 40), found["top_k"]
    x = draw.view(draw.normal(T, H, dtype=dtype))
    weights = expert_weights(draw, E, H, F, dtype)
    activation = draw.choice("activation", *GATED)
    cpu, reference = both(FusedMoEFwdOp, **found, activation=activation)

    def call(op, x, w_gate_up, w_down, b_gate_up, b_down):
        return op(x, logits, w_gate_up, w_down, bias, b_gate_up, b_down)

    want = call(reference, x, *weights)
    size = call(reference, *magnitudes((x, *weights)))
    got = call(cpu, x, *weights)
    assert_close(got, want, size, roundings=3, additions=H + F + K)


@random_calls(40)
def test_shared_expert(draw):
    found, logits, bias = routing(draw, max_experts_of_a_group=2)
    (T, E), dtype = logits.shape, draw.dtype()
    H, F, part = draw.size("H", 1, 40), draw.size("F", 1, 20), draw.size("S / tp_size", 1, 20)
    ranks = draw.size("tp_size", 1, 3)
    S, rank = part * ranks, draw.size("tp_rank", 0, ranks - 1)
    x = draw.view(draw.normal(T, H, dtype=dtype))
    w_gate_up, w_down, _, _ = expert_weights(draw, E, H, F, dtype, biases=False)
    shape = draw.choice("shared_w_gate_up", (2 * S, H), (2, S, H))
    up = draw.view(draw.normal(*shape, dtype=dtype, scale=H**-0.5))
    down = draw.view(draw.normal(H, S, dtype=dtype, scale=S**-0.5))
    cpu, reference = both(FusedMoESharedExpertFwdOp, **found, tp_size=ranks, tp_rank=rank)

    def call(op, x, *weights):
        return op(x, logits, *weights[:2], bias, *weights[2:])

    tensors = x, w_gate_up, w_down, up, down
    results = (call(cpu, *tensors), call(reference, *tensors))
    sizes = call(reference, *magnitudes(tensors))
    for got, want, size in zip(*results, sizes, strict=True):
        assert_close(got, want, size, roundings=3, additions=H + max(F, S) + found["top_k"])
    if ranks == 1:
        assert_equal(SharedExpertMLPFwdOp(target="cpu")(x, up, down), results[0][0])


@random_calls(40)
def test_permute_align(draw):
    E, K, T = draw.size("E", 1, 20), draw.size("K", 1, 5), draw.size("T", 0, 20)
    ids = draw.ids(T, K, E)
    cpu, reference = both(MoEPermuteAlignFwdOp, E, draw.size("block_size", 1, 20))
    assert_equal(cpu(ids), reference(ids))


@random_calls(50)
def test_swiglu(draw):
    lead = draw.choice("leading dimensions", (), (5,), (0,), (2, 3), (3, 1, 4))
    dtype, width, fused = draw.dtype(), draw.size("n", 0, 20), draw.flag("one tensor")

    def tensor(width):
        rows = draw.sprinkled(draw.normal(math.prod(lead), width, dtype=dtype, scale=4), NAN)
        return draw.view(rows).view(*lead, width)

    gate, up = (tensor(2 * width), None) if fused else (tensor(width), tensor(width))
    settings = {
        "limit": draw.choice("limit", 0.0, -1.0, 0.5, 7.0, INF),
        "activation_alpha": draw.choice("alpha", 1.0, 1.702, 0.0, -1.0),
        "activation_beta": draw.choice("beta", 0.0, 1.0, -0.5),
    }
    cpu, reference = both(SwiGLUFwdOp, **settings)
    got, want = cpu(gate, up), reference(gate, up)
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    g, u = (x.double().abs() for x in (gate.chunk(2, -1) if up is None else (gate, up)))
    terms = g * (u + abs(settings["activation_beta"]))
    limit = 2 * ROUNDING[dtype] * want.double().abs() + 2.0**-22 * terms
    assert ((got.double() - want.double()).abs() <= limit)[~want.isnan()].all()


@random_calls(60)
def test_router(draw):
    E, T, scoring = draw.size("E", 1, 40), draw.size("T", 0, 12), draw.choice("scoring", *SCORINGS)
    K, start = draw.size("topk", 1, min(E, 32)), draw.size("start", 0, E - 1)
    scores, bias, ids = draw.shuffled(T, E).to(draw.dtype()), None, None
    if draw.flag("expert_ids"):
        ids = draw.ids(T, K, E).to(draw.choice("ids", torch.int32, torch.int64))
    elif draw.flag("bias"):
        bias = draw.shuffled(1, E, 0.5)[0]
        scores = scores[ranks_clearly(affinity(scores, scoring).double() + bias)]
    else:
        scores = draw.sprinkled(scores, NAN, -INF)
    scores = draw.view(scores, repeated=bias is None)
    dtype, scale = draw.choice("out", *LOWEST), draw.choice("route_scale", 1.0, 2.5)
    count = draw.size("count", 1, E - start)
    cpu, reference = both(MoERouterFwdOp, count, K, start, scoring, route_scale=scale, dtype=dtype)
    (probs, weight), (want, want_weight) = cpu(scores, bias, ids), reference(scores, bias, ids)
    assert probs.dtype == want.dtype
    low = torch.tensor(LOWEST[dtype]).to(dtype)
    assert torch.equal(probs == low, want == low)
    torch.testing.assert_close(probs, want, rtol=2 * ROUNDING[dtype], atol=1e-5)
    torch.testing.assert_close(weight, want_weight, rtol=1e-5, atol=1e-6)


# activation_type, swiglu_fusion, whether there is an FC3
FORMS = [
    *(("relu", 0, False), ("gelu", 0, False), ("silu", 0, False), ("identity", 0, False)),
    *(("swiglu", 1, False), ("swiglu", 2, False), ("swiglu", 0, True), ("silu", 0, True)),
]


@random_calls(50)
def test_onnx_moe(draw):
    activation, fusion, gated = draw.choice("form", *FORMS)
    dtype, E, T = draw.dtype(), draw.size("E", 1, 8), draw.size("T", 0, 12)
    H, F = draw.size("H", 1, 40), draw.size("I", 1, 40)
    mixer = E > 1 and draw.flag("use_sparse_mixer")
    k = 2 if mixer else draw.size("k", 1, E)
    # with the mixer, neighbours about 20 count for each other and others do not
    logits = 20 + draw.shuffled(T, E, 0.15 * (E - 1)) if mixer else draw.shuffled(T, E)
    logits = draw.view(logits.to(dtype))
    x = draw.view(draw.normal(T, H, dtype=dtype))
    if T % 3 == 0 and draw.flag("rank 3"):
        x = x.view(3, T // 3, H)
    wide = 2 * F if fusion else F

    def weight(rows, columns):
        return draw.view(draw.normal(E, rows, columns, dtype=dtype, scale=columns**-0.5))

    def bias(name, rows):
        return draw.maybe(name, draw.normal(E, rows, dtype=dtype))

    tensors = [x, weight(wide, H), bias("b1", wide), weight(H, F), bias("b2", H)]
    tensors += [weight(F, H), bias("b3", F)] if gated else []
    settings = {
        "k": k,
        "activation_type": activation,
        "normalize_routing_weights": draw.flag("normalize"),
        "swiglu_fusion": fusion,
        "activation_alpha": draw.choice("alpha", 1.0, 1.702),
        "activation_beta": draw.choice("beta", 0.0, 1.0),
        "use_sparse_mixer": mixer,
    }
    cpu, reference = both(
        MoEFwdOp, **settings, swiglu_limit=draw.choice("limit", None, 0.0, 1.0, 7.0)
    )

    def call(op, x, *rest):
        return op(x, logits, *rest)

    got, want = call(cpu, *tensors), call(reference, *tensors)
    assert got.shape == x.shape
    # a clamp only makes terms smaller
    size = call(MoEFwdOp(**settings, target="reference"), *magnitudes(tensors))
    assert_close(got, want, size, roundings=3, additions=H + F + k)


@random_calls(40)
def test_quantisations(draw):
    lead = draw.choice("leading dimensions", (), (3,), (2, 0), (2, 3), (2, 1, 3))
    blocks, powers = draw.choice("blocks", (1, 1), (2, 3)), draw.choice("reach", 0, 8, 60, 140)
    shape = *lead, 128 * blocks[0], 128 * blocks[1]
    scale = torch.exp2(draw.integers(-powers, powers, *shape).double())
    x = draw.sprinkled((draw.normal(*shape).double() * scale).to(draw.dtype()), NAN, INF, -INF, 0.0)
    x, settings = draw.view(x), {"power_of_two": draw.flag("power_of_two")}
    for quantize in (quantize_fp8_rowwise, quantize_fp8_blockwise):
        got, want = (quantize(x, **settings, target=target) for target in ("cpu", "reference"))
        assert_equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        assert_equal(got[1], want[1])


def fp8_weights(draw, E, H, F):
    """w_gate_up, w_down and their scales, each a view."""
    weights = draw.normal(E, 2 * F, H, scale=H**-0.5), draw.normal(E, H, F, scale=F**-0.5)
    made = (quantize_fp8_blockwise(w, target="reference") for w in weights)
    return [draw.view(x) for pair in made for x in pair]


@random_calls(50)
def test_grouped_gemm_fp8(draw):
    """Small whole numbers and scales that are powers of two: sums are exact."""
    K, N = draw.choice("K", 128, 384), draw.choice("N", 128, 256)
    layout, E, rows, metadata, owned = expert_rows(
        draw, lambda *shape: draw.integers(-2, 2, *shape).float(), K
    )
    a, b = (
        draw.view(x.to(torch.float8_e4m3fn), repeated=False)
        for x in (rows, draw.integers(-2, 2, E, N, K).float())
    )
    a_scale, b_scale = (
        draw.view(torch.exp2(draw.integers(-3, 3, *shape).float()), repeated=False)
        for shape in ((*rows.shape[:-1], K // 128), (E, N // 128, K // 128))
    )
    cpu, reference = both(MoEGroupedGemmFP8FwdOp, layout)
    want = reference(a, a_scale, b, b_scale, metadata)
    out, buffer = draw.out(want.shape, want.dtype)
    assert cpu(a, a_scale, b, b_scale, metadata, out) is out
    assert_equal(out[owned], want[owned])
    assert_untouched_around(out, buffer)


@random_calls(40)
def test_layer_fp8(draw):
    found, logits, bias = routing(draw, max_experts_of_a_group=3)
    (T, E), dtype, K = logits.shape, draw.dtype(), found["top_k"]
    H, F = draw.choice("H", 128, 256), draw.choice("F", 128, 256)
    x, weights = draw.view(draw.normal(T, H, dtype=dtype)), fp8_weights(draw, E, H, F)
    widths = {"b_gate_up": 2 * F, "b_down": H}
    biases = [draw.maybe(name, draw.normal(E, n, dtype=dtype)) for name, n in widths.items()]
    shared = {}
    if draw.flag("shared expert"):
        names = "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale"
        alone = fp8_weights(draw, 1, H, F)
        shared = {f"shared_{name}": w[0] for name, w in zip(names, alone, strict=True)}
    activation = draw.choice("activation", *GATED)

    def call(op, x, *tensors, **shared):
        result = op(x, logits, *tensors[:4], bias, *tensors[4:], **shared)
        return result if isinstance(result, tuple) else (result,)

    cpu, reference = both(FusedMoEFP8FwdOp, **found, activation=activation)
    results = (call(op, x, *weights, *biases, **shared) for op in (cpu, reference))
    names, tensors = list(shared), magnitudes((x, *weights, *biases, *shared.values()))
    sizes = call(reference, *tensors[:7], **dict(zip(names, tensors[7:], strict=True)))
    # an activation that is between two numbers of e4m3 may become either
    either = 2**12
    for got, want, size in zip(*results, sizes, strict=True):
        assert_close(got, want, size, roundings=3, additions=H + F + K + either)


@random_calls(50)
def test_qmoe(draw):
    activation, fusion = draw.choice("form", *(form[:2] for form in FORMS if not form[2]))
    dtype, E, T = draw.dtype(), draw.size("E", 1, 6), draw.size("T", 0, 12)
    bits, block = draw.choice("bits", 4, 8), draw.choice("block_size", None, 32, 64)
    H, F = 2 * draw.size("H / 2", 1, 40), 2 * draw.size("I / 2", 1, 40)
    k, top = draw.size("k", 1, E), 2**bits - 1
    logits = draw.view(draw.shuffled(T, E).to(dtype))
    x = draw.view(draw.normal(T, H, dtype=dtype))
    scale_dtype = draw.choice("scales", torch.float32, dtype)

    def layer(name, rows, columns):
        """Packed weights, scales, zero points, bias; and their absolute values."""
        groups = 1 if block is None else -(-columns // block)
        codes = draw.integers(0, top, E, rows, columns)
        scales = (draw.normal(E, rows, groups).abs() + 0.1) / (top * columns**0.5)
        scales, points, shifted = scales.to(scale_dtype), None, codes - 2 ** (bits - 1)
        if draw.flag(f"zero points of {name}"):
            points = draw.integers(0, top, E, rows, groups)
            wide = points.repeat_interleave(block or columns, -1)[..., :columns]
            shifted = codes - wide
            points = draw.view(pack(points if block else points[..., 0], bits), repeated=False)
        if block is None and draw.flag(f"scales of {name} in two dimensions"):
            scales = scales[..., 0]
        bias = draw.maybe(f"bias of {name}", draw.normal(E, rows, dtype=dtype))
        size = (
            shifted.abs()
            * (
                scales.double()
                .view(E, rows, -1)
                .repeat_interleave(block or columns, -1)[..., :columns]
            )
        )
        bias_size = None if bias is None else bias.abs().double()
        views = [draw.view(made, repeated=False) for made in (pack(codes, bits), scales)]
        return (*views, bias, points), (size, bias_size)

    (w1, s1, b1, z1), (size1, bias1) = layer("FC1", 2 * F if fusion else F, H)
    (w2, s2, b2, z2), (size2, bias2) = layer("FC2", H, F)
    given = draw.maybe("router_weights", draw.normal(T, E, dtype=dtype).abs() + 0.1)
    settings = {
        "k": k,
        "activation_type": activation,
        "normalize_routing_weights": draw.flag("normalize"),
        "swiglu_fusion": fusion,
        "activation_alpha": draw.choice("alpha", 1.0, 1.702),
        "activation_beta": draw.choice("beta", 0.0, 1.0),
    }
    limit = draw.choice("limit", None, 0.0, 1.0, 7.0)
    cpu, reference = both(
        QMoEFwdOp, expert_weight_bits=bits, block_size=block, **settings, swiglu_limit=limit
    )
    args = x, logits, w1, s1, b1, w2, s2, b2, z1, z2, given
    got, want = cpu(*args), reference(*args)
    # the sizes of what is added up, with weights of at most 1 a route
    h = size1 @ x.abs().double().T
    h = h if bias1 is None else h + bias1[..., None]
    gate, up = (h[:, 0::2], h[:, 1::2]) if fusion == 1 else h.chunk(2, 1) if fusion else (h, 1)
    act = gate * (up + settings["activation_beta"]) if fusion else gate
    y = size2 @ act
    y = y if bias2 is None else y + bias2[..., None]
    most = 1 if given is None or settings["normalize_routing_weights"] else 5
    assert_close(got, want, most * y.sum(0).T, roundings=3, additions=H + F + k)
