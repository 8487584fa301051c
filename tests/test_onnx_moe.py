import math

import pytest
import torch

from tileops import targets
from tileops.moe import MoEFwdOp, SwiGLUFwdOp

T, E, H, F = 11, 6, 24, 40

# activation_type, swiglu_fusion, FC3
FORMS = [
    ("relu", 0, False),
    ("gelu", 0, False),
    ("silu", 0, False),
    ("identity", 0, False),
    ("swiglu", 1, False),
    ("swiglu", 2, False),
    ("swiglu", 0, True),
    ("silu", 0, True),
]
every_form = pytest.mark.parametrize(("kind", "fusion", "fc3"), FORMS)


def tensors(kind, fusion, fc3, dtype, device="cpu", biases=(True, True, True)):
    """x, router_probs, fc1, b1, fc2, b2, fc3, b3 with logits that no near-tie makes ambiguous."""
    wide = 2 * F if fusion else F
    order = torch.rand(T, E).argsort(-1)
    parts = [
        torch.randn(T, H),
        torch.linspace(-2, 2, E)[order],
        torch.randn(E, wide, H) / H**0.5,
        torch.randn(E, wide) if biases[0] else None,
        torch.randn(E, H, F) / F**0.5,
        torch.randn(E, H) if biases[1] else None,
        torch.randn(E, F, H) / H**0.5 if fc3 else None,
        torch.randn(E, F) if fc3 and biases[2] else None,
    ]
    return [None if p is None else p.to(device, dtype) for p in parts]


def act(h, linear, op, kind, fusion):
    if kind == "swiglu":
        g, up = {0: (h, linear), 1: (h[0::2], h[1::2]), 2: h.chunk(2)}[fusion]
        limit = math.inf if op.swiglu_limit is None else op.swiglu_limit
        g, up = g.clamp(max=limit), up.clamp(-limit, limit)
        return g * torch.sigmoid(op.activation_alpha * g) * (up + op.activation_beta)
    if kind == "relu":
        return h.clamp(min=0)
    if kind == "gelu":
        return 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))
    if kind == "silu":
        return h * torch.sigmoid(h) * (1 if linear is None else linear)
    return h


def formula(op, parts, weights=None, ids=None, compute=torch.float64):
    """The layer in ``compute``, a token and a route at a time."""
    x, logits, fc1, b1, fc2, b2, fc3, b3 = (
        None if p is None else p.cpu().to(compute) for p in parts
    )
    if weights is None:
        p = torch.softmax(logits.double(), 1)
        ids = torch.sort(p, dim=1, descending=True, stable=True).indices[:, : op.k]
        weights = p.gather(1, ids)
        if op.normalize_routing_weights:
            weights = weights / weights.sum(1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for w, e in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            h = fc1[e] @ x[t] + (0 if b1 is None else b1[e])
            linear = None if fc3 is None else fc3[e] @ x[t] + (0 if b3 is None else b3[e])
            a = act(h, linear, op, op.activation_type, op.swiglu_fusion)
            out[t] += w * (fc2[e] @ a + (0 if b2 is None else b2[e])).double()
    return out


@every_form
@pytest.mark.parametrize("normalize", [False, True])
def test_every_activation(target, device, dtype, kind, fusion, fc3, normalize, assert_accurate):
    parts = tensors(kind, fusion, fc3, dtype, device)
    op = MoEFwdOp(2, kind, normalize, fusion, target=target)
    got = op(*parts)
    assert got.dtype == dtype
    assert_accurate(got.cpu(), formula(op, parts), formula(op, parts, compute=dtype).to(dtype))


@pytest.mark.parametrize("biases", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_biases_are_independent(target, device, biases, assert_accurate):
    for kind, fusion, fc3 in (("swiglu", 0, True), ("swiglu", 1, False)):
        parts = tensors(kind, fusion, fc3, torch.bfloat16, device, biases)
        op = MoEFwdOp(2, kind, True, fusion, target=target)
        same = formula(op, parts, compute=torch.bfloat16).bfloat16()
        assert_accurate(op(*parts).cpu(), formula(op, parts), same)


@pytest.mark.parametrize("limit", [None, 0.0, 0.7, math.inf])
@pytest.mark.parametrize("fusion", [1, 2])
def test_swiglu_settings(target, device, limit, fusion, assert_accurate):
    parts = tensors("swiglu", fusion, False, torch.bfloat16, device)
    op = MoEFwdOp(2, "swiglu", True, fusion, limit, 1.702, 1.0, target=target)
    same = formula(op, parts, compute=torch.bfloat16).bfloat16()
    assert_accurate(op(*parts).cpu(), formula(op, parts), same)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_number_of_experts(target, device, k, assert_accurate):
    parts = tensors("silu", 0, False, torch.bfloat16, device)
    for normalize in (False, True):
        op = MoEFwdOp(k, "silu", normalize, target=target)
        same = formula(op, parts, compute=torch.bfloat16).bfloat16()
        assert_accurate(op(*parts).cpu(), formula(op, parts), same)


def test_rank_three_and_no_tokens(target, device, dtype):
    parts = tensors("silu", 0, False, dtype, device)
    op = MoEFwdOp(2, "silu", True, target=target)
    x, logits = parts[0][:6], parts[1][:6]
    flat = op(x, logits, *parts[2:])
    assert torch.equal(op(x.view(2, 3, H), logits, *parts[2:]), flat.view(2, 3, H))
    padded = torch.zeros(2, 3, H + 8, device=device, dtype=dtype)
    padded[..., :H] = x.view(2, 3, H)
    assert torch.equal(op(padded[..., :H], logits, *parts[2:]), flat.view(2, 3, H))
    assert op(x[:0], logits[:0], *parts[2:]).shape == (0, H)
    assert op(x[:0].view(2, 0, H), logits[:0], *parts[2:]).shape == (2, 0, H)


def test_masked_logits_weigh_nothing(target, device):
    parts = tensors("silu", 0, False, torch.bfloat16, device)
    parts[1][:] = -1e30
    parts[1][:, 3] = 1.0
    op = MoEFwdOp(2, "silu", True, target=target)
    alone = MoEFwdOp(1, "silu", True, target=target)
    assert torch.equal(op(*parts), alone(*parts))
    parts[1][:] = -1e30  # all alike: the lowest indices, each with half
    weights, ids = torch.full((T, 2), 0.5), torch.tensor([[0, 1]] * T)
    want = formula(op, parts, weights, ids)
    assert torch.linalg.vector_norm(op(*parts).cpu() - want) < 0.01 * torch.linalg.vector_norm(want)


def sparse_mixer(row):
    """Two experts and their weights, one logit at a time."""
    taken, out = set(), []
    for _ in range(2):
        free = [e for e in range(len(row)) if e not in taken]
        best = min(free, key=lambda e: (-row[e], e))
        top = row[best]
        near = [e for e in free if top - row[e] <= 0.02 * max(abs(row[e]), top) or e == best]
        out.append((1 / sum(math.exp(row[e] - top) for e in near), best))
        taken.add(best)
    return out


@pytest.mark.parametrize("num_experts", [2, 8, 16, 61])
@pytest.mark.parametrize("shift", [3.0, 0.0, -3.0])
def test_sparse_mixer(target, device, num_experts, shift):
    base = 0.05 * torch.randn(40, 1) + shift
    logits = (base + 0.03 * torch.randn(40, num_experts)).double()
    # keep away from the edge of the two per cent
    logits = (logits * 1000).round() / 1000
    weights, ids = targets.run("sparse_mixer_fwd", target, logits.float().to(device))
    want = [sparse_mixer(row) for row in logits.float().double().tolist()]
    assert ids.tolist() == [[e for _, e in row] for row in want]
    torch.testing.assert_close(
        weights.cpu(), torch.tensor([[w for w, _ in row] for row in want]), rtol=1e-5, atol=0
    )


def test_sparse_mixer_survives_any_logits(target, device):
    nan, inf = math.nan, math.inf
    rows = [[nan] * 4, [1.0, nan, 2.0, 0.0], [-inf] * 4, [inf, 1.0, inf, 0.0], [0.0] * 4]
    _, ids = targets.run("sparse_mixer_fwd", target, torch.tensor(rows, device=device))
    assert ids.tolist() == [[0, 1], [2, 0], [0, 1], [0, 2], [0, 1]]


def test_sparse_mixer_layer(target, device, assert_accurate):
    parts = tensors("silu", 0, False, torch.bfloat16, device)
    op = MoEFwdOp(2, "silu", use_sparse_mixer=True, target=target)
    routes = [sparse_mixer(row) for row in parts[1].double().tolist()]
    weights = torch.tensor([[w for w, _ in row] for row in routes])
    ids = torch.tensor([[e for _, e in row] for row in routes])
    same = formula(op, parts, weights, ids, torch.bfloat16).bfloat16()
    assert_accurate(op(*parts).cpu(), formula(op, parts, weights, ids), same)


def onnxruntime_moe(tensors, **attributes):
    """Run ONNX Runtime's MoE on x, logits, fc1, b1, fc2, b2: float32 on the CPU."""
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    feeds = {f"input_{i}": t.numpy() for i, t in enumerate(tensors)}
    node = onnx.helper.make_node("MoE", list(feeds), ["y"], domain="com.microsoft", **attributes)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "moe",
        [info(name, 1, list(value.shape)) for name, value in feeds.items()],
        [info("y", 1, list(tensors[0].shape))],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, feeds)[0])


@pytest.mark.parametrize(("kind", "fusion"), [f[:2] for f in FORMS if not f[2] and f[1] != 2])
@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("rank", [2, 3])
def test_onnxruntime_agrees(kind, fusion, normalize, rank):
    """Its CPU kernel has no FC3 and no form with gate and linear rows in halves."""
    parts = tensors(kind, fusion, False, torch.float32)
    if rank == 3:
        parts[0] = parts[0].view(1, T, H)
    settings = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7}
    settings = settings if kind == "swiglu" else {}
    attributes = {"k": 2, "activation_type": kind, "swiglu_fusion": fusion}
    want = onnxruntime_moe(parts[:6], **attributes, normalize_routing_weights=normalize, **settings)
    op = MoEFwdOp(2, kind, bool(normalize), fusion, **settings, target="cpu")
    torch.testing.assert_close(op(*parts), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [None, 0.7, 7.0])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.702, 1.0)])
def test_onnxruntime_agrees_on_swiglu(limit, alpha, beta):
    """Its SwiGLU has no CPU kernel; its MoE shows the activation through identity matrices."""
    x = 4 * torch.randn(9, 2 * F)
    both, first = torch.eye(2 * F)[None], torch.eye(2 * F, F)[None]
    zeros = torch.zeros(1, 2 * F)
    settings = {} if limit is None else {"swiglu_limit": limit}
    want = onnxruntime_moe(
        [x, torch.zeros(9, 1), both, zeros, first, zeros],
        k=1,
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        activation_alpha=alpha,
        activation_beta=beta,
        **settings,
    )
    op = SwiGLUFwdOp(limit or 0.0, alpha, beta, target="cpu")
    got = op(x[:, 0::2].contiguous(), x[:, 1::2].contiguous())
    torch.testing.assert_close(got, want[:, :F], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be at least 1"),
        ({"activation_type": "ReLU"}, "activation_type must be one of .*got 'ReLU'"),
        ({"swiglu_fusion": 3}, r"swiglu_fusion must be in \[0, 2\], got 3"),
        ({"swiglu_fusion": 1}, "swiglu_fusion must be 0 with activation_type='relu', got 1"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be None or not negative, got -1.0"),
        ({"swiglu_limit": math.nan}, "swiglu_limit must be a number, got nan"),
        ({"use_sparse_mixer": True}, "k must be 2 with use_sparse_mixer, got 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=f"MoEFwdOp: {message}"):
        MoEFwdOp(**settings)


def test_wrong_calls():
    x, logits, fc1, b1, fc2, b2, _, _ = tensors("silu", 0, False, torch.float32)
    op = MoEFwdOp(2, "silu")
    old = fc1.transpose(1, 2).contiguous()
    with pytest.raises(ValueError, match=r"fc1_experts_weights must be \[E, I, H\] = \[6, I, 24\]"):
        op(x, logits, old, b1, fc2)
    with pytest.raises(
        ValueError, match=r"fc2_experts_weights must be \[E, H, I\] = \[6, 24, 40\]"
    ):
        op(x, logits, fc1, b1, fc2[:, :, :-1])
    with pytest.raises(
        ValueError, match=r"router_probs must be \[T, E\] = \[11, E\], got \(10, 6\)"
    ):
        op(x, logits[:10], fc1, b1, fc2)
    with pytest.raises(ValueError, match="router_probs must be torch.float32, got torch.float16"):
        op(x, logits.half(), fc1, b1, fc2)
    with pytest.raises(ValueError, match=r"input must be \[T, H\], got \(24,\)"):
        op(x[0], logits, fc1, b1, fc2)
    with pytest.raises(ValueError, match="k must be at most E = 6, got 7"):
        MoEFwdOp(7, "silu")(x, logits, fc1, b1, fc2)
    with pytest.raises(
        ValueError, match="fc3_experts_bias must be None without fc3_experts_weights"
    ):
        op(x, logits, fc1, b1, fc2, b2, None, torch.zeros(E, F))
    with pytest.raises(ValueError, match="fc3_experts_weights must be None with .*'relu'"):
        MoEFwdOp(2)(x, logits, fc1, b1, fc2, b2, torch.zeros(E, F, H))
    with pytest.raises(ValueError, match="fc3_experts_weights must be given with .*'swiglu'"):
        MoEFwdOp(2, "swiglu")(x, logits, fc1, b1, fc2)
    with pytest.raises(ValueError, match="fc3_experts_weights must be None with .*fusion=2"):
        MoEFwdOp(2, "swiglu", swiglu_fusion=2)(x, logits, fc1, b1, fc2, b2, torch.zeros(E, F, H))
    with pytest.raises(ValueError, match="input must have rows of one spacing"):
        op(torch.randn(4, 6, H)[:, :3], torch.randn(12, E), fc1, b1, fc2)
