import math

import pytest
import torch

from tileops.moe import SwiGLUFwdOp

NAN, INF = math.nan, math.inf


def formula(gate, up, limit=0.0, alpha=1.0, beta=0.0):
    """The activation in float64."""
    g, u = gate.double(), up.double()
    if 0 < limit < INF:
        g = torch.where(g > limit, limit, g)
        u = torch.where(u > limit, limit, torch.where(u < -limit, -limit, u))
    return g / (1 + torch.exp(-alpha * g)) * (u + beta)


@pytest.mark.parametrize(
    "settings", [{}, {"limit": 7.0, "activation_alpha": 1.702}, {"limit": 0.5}]
)
@pytest.mark.parametrize("shape", [(5, 64), (3, 7), (2, 3, 40), (257,), (1, 1), (1000, 24)])
@pytest.mark.parametrize("fused", [False, True])
def test_shapes_and_settings(target, device, shape, fused, settings):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        halves = (3 * torch.randn(*shape[:-1], 2 * shape[-1], device=device)).to(dtype)
        gate, up = halves.chunk(2, dim=-1)
        op = SwiGLUFwdOp(**settings, activation_beta=0.25, target=target)
        got = op(halves) if fused else op(gate.contiguous(), up.contiguous())
        want = formula(
            gate, up, settings.get("limit", 0), settings.get("activation_alpha", 1), 0.25
        )
        assert got.dtype == dtype
        assert got.shape == shape
        unit = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(got.double(), want, rtol=unit, atol=1e-6)


def test_gpt_oss(target, device):
    gate = torch.tensor([-9.0, -7.5, 9.0, 3.0, 0.5], device=device)
    up = torch.tensor([2.0, 9.0, -9.0, -1.0, 0.25], device=device)
    got = SwiGLUFwdOp(7.0, 1.702, 1.0, target=target)(gate, up).cpu()
    want = torch.tensor([-6.00953e-6, -1.71546e-4, -41.999719, 0, 0.437986])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("limit", [0.0, -1.0, 2.0, INF])
def test_nan_passes_and_extremes_stay_finite(target, device, limit):
    gate = torch.tensor([NAN, 1.0, 300.0, -300.0, -60.0, 0.0, -INF, INF], device=device)
    up = torch.tensor([1.0, NAN, 2.0, 2.0, 1.0, 5.0, 1.0, 1.0], device=device)
    got = SwiGLUFwdOp(limit, target=target)(gate, up)
    assert got[:2].isnan().all()
    assert got[2:6].isfinite().all()
    want = formula(gate, up, limit)[2:6].float()
    torch.testing.assert_close(got[2:6], want, rtol=1e-5, atol=1e-24)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 4)])
def test_no_elements(target, device, shape):
    x = torch.empty(shape, device=device)
    assert SwiGLUFwdOp(target=target)(x, x).shape == shape
    assert SwiGLUFwdOp(target=target)(x).shape == (*shape[:-1], shape[-1] // 2)


def test_a_scalar_needs_both(target, device):
    one = torch.tensor(1.0, device=device)
    assert SwiGLUFwdOp(target=target)(one, one).item() == pytest.approx(0.7310586)
    with pytest.raises(ValueError, match=r"gate must have an even last dimension .* got \(\)"):
        SwiGLUFwdOp(target=target)(one)


def test_views(target, device):
    for dtype in (torch.float32, torch.bfloat16):
        store = torch.randn(20, 100, device=device).to(dtype)
        for gate, up in (
            (store[::2, 3:40], store[1::2, 50:87]),
            (store[:10, :64], store[:10, 8:72]),
            (store[:1, :32].expand(10, 32), store[:10, :32]),
        ):
            op = SwiGLUFwdOp(target=target)
            assert torch.equal(op(gate, up), op(gate.contiguous(), up.contiguous()))
        halves = store[:, 1:99]
        assert torch.equal(
            SwiGLUFwdOp(target=target)(halves), SwiGLUFwdOp(target=target)(halves.contiguous())
        )


def test_errors(target, device):
    op = SwiGLUFwdOp(target=target)
    x = torch.randn(4, 6, device=device)
    with pytest.raises(ValueError, match=r"up must be \[D0, D1\] = \[4, 6\], got \(4, 5\)"):
        op(x, x[:, :5])
    with pytest.raises(ValueError, match=r"gate must have an even last dimension"):
        op(x[:, :5])
    with pytest.raises(ValueError, match="up must be torch.float32, got torch.float16"):
        op(x, x.half())
    with pytest.raises(ValueError, match="gate must have rows of one spacing"):
        op(torch.randn(4, 5, 6, device=device)[:, :3], torch.randn(4, 3, 6, device=device))
    with pytest.raises(ValueError, match="limit must be a number, got nan"):
        SwiGLUFwdOp(NAN)
    with pytest.raises(ValueError, match="activation_alpha must be finite in float32, got inf"):
        SwiGLUFwdOp(activation_alpha=INF)
