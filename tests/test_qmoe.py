import functools
import math

import pytest
import torch
from test_onnx_moe import formula, sparse_mixer

from tileops import targets
from tileops.compilation import collecting
from tileops.moe import QMoEFwdOp
from tileops.targets import NoKernelError
from tileops.workloads.grouped_gemm_int import pack, quantize

T, E, H, F = 11, 6, 64, 96

# activation_type, swiglu_fusion
FORMS = [("relu", 0), ("gelu", 0), ("silu", 0), ("identity", 0), ("swiglu", 1), ("swiglu", 2)]
# bits, block_size, zero points
FORMATS = [(b, s, z) for b in (4, 8) for s in (None, 32, 64, 128) for z in (False, True)]
every_format = pytest.mark.parametrize(("bits", "block", "points"), FORMATS)


def weight(packed, scales, points, bits, block):
    """The matrices in float64, a weight at a time as the format is written down."""
    experts, rows, columns = (*packed.shape[:2], packed.shape[2] * 8 // bits)
    data, scale = packed.tolist(), scales.double().reshape(experts, rows, -1).tolist()
    point = None if points is None else points.tolist()

    def code(row, i):
        return row[i] if bits == 8 else row[i // 2] >> 4 * (i % 2) & 15

    def value(e, n, k):
        group = 0 if block is None else k // block
        if point is None:
            zero = 2 ** (bits - 1)
        else:
            zero = code(point[e], n) if block is None else code(point[e][n], group)
        return (code(data[e][n], k) - zero) * scale[e][n][group]

    return torch.tensor(
        [[[value(e, n, k) for k in range(columns)] for n in range(rows)] for e in range(experts)],
        dtype=torch.float64,
    )


@functools.cache
def matrices(bits, block, points, fusion, hidden=H, ffn=F):
    """What `quantize` makes of normal weights, and those weights again: of FC1, of FC2."""
    torch.manual_seed(1)
    found = []
    for rows, columns in ((2 * ffn if fusion else ffn, hidden), (hidden, ffn)):
        made = quantize(
            torch.randn(E, rows, columns) / columns**0.5 + 0.01, bits, block or 0, points
        )
        found.append((made, weight(*made, bits, block)))
    return found


def tensors(bits, block, points, fusion, dtype, device="cpu", **sizes):
    """The arguments of a call, and what `formula` takes."""
    ((w1, s1, z1), fc1), ((w2, s2, z2), fc2) = matrices(bits, block, points, fusion, **sizes)
    order = torch.rand(T, E).argsort(-1)
    x = torch.randn(T, fc2.shape[1]).to(dtype)
    logits = torch.linspace(-2, 2, E)[order].to(dtype)
    b1, b2 = torch.randn(E, fc1.shape[1]).to(dtype), torch.randn(E, fc2.shape[1]).to(dtype)
    if block is None:
        s1, s2 = s1[..., 0], s2[..., 0]
    args = [x, logits, w1, s1, b1, w2, s2, b2, z1, z2]
    args = [None if a is None else a.to(device) for a in args]
    return args, [x, logits, fc1, b1, fc2, b2, None, None]


def same_dtype(op, parts, dtype, *routes):
    return formula(op, parts, *routes, compute=dtype).to(dtype)


@every_format
def test_every_form(target, device, dtype, bits, block, points, assert_accurate):
    for kind, fusion in FORMS:
        args, parts = tensors(bits, block, points, fusion, dtype, device)
        op = QMoEFwdOp(bits, block, 2, kind, fusion == 1, fusion, target=target)
        got = op(*args)
        assert got.dtype == dtype
        assert_accurate(got.cpu(), formula(op, parts), same_dtype(op, parts, dtype))


@every_format
def test_scales_of_the_tokens_dtype(target, device, bits, block, points, assert_accurate):
    args, parts = tensors(bits, block, points, 1, torch.bfloat16, device)
    for at, made, into in ((3, 2, 2), (6, 5, 4)):
        args[at] = args[at].bfloat16()
        zero = args[8 if at == 3 else 9]
        zero = None if zero is None else zero.cpu()
        parts[into] = weight(args[made].cpu(), args[at].cpu(), zero, bits, block)
    op = QMoEFwdOp(bits, block, 2, "swiglu", True, 1, target=target)
    same = same_dtype(op, parts, torch.bfloat16)
    assert_accurate(op(*args).cpu(), formula(op, parts), same)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("hidden", "ffn"), [(160, 96), (32, 32), (96, 160)])
def test_widths_and_a_short_last_block(target, device, bits, hidden, ffn, assert_accurate):
    for block, points in ((64, True), (128, False), (None, True)):
        sizes = {"hidden": hidden, "ffn": ffn}
        args, parts = tensors(bits, block, points, 2, torch.bfloat16, device, **sizes)
        op = QMoEFwdOp(bits, block, 2, "swiglu", True, 2, 7.0, 1.702, 1.0, target=target)
        same = same_dtype(op, parts, torch.bfloat16)
        assert_accurate(op(*args).cpu(), formula(op, parts), same)


@pytest.mark.parametrize("host", ["reference", "cpu"])
@pytest.mark.parametrize(("hidden", "ffn"), [(2, 2), (38, 50), (70, 34), (66, 6)])
def test_any_even_width_on_a_cpu(host, dtype, hidden, ffn, assert_accurate):
    for bits, block, points in ((4, 32, True), (4, None, True), (8, 64, False)):
        for fusion in (1, 2):
            sizes = {"hidden": hidden, "ffn": ffn}
            args, parts = tensors(bits, block, points, fusion, dtype, **sizes)
            op = QMoEFwdOp(bits, block, 3, "swiglu", True, fusion, target=host)
            assert_accurate(op(*args), formula(op, parts), same_dtype(op, parts, dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("which", [0, 1])
def test_each_zero_point_and_bias_is_optional(target, device, bits, which, assert_accurate):
    for block in (None, 32):
        args, parts = tensors(bits, block, True, 0, torch.bfloat16, device)
        made, at = (2, 3) if which == 0 else (5, 6)
        parts[2 if which == 0 else 4] = weight(args[made].cpu(), args[at].cpu(), None, bits, block)
        args[8 + which], args[4 if which else 7] = None, None
        parts[3 if which else 5] = None
        op = QMoEFwdOp(bits, block, 2, "silu", True, target=target)
        same = same_dtype(op, parts, torch.bfloat16)
        assert_accurate(op(*args).cpu(), formula(op, parts), same)


@pytest.mark.parametrize(("bits", "codes"), [(4, (0, 7, 8, 15)), (8, (0, 127, 128, 255))])
def test_codes_are_exact(target, device, bits, codes):
    """Whole numbers of either sign: nothing is rounded, and every code and point is told apart."""
    for block in (32, None):
        for zero in (None, *codes):
            w1 = torch.full((1, 32, 32), codes[0]) + torch.arange(32)[:, None] % 4 // 3
            w1[0, torch.arange(32), torch.arange(32)] = torch.tensor(codes).repeat(8)
            w2 = 2 ** (bits - 1) + torch.eye(32, dtype=torch.int64)[None]
            ones = torch.ones(1, 32, 1) if block else torch.ones(1, 32)
            z1 = None if zero is None else torch.full(ones.shape, zero)
            want = (w1 - (2 ** (bits - 1) if zero is None else zero))[0].T.double()
            x = torch.eye(32)
            args = [x, torch.zeros(32, 1), pack(w1, bits), ones, None, pack(w2, bits), ones, None]
            args += [None if z1 is None else pack(z1, bits)]
            args = [
                None if a is None else a.to(device, torch.bfloat16 if a is x else None)
                for a in args
            ]
            args[1] = args[1].to(args[0].dtype)
            op = QMoEFwdOp(bits, block, 1, "identity", target=target)
            assert torch.equal(op(*args).cpu().double(), want)


def test_rows_may_be_far_apart(target, device, assert_accurate):
    """Views: nothing is copied, and what lies between the rows is not read."""
    args, parts = tensors(4, 32, True, 1, torch.bfloat16, device)
    for i in (2, 3, 5, 6, 8, 9):
        filled = 0x7F if args[i].dtype == torch.uint8 else math.nan
        room = torch.full((E + 1, *args[i].shape[1:-1], args[i].shape[-1] + 48), filled)
        room = room.to(device, args[i].dtype)
        room[1:, :, 16 : 16 + args[i].shape[-1]] = args[i]
        args[i] = room[1:, :, 16 : 16 + args[i].shape[-1]]
    op = QMoEFwdOp(4, 32, 2, "swiglu", True, 1, target=target)
    same = same_dtype(op, parts, torch.bfloat16)
    assert_accurate(op(*args).cpu(), formula(op, parts), same)


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 300])
def test_number_of_tokens(kernels, device, num_tokens):
    """One expert with every row, and rows of an expert on both sides of a tile."""
    args, _ = tensors(4, 32, True, 1, torch.bfloat16, device)
    x = torch.randn(num_tokens, H).bfloat16().to(device)
    for logits in (torch.randn(num_tokens, E), torch.linspace(0, 3, E).expand(num_tokens, E)):
        logits = logits.bfloat16().to(device)
        op = QMoEFwdOp(4, 32, 3, "swiglu", True, 1, target=kernels)
        want = QMoEFwdOp(4, 32, 3, "swiglu", True, 1, target="reference")
        got, want = op(x, logits, *args[2:]), want(x, logits, *args[2:])
        error = torch.linalg.vector_norm(got.float() - want.float())
        assert error < 2**-8 * torch.linalg.vector_norm(want.float())
        assert torch.equal(got, op(x, logits, *args[2:]))
        # a token's row does not depend on the batch, where the same tile runs
        if num_tokens == 5:
            assert torch.equal(op(x[2:3], logits[2:3], *args[2:]), got[2:3])


def test_rank_three_and_no_tokens(target, device, dtype):
    args, _ = tensors(4, 32, True, 1, dtype, device)
    op = QMoEFwdOp(4, 32, 2, "swiglu", True, 1, target=target)
    x, logits, rest = args[0][:6], args[1][:6], args[2:]
    flat = op(x, logits, *rest)
    assert torch.equal(op(x.view(2, 3, H), logits, *rest), flat.view(2, 3, H))
    assert op(x[:0], logits[:0], *rest).shape == (0, H)
    assert op(x[:0].view(2, 0, H), logits[:0], *rest).shape == (2, 0, H)


def test_nan_stays_in_its_row(target, device):
    args, _ = tensors(4, 32, True, 1, torch.bfloat16, device)
    op = QMoEFwdOp(4, 32, 2, "swiglu", True, 1, target=target)
    clean = op(*args)
    args[0][3, 5] = math.nan
    dirty = op(*args)
    assert dirty[3].isnan().all()
    others = [t for t in range(T) if t != 3]
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("normalize", [False, True])
def test_router_weights(target, device, normalize, dtype, assert_accurate):
    args, parts = tensors(4, 32, True, 1, dtype, device)
    given = torch.randn(T, E).to(dtype)
    given[2] = 0  # a sum of 0 gives weights of 0
    op = QMoEFwdOp(4, 32, 2, "swiglu", normalize, 1, target=target)
    got = op(*args, router_weights=given.to(device)).cpu()
    ids = torch.sort(parts[1].double(), dim=1, descending=True, stable=True).indices[:, :2]
    weights = given.double().gather(1, ids)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True)
        weights[2] = 0
    assert (got[2] == 0).all()
    # rows whose weights are large because their sum is small would hide the others
    for t in range(T):
        if t != 2:
            row = [p[t : t + 1] if i < 2 else p for i, p in enumerate(parts)]
            route = weights[t : t + 1], ids[t : t + 1]
            same = same_dtype(op, row, dtype, *route)
            assert_accurate(got[t : t + 1], formula(op, row, *route), same)


def test_sparse_mixer(target, device, assert_accurate):
    args, parts = tensors(4, 32, True, 0, torch.bfloat16, device)
    op = QMoEFwdOp(4, 32, 2, "silu", use_sparse_mixer=True, target=target)
    routes = [sparse_mixer(row) for row in parts[1].double().tolist()]
    weights = torch.tensor([[w for w, _ in row] for row in routes])
    ids = torch.tensor([[e for _, e in row] for row in routes])
    same = same_dtype(op, parts, torch.bfloat16, weights, ids)
    assert_accurate(op(*args).cpu(), formula(op, parts, weights, ids), same)
    with pytest.raises(ValueError, match="router_weights must be None with use_sparse_mixer"):
        op(*args, router_weights=args[1])


def test_no_weight_is_unpacked_in_memory():
    """Beside the output, a call takes rows and a workspace that does not grow with the experts."""
    taken = []
    for experts in (2, 64):
        w1, w2 = (torch.zeros(experts, 512, 128, dtype=torch.uint8) for _ in "12")
        s1, s2 = torch.ones(experts, 512), torch.ones(experts, 512)
        x, logits = torch.randn(2, 256), torch.randn(2, experts)
        op = QMoEFwdOp(4, None, 1, "swiglu", True, 1, target="cpu")
        w2 = w2[:, :256]
        op(x, logits, w1, s1, None, w2, s2[:, :256])
        with torch.profiler.profile(profile_memory=True) as profile:
            op(x, logits, w1, s1, None, w2, s2[:, :256])
        taken.append(
            sum(max(0, e.self_cpu_memory_usage) for e in profile.key_averages())  # type: ignore[attr-defined]
        )
    assert 0 < taken[1] < taken[0] + 64 * 100


@functools.cache
def onnxruntime_qmoe(slots, dtype, bits, block, attributes):
    """A session of ONNX Runtime's QMoE on the CPU; all inputs are fed, none is an initializer."""
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    kind = {"float32": 1, "float16": 10}[dtype]
    names = ["x" if slot == 0 else f"in{slot}" if slot in slots else "" for slot in range(15)]
    uint8 = {2: 2, 5: 2, 11: 2, 12: 2}
    info = onnx.helper.make_tensor_value_info
    settings = dict(attributes) | {"expert_weight_bits": bits}
    settings |= {"swiglu_fusion": 1} if settings["activation_type"] == "swiglu" else {}
    settings |= {"block_size": block} if block else {}
    node = onnx.helper.make_node("QMoE", names, ["y"], domain="com.microsoft", **settings)
    graph = onnx.helper.make_graph(
        [node],
        "qmoe",
        [info(names[slot], uint8.get(slot, kind), None) for slot in slots],
        [info("y", kind, None)],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options), names


def run_onnxruntime(args, bits, block, router_weights=None, **attributes):
    """Give ONNX Runtime the arguments of a call."""
    x, logits, w1, s1, b1, w2, s2, b2, z1, z2 = args
    slots = {0: x, 1: logits, 2: w1, 3: s1, 4: b1, 5: w2, 6: s2, 7: b2, 11: z1, 12: z2}
    slots[14] = router_weights
    slots = {slot: value for slot, value in slots.items() if value is not None}
    dtype = str(x.dtype).removeprefix("torch.")
    session, names = onnxruntime_qmoe(
        tuple(slots), dtype, bits, block, tuple(sorted(attributes.items()))
    )
    feeds = {names[slot]: value.numpy() for slot, value in slots.items()}
    return torch.from_numpy(session.run(None, feeds)[0])


# it has no form with gate and linear rows in halves
ORT_FORMS = [form for form in FORMS if form[1] != 2]


@every_format
def test_onnxruntime_agrees(bits, block, points):
    for kind, fusion in ORT_FORMS:
        args, _ = tensors(bits, block, points, fusion, torch.float32)
        settings = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7}
        settings = settings if kind == "swiglu" else {}
        for weights in (None, torch.rand(T, E) + 0.1):
            want = run_onnxruntime(
                args,
                bits,
                block,
                weights,
                k=2,
                activation_type=kind,
                normalize_routing_weights=1,
                **settings,
            )
            op = QMoEFwdOp(bits, block, 2, kind, True, fusion, **settings, target="cpu")
            got = op(*args, router_weights=weights)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("points", [False, True])
def test_onnxruntime_agrees_on_raw_router_weights(points):
    args, _ = tensors(4, 32, points, 1, torch.float32)
    weights = torch.rand(T, E) + 0.1
    settings = {"k": 3, "activation_type": "swiglu"}
    want = run_onnxruntime(args, 4, 32, weights, **settings, normalize_routing_weights=0)
    op = QMoEFwdOp(4, 32, **settings, swiglu_fusion=1, target="cpu")
    torch.testing.assert_close(op(*args, router_weights=weights), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [None, 32, 64])
@pytest.mark.parametrize("points", [False, True])
def test_onnxruntime_agrees_on_a_short_last_block(block, points):
    for bits in (4, 8):
        args, _ = tensors(bits, block, points, 1, torch.float32, hidden=104, ffn=72)
        settings = {"k": 2, "activation_type": "swiglu", "activation_alpha": 1.5}
        want = run_onnxruntime(args, bits, block, **settings, normalize_routing_weights=1)
        op = QMoEFwdOp(bits, block, 2, "swiglu", True, 1, activation_alpha=1.5, target="cpu")
        torch.testing.assert_close(op(*args), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [None, 64])
def test_onnxruntime_agrees_in_half_precision(bits, block):
    """Its scales have the input's dtype then."""
    args, _ = tensors(bits, block, True, 1, torch.float16)
    args[3], args[6] = args[3].half(), args[6].half()
    settings = {"k": 2, "activation_type": "swiglu"}
    want = run_onnxruntime(args, bits, block, **settings, normalize_routing_weights=1).float()
    op = QMoEFwdOp(bits, block, 2, "swiglu", True, 1, target="cpu")
    error = torch.linalg.vector_norm(op(*args).float() - want)
    assert error < 4e-3 * torch.linalg.vector_norm(want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_weight_bits": 2}, r"expert_weight_bits must be one of \[4, 8\], got 2"),
        ({"block_size": 16}, r"block_size must be one of \[None, 32, 64, 128\], got 16"),
        ({"k": 0}, "k must be at least 1"),
        ({"activation_type": "swiglu"}, "swiglu_fusion must be 1 or 2 with .*there is no FC3"),
        ({"swiglu_fusion": 1}, "swiglu_fusion must be 0 with activation_type='relu', got 1"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be None or not negative, got -1.0"),
        ({"use_sparse_mixer": True}, "k must be 2 with use_sparse_mixer, got 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=f"QMoEFwdOp: {message}"):
        QMoEFwdOp(**settings)


def changed(args, at, value):
    return [value if i == at else a for i, a in enumerate(args)]


def test_wrong_calls():
    def fails(message, op, args, **named):
        with pytest.raises(ValueError, match="QMoEFwdOp: " + message):
            op(*args, **named)

    args, _ = tensors(4, 32, True, 1, torch.float32)
    op = QMoEFwdOp(4, 32, 2, "swiglu", True, 1)
    unpacked = args[2].repeat_interleave(2, -1)
    message = r"fc1_experts_weights must be \[E, 2I, H/2\] = \[6, 2I, 32\] .*got \(6, 192, 64\)"
    fails(message, op, changed(args, 2, unpacked))
    fails(
        "fc1_experts_weights must be torch.uint8, got torch.int8",
        op,
        changed(args, 2, args[2].view(torch.int8)),
    )
    message = r"fc1_scales must be \[E, 2I, H/32\] = \[6, 192, 2\], got \(6, 192, 1\)"
    fails(message, op, changed(args, 3, args[3][..., :1]))
    fails(
        "fc1_scales must be torch.float32, got torch.float16", op, changed(args, 3, args[3].half())
    )
    message = r"fc1_zero_points must be \[E, 2I, H/64\] = \[6, 192, 1\], got \(6, 192\)"
    fails(message, op, changed(args, 8, args[8][..., 0]))
    message = r"fc2_experts_weights must be \[E, H, I/2\] = \[6, 64, 48\], got \(6, 64, 47\)"
    fails(message, op, changed(args, 5, args[5][..., :-1]))
    message = r"fc2_zero_points must be \[E, H, I/64\] = \[6, 64, 2\], got \(6, 64, 3\)"
    fails(message, op, changed(args, 9, torch.zeros(E, H, 3, dtype=torch.uint8)))
    message = r"router_weights must be \[T, E\] = \[11, 6\], got \(6, 11\)"
    fails(message, op, args, router_weights=torch.zeros(E, T))
    fails("k must be at most E = 6, got 7", QMoEFwdOp(4, 32, 7, "swiglu", True, 1), args)
    odd = changed(args, 0, torch.zeros(T, 63))
    fails("H must be a multiple of 2, as 2 columns are packed in a byte, got 63", op, odd)

    args, _ = tensors(4, None, True, 1, torch.float32)
    op = QMoEFwdOp(4, None, 2, "swiglu", True, 1)
    fails(r"fc1_scales must be \[E, 2I, 1\] = \[6, 192, 1\]", op, changed(args, 3, args[3][:, :5]))
    message = r"fc1_zero_points must be \[E, I\] = \[6, 96\], got \(6, 192\)"
    fails(message, op, changed(args, 8, args[8].repeat(1, 2)))
    message = r"fc2_zero_points must be \[E, H/2\] = \[6, 32\], got \(6, 64\)"
    fails(message, op, changed(args, 9, args[9].repeat(1, 2)))
    with pytest.raises(RuntimeError, match="fc1_scales requires grad"):
        op(*changed(args, 3, args[3].clone().requires_grad_()))


def test_the_layer_needs_only_its_stages():
    assert {"reference", "cpu"} <= set(targets.registered_targets("qmoe_fwd"))


def call_for_a_gpu(dtype=torch.bfloat16, hidden=64, num_tokens=5):
    """Tensors on the CPU stand for those of a GPU where builds are collected."""
    made = [torch.zeros(E, n, k // 2, dtype=torch.uint8) for n, k in ((128, hidden), (hidden, 64))]
    scales = [torch.ones(E, codes.shape[1]) for codes in made]
    x, logits = torch.ones(num_tokens, hidden, dtype=dtype), torch.ones(num_tokens, E, dtype=dtype)
    op = QMoEFwdOp(4, None, 2, "swiglu", swiglu_fusion=2, target="cuda")
    return op(x, logits, made[0], scales[0], None, made[1], scales[1])


def test_what_cuda_does_not_take():
    for settings, reason in (
        ({"dtype": torch.float32}, "takes bfloat16 and float16, got torch.float32"),
        ({"hidden": 48}, "packed weights: every row must start on a 16-byte word, got torch.uint8"),
    ):
        with collecting("sm_90a"), pytest.raises(NoKernelError, match=reason):
            call_for_a_gpu(**settings)


def test_no_number_of_tokens_is_compiled_in():
    with collecting("sm_90a") as few:
        call_for_a_gpu(num_tokens=1)
    with collecting("sm_90a") as all_builds:
        for num_tokens in (1, 7, 48, 300, 70_000):
            call_for_a_gpu(num_tokens=num_tokens)
    kernels = [[b for b in found if "grouped_gemm_int" in b.module] for found in (few, all_builds)]
    assert [len(found) for found in kernels] == [2, 4]
