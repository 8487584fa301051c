"""FP8 grouped GEMM: dequantised operands in float64, and the bound of the op's document."""

import math

import pytest
import torch
from formulas import gated
from test_grouped_gemm import PER_ROW, TIGHT, ends_of, tight_rows

from tileops import targets
from tileops.compilation import collecting
from tileops.kernels.cuda.sm90 import grouped_gemm_fp8
from tileops.moe import ContiguousLayoutSpec, MaskedLayoutSpec, MoEGroupedGemmFP8FwdOp
from tileops.moe.grouped_gemm import ACTIVATIONS
from tileops.moe.grouped_gemm_fp8 import run_grouped_gemm_fp8
from tileops.workloads.accuracy import ROUNDING, relative_error
from tileops.workloads.layer import uncommitted

E4M3 = torch.float8_e4m3fn
NAN = math.nan
SUM_ERROR = {"cuda": 2.0**-10, "cpu": 2e-6, "reference": 2e-6}
"""Relative, of a float32 result: Hopper's tensor cores keep 13 bits behind the leading one of the
largest FP8 product while they add those of a block, and only the sums of blocks are float32."""


def fp8(*shape, device="cpu"):
    """Numbers of all sizes, few of them near 448, without NaN."""
    return (torch.randn(shape, device=device) * 40).clamp(-448, 448).to(E4M3)


def scales(*shape, device="cpu"):
    """Scales no two of which are alike, over three powers of two."""
    return torch.exp2(torch.rand(shape, device=device) * 3 - 8)


def operands(lead, num_experts, N, K, device):
    a, b = fp8(*lead, K, device=device), fp8(num_experts, N, K, device=device)
    b_scale = scales(num_experts, N // 128, K // 128, device=device) / K**0.5
    return a, scales(*lead, K // 128, device=device), b, b_scale


def dequantised(x, scale, rows=1):
    wide = scale.double().repeat_interleave(128, -1)
    return x.double() * (wide if rows == 1 else wide.repeat_interleave(rows, -2))


def exact(a, a_scale, b, b_scale, rows_of):
    """Each expert's product in float64; rows of no expert stay NaN."""
    out = torch.full((*a.shape[:-1], b.shape[1]), NAN, dtype=torch.float64, device=a.device)
    a, b = dequantised(a, a_scale), dequantised(b, b_scale, 128)
    for e, rows in rows_of:
        out[rows] = a[rows] @ b[e].T
    return out


def assert_within_document(got, want, K):
    atol = 2e-2 * max(1, K / 1024) ** 0.5
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=2e-2)
    # the sums are far better than that
    assert relative_error(got, want) <= ROUNDING[torch.bfloat16]


def check(op, a, a_scale, b, b_scale, metadata, rows_of, out=None):
    """Compare the rows of experts; all others are NaN, and so are their scales."""
    rows_of = list(rows_of)
    want = exact(a, a_scale, b, b_scale, rows_of)
    valid = torch.zeros(a.shape[:-1], dtype=torch.bool, device=a.device)
    for _, rows in rows_of:
        valid[rows] = True
    a, a_scale = a.clone(), a_scale.clone()
    a.view(torch.uint8)[~valid], a_scale[~valid] = 0x7F, NAN
    got = op(a, a_scale, b, b_scale, metadata, out)
    assert got.dtype == torch.bfloat16
    assert_within_document(got[valid], want[valid], a.shape[-1])
    return got, valid


@pytest.mark.parametrize(("N", "K"), [(128, 128), (384, 256), (256, 1280)])
def test_tight(target, device, N, K):
    counts = [3, 0, 130, 1, 17]
    args = operands((sum(counts),), len(counts), N, K, device)
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)
    check(op, *args, ends_of(counts, device), tight_rows(counts))


@pytest.mark.parametrize("counts", [[1, 0, 129], [0, 0, 0], [3, 0, 128], [130, 130, 130]])
@pytest.mark.parametrize("max_m", [130, 8])
def test_masked(target, device, counts, max_m):
    counts = [min(c, max_m) for c in counts]
    args = operands((3, max_m), 3, 256, 384, device)
    op = MoEGroupedGemmFP8FwdOp(MaskedLayoutSpec(max_m), target=target)
    out = torch.full((3, max_m, 256), 7.0, device=device).bfloat16()
    rows = [(e, (e, slice(0, c))) for e, c in enumerate(counts)]
    metadata = torch.tensor(counts, dtype=torch.int32, device=device)
    got, valid = check(op, *args, metadata, rows, out=out)
    assert got is out
    assert (out[~valid] == 7).all(), "rows past the count were written"


def test_counts_are_clamped(target, device):
    args = operands((4, 6), 4, 128, 128, device)
    op = MoEGroupedGemmFP8FwdOp(MaskedLayoutSpec(6), target=target)
    guarded = torch.full((40, 128), 7.0, device=device).bfloat16()
    out = guarded[8:32].view(4, 6, 128)
    counts = torch.tensor([2**31 - 1, -3, 7, -(2**31)], dtype=torch.int32, device=device)
    rows = [(0, (0, slice(0, 6))), (2, (2, slice(0, 6)))]
    check(op, *args, counts, rows, out)
    for untouched in (guarded[:8], guarded[32:], out[1], out[3]):
        assert (untouched == 7).all()


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("per_row", [False, True])
def test_aligned(target, device, alignment, per_row):
    counts = [3, 0, 130, 16]
    padded = [c + -c % alignment for c in counts]
    C = sum(counts) + len(counts) * (alignment - 1)
    C += -C % alignment
    args = operands((C,), 4, 128, 256, device)
    if per_row:
        layout = ContiguousLayoutSpec.aligned_per_row(alignment)
        labels = [e for e, p in enumerate(padded) for _ in range(p)]
        metadata = torch.tensor(labels + [4] * (C - len(labels)), dtype=torch.int32, device=device)
    else:
        layout = ContiguousLayoutSpec.aligned_physical_psum(alignment)
        metadata = ends_of(padded, device)
    starts = [sum(padded[:e]) for e in range(4)]
    rows = [(e, (slice(s, s + c),)) for e, (s, c) in enumerate(zip(starts, counts, strict=True))]
    check(MoEGroupedGemmFP8FwdOp(layout, target=target), *args, metadata, rows)


def test_skip_labels(target, device):
    labels = [0] * 5 + [-1] * 3 + [0] * 2 + [1] * 130 + [-1, 3, 2**31 - 1, -(2**31)]
    metadata = torch.tensor(labels, dtype=torch.int32, device=device)
    rows = [(e, ((metadata == e).nonzero()[:, 0],)) for e in range(3)]
    args = operands((len(labels),), 3, 128, 128, device)
    check(MoEGroupedGemmFP8FwdOp(PER_ROW, target=target), *args, metadata, rows)


@pytest.mark.parametrize("num_experts", [1, 60, 1025])
def test_expert_counts(target, device, num_experts):
    counts = [0] * num_experts
    for e in (0, num_experts // 2, num_experts - 1):
        counts[e] = 2
    args = operands((sum(counts),), num_experts, 128, 128, device)
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)
    check(op, *args, ends_of(counts, device), tight_rows(counts))


def test_sums_of_blocks_are_added_in_float32(target, device):
    """A narrower accumulator loses the ones beside 448 * 448; tensor cores do within a block."""
    a = torch.ones(1, 4096, device=device).to(E4M3)
    a[0, 0] = 448
    b = a.expand(128, 4096).contiguous()[None]
    one = torch.tensor([1], dtype=torch.int32, device=device)
    scale, b_scale = torch.ones(1, 32, device=device), torch.ones(1, 1, 32, device=device)
    got = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)(a, scale, b, b_scale, one)
    assert (got == 204_800).all()
    out = torch.empty(1, 128, device=device)
    run_grouped_gemm_fp8(a, scale, b, b_scale, one, None, TIGHT, None, target, out)
    assert ((out - 204_799).abs() <= (127 if target == "cuda" else 1)).all()


def test_every_scale_reaches_its_block(target, device):
    """With one value a block, each result is a scale of a times one of b."""
    M, N, K = 3, 384, 512
    a_scale, b_scale = scales(M, K // 128, device=device), scales(2, 3, K // 128, device=device)
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)
    for block in range(K // 128):
        a, b = torch.zeros(M, K, device=device), torch.zeros(2, N, K, device=device)
        a[:, block * 128 + 77] = b[:, :, block * 128 + 77] = 1
        ends = ends_of([1, 2], device)
        got = op(a.to(E4M3), a_scale, b.to(E4M3), b_scale, ends)
        factor = b_scale[[0, 1, 1], :, block].repeat_interleave(128, 1)
        want = (a_scale[:, block, None] * factor).bfloat16()
        assert torch.equal(got, want)


def test_special_values(target, device):
    a, a_scale, b, b_scale = operands((6,), 1, 256, 256, device)
    a.view(torch.uint8)[1, 3], a.view(torch.uint8)[2, 200] = 0x7F, 0xFF
    b.view(torch.uint8)[0, 130, 7] = 0x7F
    a_scale[3, 1] = math.inf
    ends = torch.tensor([6], dtype=torch.int32, device=device)
    got = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)(a, a_scale, b, b_scale, ends)
    nan = torch.zeros(6, 256, dtype=torch.bool)
    nan[[1, 2]], nan[:, 130] = True, True
    assert torch.equal(got.isnan().cpu(), nan)
    assert got[3, :128].isinf().all()
    assert got[[0, 4, 5]][:, :128].isfinite().all()
    zero, zeros = torch.zeros_like(a_scale), MoEGroupedGemmFP8FwdOp(TIGHT, target=target)
    assert (zeros(a[:1], zero[:1], b, b_scale, ends.clamp(max=1))[0, :128] == 0).all()


@pytest.mark.parametrize("activation", [None, "silu_and_mul", "gelu_and_mul", "swigluoai"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_bias_and_activation(target, device, activation, out_dtype, bias_dtype):
    """What the layer asks of the kernel and the public op does not."""
    counts, N, K = [3, 0, 34], 512, 256
    a, a_scale, b, b_scale = operands((37,), 3, N, K, device)
    bias = None
    if bias_dtype is not None:
        bias = torch.randn(3, N, device=device).to(bias_dtype)
    width = N if activation is None else N // 2
    out = torch.full((37, width), NAN, device=device).to(out_dtype)
    ends = ends_of(counts, device)
    run_grouped_gemm_fp8(a, a_scale, b, b_scale, ends, bias, TIGHT, activation, target, out)
    want = exact(a, a_scale, b, b_scale, tight_rows(counts))
    if bias is not None:
        want[:3] += bias[0].double()
        want[3:] += bias[2].double()
    if activation is not None:
        want = gated(want, activation)
    assert relative_error(out, want) <= ROUNDING[out_dtype] + SUM_ERROR[target]


def test_one_bias_alone(target, device):
    a, a_scale, b, b_scale = operands((5,), 1, 256, 128, device)
    gate, up = b.chunk(2, 1)
    gate_scale, up_scale = b_scale.chunk(2, 1)
    bias = torch.randn(1, 128, device=device).half()
    ends = torch.tensor([5], dtype=torch.int32, device=device)
    product = exact(a, a_scale, b, b_scale, [(0, (slice(0, 5),))])
    for gate_bias, up_bias in ((bias, None), (None, bias)):
        out = torch.empty(5, 128, device=device)
        weights = gate, gate_scale, up, up_scale, ends, gate_bias, up_bias
        formula = ACTIVATIONS["silu_and_mul"]
        args = a, a_scale, *weights, TIGHT, formula
        targets.run("moe_grouped_gemm_fp8_fwd", target, *args, out=out)
        want = product.clone()
        half = slice(0, 128) if up_bias is None else slice(128, 256)
        want[:, half] += bias.double()
        assert relative_error(out, gated(want, "silu_and_mul")) <= SUM_ERROR[target]


def test_views_of_every_operand(target, device):
    E, N, K, counts = 3, 256, 256, [4, 0, 9]
    a = fp8(26, 2 * K, device=device)[::2, K // 2 : K // 2 + K]
    b = fp8(2 * E, N + 16, K + 16, device=device)[::2, 16:, :K]
    a_scale = scales(2, 26, device=device).T[::2]
    b_scale = scales(2, E, 5, device=device).permute(1, 2, 0)[:, ::2][:, 1:]
    buffer = torch.full((13, 3 * N), 7.0, device=device).bfloat16()
    out = buffer[:, N : 2 * N]
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)
    ends = ends_of(counts, device)
    assert op(a, a_scale, b, b_scale, ends, out) is out
    plain = (x.contiguous() for x in (a, a_scale, b, b_scale))
    assert torch.equal(out, op(*plain, ends))
    assert (buffer[:, :N] == 7).all()
    assert (buffer[:, 2 * N :] == 7).all()
    one = scales(1, 1, 1, device=device).expand(E, N // 128, K // 128)
    rows = a_scale[:1].expand(13, 2)
    want = op(a, rows.contiguous(), b, one.contiguous(), ends)
    assert torch.equal(op(a, rows, b, one, ends), want)


@pytest.mark.parametrize("place", range(4))
def test_every_number_is_read_exactly(target, device, place):
    """A kernel may read several at a time: each byte in each place of a word, of both operands."""
    every = torch.arange(256, device=device).byte().view(E4M3)
    some = torch.zeros(256, 128, device=device)
    some[:, 4 + place] = 1
    numbers = some.to(E4M3)
    numbers[:, 4 + place] = every
    ones, scale = some.to(E4M3), torch.ones(256, 1, device=device)
    b_scale, end = torch.ones(1, 2, 1, device=device), ends_of([256], device)
    for a, b in ((ones, numbers), (numbers, ones)):
        out = torch.empty(256, 256, device=device)
        args = a, scale, b[None], b_scale, end, None, TIGHT, None, target
        run_grouped_gemm_fp8(*args, out)
        got = out[0] if b is numbers else out[:, 0]
        torch.testing.assert_close(got, every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_cpu_takes_weights_that_start_anywhere(offset):
    a, a_scale, b, b_scale = operands((9,), 2, 128, 256, "cpu")
    moved = torch.zeros(2, 128, 256 + offset, dtype=E4M3)[:, :, offset:].copy_(b)
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target="cpu")
    args = ends_of([4, 5], "cpu"), tight_rows([4, 5])
    check(op, a, a_scale, moved, b_scale, *args)


def test_a_row_does_not_depend_on_its_neighbours(kernels, device):
    a, a_scale, b, b_scale = operands((16,), 1, 256, 384, device)
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target=kernels)
    whole = op(a, a_scale, b, b_scale, ends_of([16], device))
    for lo, hi in ((0, 1), (5, 7), (3, 16)):
        got = op(a[lo:hi], a_scale[lo:hi], b, b_scale, ends_of([hi - lo], device))
        assert torch.equal(got, whole[lo:hi])


def test_empty_calls(target, device):
    none = torch.zeros(3, dtype=torch.int32, device=device)
    args = operands((0,), 3, 256, 128, device)
    assert MoEGroupedGemmFP8FwdOp(TIGHT, target=target)(*args, none).shape == (0, 256)
    args = operands((2,), 3, 256, 128, device)
    got = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)(*args, none)
    assert got.shape == (2, 256)


@pytest.mark.parametrize("layout", [TIGHT, PER_ROW, MaskedLayoutSpec(4)], ids=repr)
def test_bad_metadata_writes_nothing_outside(kernels, device, layout):
    masked = isinstance(layout, MaskedLayoutSpec)
    guarded = torch.full((40, 128), 7.0, device=device).bfloat16()
    out = guarded[12:24].view(3, 4, 128) if masked else guarded[12:24]
    args = operands(out.shape[:-1], 3, 128, 128, device)
    size = 12 if layout == PER_ROW else 3
    op = MoEGroupedGemmFP8FwdOp(layout, target=kernels)
    for values in ([10**9, -5, 2**31 - 1], [-7, -1, -(2**31)], [12, 3, 40]):
        metadata = torch.tensor((values * 4)[:size], dtype=torch.int32, device=device)
        op(*args, metadata, out)
        assert (guarded[:12] == 7).all()
        assert (guarded[24:] == 7).all()


def test_errors():
    op = MoEGroupedGemmFP8FwdOp(TIGHT)
    a, a_scale, b, b_scale = operands((4,), 3, 256, 384, "cpu")
    ends = ends_of([1, 1, 2], "cpu")
    wrong = [
        (r"a must be torch.float8_e4m3fn, got torch.bfloat16", {"a": a.bfloat16()}),
        (r"a must have K a multiple of 128, the side .* got K = 200", {"a": fp8(4, 200)}),
        (r"b must have N a multiple of 128.* got N = 192", {"b": fp8(3, 192, 384)}),
        (r"b must be \[E, N, K\] = \[E, N, 384\], got \(3, 256, 128\)", {"b": fp8(3, 256, 128)}),
        (r"a_scale must be \[M, K/128\] = \[4, 3\], got \(4, 4\)", {"a_scale": scales(4, 4)}),
        (r"a_scale must be torch.float32, got torch.float64", {"a_scale": a_scale.double()}),
        (
            r"b_scale must be \[E, N/128, K/128\] = \[3, 2, 3\], got \(3, 256, 3\)",
            {"b_scale": scales(3, 256, 3)},
        ),
        (r"layout_metadata must be torch.int32, got torch.int64", {"layout_metadata": ends.long()}),
        (r"out must be torch.bfloat16, got torch.float32", {"out": torch.empty(4, 256)}),
        (
            r"out must be \[M, N\] = \[4, 256\], got \(4, 128\)",
            {"out": torch.empty(4, 128).bfloat16()},
        ),
    ]
    right = dict(a=a, a_scale=a_scale, b=b, b_scale=b_scale, layout_metadata=ends)
    for message, change in wrong:
        with pytest.raises(ValueError, match=f"^MoEGroupedGemmFP8FwdOp: {message}"):
            op(**{**right, **change})
    with pytest.raises(TypeError, match="layout must be a ContiguousLayoutSpec or"):
        MoEGroupedGemmFP8FwdOp("tight")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a must be \[E, max_m, K\] = \[E, 7, K\]"):
        MoEGroupedGemmFP8FwdOp(MaskedLayoutSpec(7))(**{**right, "a": fp8(3, 4, 384)})


def test_out_must_not_overlap(target, device):
    op = MoEGroupedGemmFP8FwdOp(TIGHT, target=target)
    a, a_scale, b, b_scale = operands((4,), 1, 128, 256, device)
    ends = ends_of([4], device)
    out = a.view(torch.bfloat16)
    with pytest.raises(ValueError, match="MoEGroupedGemmFP8FwdOp: out must not overlap a,"):
        op(a, a_scale, b, b_scale, ends, out)
    buffer = torch.empty(4, 128, device=device).bfloat16()
    inside = buffer.view(torch.float32)[0, :2].expand(4, 2)
    with pytest.raises(ValueError, match="out must not overlap a_scale"):
        op(a, inside, b, b_scale, ends, buffer)


def test_what_cuda_does_not_take():
    _, a_scale, _, b_scale = operands((4,), 2, 256, 256, "cpu")
    ends, out = torch.zeros(2, dtype=torch.int32), torch.empty(0, 256).bfloat16()

    def refusal(a, b):
        args = a, a_scale, b, b_scale, None, None, ends, None, None, TIGHT, None
        with collecting("sm_90a"):
            return grouped_gemm_fp8.refuse(*args, target="cuda", out=out) or ""

    whole = torch.zeros(2, 256, 256).to(E4M3)
    few = torch.zeros(4, 256).to(E4M3)
    long = uncommitted((2**27 + 2, 256), E4M3, torch.device("cpu"))
    assert refusal(few, whole) == ""
    assert "less than 2**35 bytes" in refusal(long, whole)
    assert "expanded dimensions" in refusal(few, whole[:1].expand(2, -1, -1))
    assert "16-byte" in refusal(few, torch.zeros(2, 256, 272).to(E4M3)[:, :, 8:264])
