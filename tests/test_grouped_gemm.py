import pytest
import torch
from formulas import gated

from tileops.moe import ContiguousLayoutSpec, MaskedLayoutSpec, MoEGroupedGemmFwdOp
from tileops.workloads.grouped_gemm import activate

TIGHT = ContiguousLayoutSpec.tight_physical_psum()
PER_ROW = ContiguousLayoutSpec.tight_per_row()
ACTIVATIONS = [None, "silu_and_mul", "gelu_and_mul", "swigluoai"]
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def ends_of(counts, device):
    return torch.tensor(counts).cumsum(0).int().to(device)


def compute(a, b, bias, rows_of, activation, gate):
    """Multiply each expert's rows in the dtype of ``a``; rows of no expert stay NaN."""
    width = b.shape[1] // (1 if activation is None else 2)
    out = torch.full((*a.shape[:-1], width), float("nan"), dtype=a.dtype, device=a.device)
    for e, rows in rows_of:
        product = a[rows] @ b[e].T
        if bias is not None:
            product = product + bias[e]
        out[rows] = product if activation is None else gate(product, activation)
    return out


def check(op, a, b, metadata, rows_of, assert_accurate, bias=None, out=None):
    """Compare the rows of experts with float64, with NaN in the memory of all others."""
    rows_of = list(rows_of)
    exact = compute(
        a.double(),
        b.double(),
        None if bias is None else bias.double(),
        rows_of,
        op.activation,
        gated,
    )
    torch_form = compute(a, b, bias, rows_of, op.activation, activate)
    valid = torch.zeros(a.shape[:-1], dtype=torch.bool, device=a.device)
    for _, rows in rows_of:
        valid[rows] = True
    owned = a.clone()
    owned[~valid] = float("nan")
    got = op(owned, b, metadata, out, bias=bias)
    assert got.dtype == (op.out_dtype or a.dtype)
    assert_accurate(got[valid], exact[valid], torch_form[valid].to(got.dtype))
    return got, valid


def tight_rows(counts):
    start = 0
    for e, count in enumerate(counts):
        yield e, (slice(start, start + count),)
        start += count


@every_activation
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_tight(target, device, dtype, activation, with_bias, out_dtype, assert_accurate):
    counts, N, K = [3, 0, 130, 1, 17], 80, 72
    a = torch.randn(sum(counts), K, device=device).to(dtype)
    b = (torch.randn(len(counts), N, K, device=device) / K**0.5).to(dtype)
    bias = torch.randn(len(counts), N, device=device).to(dtype) if with_bias else None
    op = MoEGroupedGemmFwdOp(TIGHT, activation=activation, out_dtype=out_dtype, target=target)
    check(op, a, b, ends_of(counts, device), tight_rows(counts), assert_accurate, bias)


@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize("counts", [[1, 0, 129], [0, 0, 0], [3, 0, 128], [130, 130, 130]])
@pytest.mark.parametrize("max_m", [130, 8])
def test_masked(target, device, dtype, activation, counts, max_m, assert_accurate):
    counts = [min(c, max_m) for c in counts]
    E, N, K = len(counts), 48, 64
    a = torch.randn(E, max_m, K, device=device).to(dtype)
    b = (torch.randn(E, N, K, device=device) / K**0.5).to(dtype)
    op = MoEGroupedGemmFwdOp(MaskedLayoutSpec(max_m), activation=activation, target=target)
    width = N if activation is None else N // 2
    out = torch.full((E, max_m, width), 7.0, device=device).to(dtype)
    rows = [(e, (e, slice(0, c))) for e, c in enumerate(counts)]
    metadata = torch.tensor(counts, dtype=torch.int32, device=device)
    got, valid = check(op, a, b, metadata, rows, assert_accurate, out=out)
    assert got is out
    assert (out[~valid] == 7).all(), "rows past the count were written"


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("per_row", [False, True])
def test_aligned(target, device, dtype, alignment, per_row, assert_accurate):
    counts, N, K = [3, 0, 130, 16], 40, 24
    padded = [c + -c % alignment for c in counts]
    C = sum(counts) + len(counts) * (alignment - 1)
    C += -C % alignment
    a = torch.randn(C, K, device=device).to(dtype)
    b = (torch.randn(len(counts), N, K, device=device) / K**0.5).to(dtype)
    if per_row:
        layout = ContiguousLayoutSpec.aligned_per_row(alignment)
        labels = [e for e, p in enumerate(padded) for _ in range(p)]
        metadata = torch.tensor(labels + [len(counts)] * (C - len(labels)), dtype=torch.int32)
    else:
        layout = ContiguousLayoutSpec.aligned_physical_psum(alignment)
        metadata = ends_of(padded, "cpu")
    starts = [sum(padded[:e]) for e in range(len(counts))]
    rows = [(e, (slice(s, s + c),)) for e, (s, c) in enumerate(zip(starts, counts, strict=True))]
    op = MoEGroupedGemmFwdOp(layout, target=target)
    check(op, a, b, metadata.to(device), rows, assert_accurate)


@pytest.mark.parametrize(
    "labels",
    [
        [0] * 5 + [-1] * 128 + [2] * 9,
        [0] * 5 + [-1] * 3 + [0] * 2 + [1] * 130 + [-1],
        [-1] * 20,
        [3] * 20,
        [-1, 0, 3, 1, -(2**31), 2, 2**31 - 1],
    ],
)
def test_skip_labels(target, device, dtype, labels, assert_accurate):
    E, N, K = 3, 32, 40
    a = torch.randn(len(labels), K, device=device).to(dtype)
    b = (torch.randn(E, N, K, device=device) / K**0.5).to(dtype)
    metadata = torch.tensor(labels, dtype=torch.int32, device=device)
    rows = [(e, ((metadata == e).nonzero()[:, 0],)) for e in range(E)]
    op = MoEGroupedGemmFwdOp(PER_ROW, target=target)
    check(op, a, b, metadata, rows, assert_accurate)


@pytest.mark.parametrize("K", [8, 16, 24, 40, 64, 72, 100, 136, 1, 257])
def test_no_tail_of_the_contraction_is_dropped(target, device, dtype, K, assert_accurate):
    if target == "cuda" and K % 8:
        pytest.skip("rows on cuda are multiples of 16 bytes")
    a = torch.zeros(5, K, device=device).to(dtype)
    a[:, -8:] = torch.randn(5, min(8, K)).to(a)
    b = torch.randn(2, 16, K, device=device).to(dtype)
    op = MoEGroupedGemmFwdOp(TIGHT, target=target)
    got, _ = check(op, a, b, ends_of([2, 3], device), tight_rows([2, 3]), assert_accurate)
    assert got.count_nonzero() > 70


@every_activation
@pytest.mark.parametrize("F", [1, 8, 24, 96, 257, 704])
def test_every_column_is_written(target, device, dtype, activation, F, assert_accurate):
    if target == "cuda" and F % 8:
        pytest.skip("rows on cuda are multiples of 16 bytes")
    N = F if activation is None else 2 * F
    counts = [10, 21, 10]  # so many that torch's own error is no accident
    a = torch.randn(41, 16, device=device).to(dtype)
    b = (torch.randn(3, N, 16, device=device) / 4).to(dtype)
    out = torch.full((41, F), float("nan"), device=device).to(dtype)
    op = MoEGroupedGemmFwdOp(TIGHT, activation=activation, target=target)
    check(op, a, b, ends_of(counts, device), tight_rows(counts), assert_accurate, out=out)


@pytest.mark.parametrize("num_experts", [1, 60, 1025])
def test_expert_counts(target, device, dtype, num_experts, assert_accurate):
    counts = [0] * num_experts
    for e in (0, num_experts // 2, num_experts - 1):
        counts[e] = 2
    a = torch.randn(sum(counts), 16, device=device).to(dtype)
    b = torch.randn(num_experts, 8, 16, device=device).to(dtype)
    op = MoEGroupedGemmFwdOp(TIGHT, target=target)
    check(op, a, b, ends_of(counts, device), tight_rows(counts), assert_accurate)


def test_more_rows_than_a_grid_axis(target, device, assert_accurate):
    counts = [65_536, 3, 8_000]
    a = torch.randn(sum(counts), 16, device=device).bfloat16()
    b = torch.randn(3, 16, 16, device=device).bfloat16()
    op = MoEGroupedGemmFwdOp(TIGHT, activation="silu_and_mul", target=target)
    check(op, a, b, ends_of(counts, device), tight_rows(counts), assert_accurate)


def test_half_products_are_exact_before_they_are_added(target, device):
    op = MoEGroupedGemmFwdOp(TIGHT, out_dtype=torch.float32, target=target)
    one = torch.tensor([1], dtype=torch.int32, device=device)
    # 3.001 is 3.001953125 in half precision, and its square needs 21 bits
    for value, K, want in ((300.0, 8, 720_000.0), (3.001, 8, 8 * 3.001953125**2)):
        x = torch.full((1, K), value, dtype=torch.float16, device=device)
        w = torch.full((1, 8, K), value, dtype=torch.float16, device=device)
        assert op(x, w, one)[0].tolist() == [want] * 8


def test_swigluoai_clamps_the_gate_from_above_only(target, device):
    pairs = [(-9.0, 2.0), (-7.5, 9.0), (9.0, -9.0), (3.0, -1.0), (0.5, 0.25)]
    want = torch.tensor([-6.00953e-6, -1.71546e-4, -41.999719, 0.0, 0.437986])
    a = torch.zeros(1, 8, device=device).bfloat16()
    a[0, 0] = 1
    b = torch.zeros(1, 16, 8, device=device).bfloat16()
    b[0, :10, 0] = torch.tensor(pairs).flatten()
    op = MoEGroupedGemmFwdOp(TIGHT, activation="swigluoai", out_dtype=torch.float32, target=target)
    got = op(a, b, torch.tensor([1], dtype=torch.int32, device=device))[0, :5]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-9)


def test_gelu_is_the_exact_one(target, device):
    a = torch.zeros(1, 8, device=device).bfloat16()
    a[0, 0] = 1
    b = torch.zeros(1, 16, 8, device=device).bfloat16()
    b[0, :3, 0] = torch.tensor([-2.0, -1.0, 2.0])
    b[0, 8:, 0] = 1
    op = MoEGroupedGemmFwdOp(
        TIGHT, activation="gelu_and_mul", out_dtype=torch.float32, target=target
    )
    got = op(a, b, torch.tensor([1], dtype=torch.int32, device=device))[0, :3]
    want = torch.tensor([-0.04550026, -0.15865525, 1.95449974])
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_keep_nan_and_survive_extremes(target, device, activation):
    gates = torch.tensor([float("nan"), 1.0, 300.0, -300.0, -60.0, 0.0, -0.5, 20.0])
    ups = torch.tensor([1.0, float("nan"), 2.0, 2.0, 1.0, 5.0, 1.0, 300.0])
    pairs = (
        torch.stack([gates, ups], 1).flatten()
        if activation == "swigluoai"
        else torch.cat([gates, ups])
    )
    # the contraction is one product, so a NaN weight reaches only its own column
    a = torch.ones(1, 8, device=device).bfloat16()
    b = torch.zeros(1, 16, 8, device=device).bfloat16()
    b[0, :, 0] = pairs.bfloat16()
    op = MoEGroupedGemmFwdOp(TIGHT, activation=activation, out_dtype=torch.float32, target=target)
    got = op(a, b, torch.tensor([1], dtype=torch.int32, device=device))[0].cpu()
    want = gated(pairs.bfloat16(), activation).float()
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-24, equal_nan=True)


def test_views_of_every_operand(target, device, dtype):
    E, N, K, counts = 3, 32, 64, [4, 0, 9]
    for activation in ACTIVATIONS:
        a = torch.randn(26, 2 * K, device=device).to(dtype)[::2, K // 2 : K // 2 + K]
        b = torch.randn(2 * E, N + 8, K + 8, device=device).to(dtype)[::2, 8:, :K]
        bias = torch.randn(E, N + 8, device=device).to(dtype)[:, 8:]
        width = N if activation is None else N // 2
        buffer = torch.full((13, 3 * width), 7.0, device=device).to(dtype)
        out = buffer[:, width : 2 * width]
        op = MoEGroupedGemmFwdOp(TIGHT, activation=activation, target=target)
        ends = ends_of(counts, device)
        assert op(a, b, ends, out, bias=bias) is out
        want = op(a.contiguous(), b.contiguous(), ends, bias=bias.contiguous())
        assert torch.equal(out, want)
        assert (buffer[:, :width] == 7).all()
        assert (buffer[:, 2 * width :] == 7).all()


def test_a_row_does_not_depend_on_its_neighbours(kernels, device, dtype):
    a = torch.randn(16, 72, device=device).to(dtype)
    b = torch.randn(1, 48, 72, device=device).to(dtype)
    op = MoEGroupedGemmFwdOp(TIGHT, activation="silu_and_mul", target=kernels)
    whole = op(a, b, ends_of([16], device))
    for lo, hi in ((0, 1), (5, 7), (3, 16)):
        assert torch.equal(op(a[lo:hi], b, ends_of([hi - lo], device)), whole[lo:hi])


def test_empty_calls(target, device, dtype):
    b = torch.randn(3, 16, 8, device=device).to(dtype)
    op = MoEGroupedGemmFwdOp(TIGHT, target=target)
    none = torch.zeros(3, dtype=torch.int32, device=device)
    assert op(torch.empty(0, 8, device=device).to(dtype), b, none).shape == (0, 16)


@pytest.mark.parametrize("layout", [TIGHT, PER_ROW, MaskedLayoutSpec(4)], ids=repr)
def test_bad_metadata_writes_nothing_outside(kernels, device, layout):
    """Values are not checked, since that would synchronise, but may not reach other memory."""
    masked = isinstance(layout, MaskedLayoutSpec)
    guarded = torch.full((40, 16), 7.0, device=device).bfloat16()
    out = guarded[12:24].view(3, 4, 16) if masked else guarded[12:24]
    a = torch.randn(*out.shape[:-1], 8, device=device).bfloat16()
    b = torch.randn(3, 16, 8, device=device).bfloat16()
    size = 12 if layout == PER_ROW else 3
    op = MoEGroupedGemmFwdOp(layout, target=kernels)
    for values in ([10**9, -5, 2**31 - 1], [-7, -1, -(2**31)], [12, 3, 40]):
        metadata = torch.tensor((values * 4)[:size], dtype=torch.int32, device=device)
        op(a, b, metadata, out)
        assert (guarded[:12] == 7).all()
        assert (guarded[24:] == 7).all()


def test_errors(target, device):
    op = MoEGroupedGemmFwdOp(TIGHT, target=target)
    a = torch.randn(4, 8, device=device).bfloat16()
    b = torch.randn(3, 16, 8, device=device).bfloat16()
    ends = torch.tensor([1, 2, 4], dtype=torch.int32, device=device)
    with pytest.raises(
        ValueError,
        match=r"MoEGroupedGemmFwdOp: b must be \[E, N, K\] = \[E, N, 8\], got \(3, 16, 9\)",
    ):
        op(a, torch.randn(3, 16, 9, device=device).bfloat16(), ends)
    with pytest.raises(ValueError, match="b must be torch.bfloat16, got torch.float16"):
        op(a, b.half(), ends)
    with pytest.raises(
        ValueError,
        match=r"layout_metadata must be torch.int32, got torch.int64; use layout_metadata.int\(\)",
    ):
        op(a, b, ends.long())
    with pytest.raises(ValueError, match=r"layout_metadata must be \[E\] = \[3\], got \(4,\)"):
        op(a, b, torch.zeros(4, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"layout_metadata must be \[M\] = \[4\], got \(3,\)"):
        MoEGroupedGemmFwdOp(PER_ROW, target=target)(a, b, ends)
    with pytest.raises(ValueError, match=r"bias must be \[E, N\] = \[3, 16\], got \(3, 15\)"):
        op(a, b, ends, bias=torch.zeros(3, 15, device=device).bfloat16())
    with pytest.raises(
        ValueError, match=r"b must be \[E, 2F, K\] = \[E, 2F, 8\] with 2F even, got \(3, 15, 8\)"
    ):
        MoEGroupedGemmFwdOp(TIGHT, activation="silu_and_mul", target=target)(a, b[:, :15], ends)
    with pytest.raises(
        ValueError, match=r"a must be \[E, max_m, K\] = \[E, 7, K\], got \(3, 4, 8\)"
    ):
        MoEGroupedGemmFwdOp(MaskedLayoutSpec(7), target=target)(a.expand(3, 4, 8), b, ends)
    with pytest.raises(
        ValueError, match=r"a must have a last dimension of stride 1, got strides \(1, 4\)"
    ):
        op(torch.randn(8, 4, device=device).bfloat16().T, b, ends)
    with pytest.raises(ValueError, match=r"out must be \[M, N\] = \[4, 16\], got \(4, 15\)"):
        op(a, b, ends, torch.empty(4, 15, device=device).bfloat16())
    with pytest.raises(ValueError, match="out must be torch.float32, got torch.bfloat16"):
        MoEGroupedGemmFwdOp(TIGHT, out_dtype=torch.float32, target=target)(
            a, b, ends, torch.empty(4, 16, device=device).bfloat16()
        )
    with pytest.raises(ValueError, match="out must not overlap itself"):
        op(a, b, ends, torch.empty(1, 16, device=device).bfloat16().expand(4, 16))
    with pytest.raises(RuntimeError, match="a requires grad, but the op is forward-only"):
        op(a.clone().requires_grad_(), b, ends)
    with torch.no_grad():
        op(a.clone().requires_grad_(), b, ends)
    with pytest.raises(TypeError, match="b must be a torch.Tensor, got list"):
        op(a, [b], ends)
    with pytest.raises(ValueError, match="activation must be one of .* got 'relu'"):
        MoEGroupedGemmFwdOp(TIGHT, activation="relu")
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        MoEGroupedGemmFwdOp(TIGHT, out_dtype=torch.float16)


def test_out_must_not_overlap(target, device):
    op = MoEGroupedGemmFwdOp(TIGHT, target=target)
    ends = torch.tensor([4], dtype=torch.int32, device=device)
    buffer = torch.randn(4, 32, device=device).bfloat16()
    b = torch.randn(1, 16, 16, device=device).bfloat16()
    before = buffer.clone()
    with pytest.raises(ValueError, match="out must not overlap a"):
        op(buffer[:, :16], b, ends, buffer[:, 8:24])
    with pytest.raises(ValueError, match="out must not overlap b"):
        op(buffer[:, :16], b, ends, b[0, :4])
    assert torch.equal(buffer, before)
    got = op(buffer[:, :16], b, ends, buffer[:, 16:])
    assert torch.equal(got, op(before[:, :16].contiguous(), b, ends))
