"""Quantisation to FP8: the formula in float64, and the same bits on every target."""

import math

import pytest
import torch

from tileops.moe import quantize_fp8_blockwise, quantize_fp8_rowwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
both_scales = pytest.mark.parametrize("power_of_two", [False, True])
both_kinds = pytest.mark.parametrize(
    "quantize", [quantize_fp8_rowwise, quantize_fp8_blockwise], ids=["rowwise", "blockwise"]
)
NAN, INF = math.nan, math.inf
MAGNITUDES = [
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** max(e - 7, -6) for e in range(16) for m in range(8)
]
MAGNITUDES = MAGNITUDES[:-1]
"""What the bytes 0 to 126 stand for; 127 is NaN."""


def to_e4m3(value):
    """Round float64 to e4m3, to nearest even, with +-448 for what is larger; the value remains."""
    exponent = torch.frexp(value).exponent.clamp(min=-5) - 1
    step = torch.exp2((exponent - 3).double())
    rounded = torch.where(value.isinf(), value, torch.round(value / step) * step)
    return torch.where(rounded.abs() > 448, torch.copysign(torch.tensor(448.0), value), rounded)


def blocks_of(x, quantize):
    """View the blocks' values as the last dimension of float64, or put such a view back."""
    blocks = x.double().unflatten(-1, (-1, 128))
    if quantize is quantize_fp8_rowwise:
        return blocks
    return blocks.unflatten(-3, (-1, 128)).transpose(-3, -2).flatten(-2)


def check(x, q, scale, quantize, power_of_two):
    """Compare with the definition, in float64 and rounded to float32 where it says so."""
    assert q.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert q.is_contiguous()
    assert scale.is_contiguous()
    assert q.shape == x.shape
    blocks = blocks_of(x, quantize)
    assert scale.shape == blocks.shape[:-1]
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(-1)
    want = (amax / 448).float().double()
    if power_of_two:
        want = torch.tensor(
            [2.0 ** math.ceil(math.log2(s)) if s else 0.0 for s in want.flatten().tolist()],
            dtype=torch.float64,
        ).view(want.shape)
    want[want == 0] = 1
    assert torch.equal(scale.double().cpu(), want.cpu())
    value = to_e4m3((blocks.cpu() / want.cpu()[..., None]).float().double())
    got = blocks_of(q.cpu().float(), quantize)
    assert torch.equal(got.isnan(), value.isnan())
    assert torch.equal(got.nan_to_num(), value.nan_to_num())
    assert torch.equal(got.signbit() | got.isnan(), value.signbit() | value.isnan())


def random(*shape, dtype=torch.float32, spread=8):
    powers = torch.randint(-spread, spread + 1, shape).double()
    return (torch.randn(shape).double() * torch.exp2(powers)).clamp(-6e4, 6e4).to(dtype)


@every_dtype
@both_scales
@both_kinds
def test_the_formula(target, device, dtype, power_of_two, quantize):
    x = random(3, 256, 384, dtype=dtype)
    x[0, 0], x[1, :128, 128:256] = 0, 0
    x = x.to(device)
    q, scale = quantize(x, power_of_two=power_of_two, target=target)
    check(x, q, scale, quantize, power_of_two)
    # three bits behind the leading one, or a unit of the subnormals
    value = blocks_of(x, quantize)
    error = (blocks_of(q.float(), quantize) * scale[..., None].double() - value).abs()
    assert (error <= value.abs() * (2**-4 + 2**-20) + 2**-10 * scale[..., None].double()).all()


@both_kinds
def test_values_that_are_not_finite(target, device, quantize):
    x = random(2, 256, 256)
    x[0, 0, :4] = torch.tensor([NAN, INF, -INF, -NAN])
    x[0, 1], x[0, 2], x[0, 3, :128] = INF, -INF, NAN
    x[1, :128, :128] = torch.where(torch.rand(128, 128) < 0.5, INF, NAN)
    x = x.to(device)
    q, scale = quantize(x, target=target)
    check(x, q, scale, quantize, False)
    assert q[0, 0, :4].float().nan_to_num(0).tolist() == [0, 448, -448, 0]
    assert (scale[1, 0, 0] == 1).all()
    # one bit pattern
    assert (q.view(torch.uint8)[x.isnan()] == 0x7F).all()


def test_every_number_of_the_format_and_every_tie(target, device):
    numbers = torch.tensor(MAGNITUDES)
    ties = (numbers[:-1] + numbers[1:]) / 2
    even = torch.where(torch.arange(126) % 2 == 0, numbers[:-1], numbers[1:])
    x = torch.zeros(4, 128)
    x[:, 127] = 448  # a scale of 1
    x[0, :127], x[1, :126] = numbers, ties
    x[2, :126], x[3, :126] = torch.nextafter(ties, torch.zeros(1)), torch.nextafter(ties, ties * 2)
    for sign in (1, -1):
        q, scale = quantize_fp8_rowwise((sign * x).to(device), target=target)
        assert (scale == 1).all()
        got = sign * q.float().cpu()
        assert torch.equal(got[0, :127], numbers)
        assert torch.equal(got[1, :126], even)
        assert torch.equal(got[2, :126], numbers[:-1])
        assert torch.equal(got[3, :126], numbers[1:])
        assert (q.view(torch.uint8)[:, :126] >= 128).all() == (sign < 0)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448 * 1.5, 2), (448, 1), (449, 2), (448 * 2.0**-40, 2.0**-40), (448 * 0.75, 1)]
    + [(3.0e38, 2.0**120), (448 * 2.0**-149, 2.0**-149), (448 * 3 * 2.0**-149, 2.0**-147)]
    + [(224 * 2.0**-149, 1), (225 * 2.0**-149, 2.0**-149), (2.0**-149, 1)],
)
def test_a_power_of_two_is_never_smaller(target, device, amax, scale):
    x = torch.zeros(128, 128, device=device)
    x[5, 7] = -amax
    for quantize in (quantize_fp8_rowwise, quantize_fp8_blockwise):
        q, got = quantize(x, power_of_two=True, target=target)
        assert got[5 % got.shape[0], 0] == scale
        assert q[5, 7].float() == to_e4m3(torch.tensor(-amax).double() / scale).float()


def same_bits(x, quantize, power_of_two, target):
    got = quantize(x, power_of_two=power_of_two, target=target)
    want = quantize(x.cpu(), power_of_two=power_of_two, target="reference")
    assert torch.equal(got[0].view(torch.uint8).cpu(), want[0].view(torch.uint8))
    assert torch.equal(got[1].cpu(), want[1])


@every_dtype
@both_scales
@both_kinds
def test_targets_give_the_same_bits(kernels, device, dtype, power_of_two, quantize):
    shape = (5, 128, 1024)
    wide = torch.randn(shape) * torch.exp2(
        torch.randint(-149, 127, (5, 128, 8)).float()
    ).repeat_interleave(128, 2)
    near = random(*shape, spread=3)
    near[:, ::5, ::7] = 0
    near[1] *= torch.where(torch.rand(128, 1024) < 0.5, -1.0, 1.0)
    rare = torch.where(
        torch.rand(shape) < 0.01,
        torch.tensor([NAN, INF, -INF, -0.0])[torch.randint(0, 4, shape)],
        near,
    )
    tiny = random(*shape) * 2.0**-130
    for x in (wide, near, rare, tiny):
        same_bits(x.to(dtype).to(device), quantize, power_of_two, kernels)


@every_dtype
@both_kinds
def test_views(kernels, device, dtype, quantize):
    x = random(2, 3, 2, 256, 640, dtype=dtype).to(device)
    views = [
        x[0, 0, 0],
        x[0, 0, 0, :, 128:256],
        x[0, 0, :, :128],
        x[:, :, 0],
        x[:, 1:],
        x.transpose(0, 1),
        x.permute(2, 1, 0, 3, 4)[..., 3 : 3 + 128],
        x[0, 0, :, :1].expand(2, 128, 640),
        x[0, 0, 0].view(1, 1, 256, 640),
    ]
    if quantize is quantize_fp8_rowwise:
        views += [x[0, 0, 0, 3], x[:, 0, 1, ::2], x.transpose(2, 3)]
    for view in views:
        same_bits(view, quantize, False, kernels)


@both_kinds
def test_empty(target, device, quantize):
    for shape in ((0, 128), (3, 0, 256), (2, 128, 0), (0, 2, 0, 0)):
        q, scale = quantize(torch.empty(shape, device=device), target=target)
        *lead, rows, columns = shape
        rows = rows if quantize is quantize_fp8_rowwise else rows // 128
        assert q.shape == shape
        assert scale.shape == (*lead, rows, columns // 128)


def test_messages():
    x = torch.ones(100, 256)
    with pytest.raises(
        ValueError, match=r"^quantize_fp8_blockwise: w must have N a multiple of 128"
    ):
        quantize_fp8_blockwise(x)
    with pytest.raises(
        ValueError, match=r"x must have K a multiple of 128.*got K = 200 in \(3, 200\)"
    ):
        quantize_fp8_rowwise(torch.ones(3, 200))
    with pytest.raises(ValueError, match="x must be torch.float32 or .*, got torch.int32"):
        quantize_fp8_rowwise(x.int())
    with pytest.raises(ValueError, match="last dimension of stride 1"):
        quantize_fp8_rowwise(torch.ones(256, 128).T)
    with pytest.raises(ValueError, match=r"w must be \[N, K\], got \(128,\)"):
        quantize_fp8_blockwise(torch.ones(128))
    with pytest.raises(ValueError, match=r"x must be \[K\], got \(\)"):
        quantize_fp8_rowwise(torch.tensor(1.0))
    with pytest.raises(TypeError, match="power_of_two must be a bool, got 1"):
        quantize_fp8_rowwise(x, power_of_two=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantize_fp8_rowwise: target must be one of"):
        quantize_fp8_rowwise(x, target="nowhere")
    with pytest.raises(RuntimeError, match="x requires grad"):
        quantize_fp8_rowwise(x.requires_grad_())
