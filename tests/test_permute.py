import pytest
import torch

from tileops.kernels.cuda import post_permute
from tileops.moe import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MoEPostPermuteFwdOp,
    MoEPrePermuteFwdOp,
    RoutingEpilogueSpec,
)

LAYOUTS = [
    ContiguousLayoutSpec.tight_physical_psum(),
    ContiguousLayoutSpec.aligned_physical_psum(16),
    ContiguousLayoutSpec.tight_per_row(),
    ContiguousLayoutSpec.aligned_per_row(5),
    MaskedLayoutSpec(7),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)


def place(layout, ids, num_experts):
    """Where every route goes and what the metadata says, one route at a time."""
    flat = ids.flatten().tolist()
    routes = [[r for r, e in enumerate(flat) if e == expert] for expert in range(num_experts)]
    inverse = [-1] * len(flat)
    if isinstance(layout, MaskedLayoutSpec):
        for e, mine in enumerate(routes):
            for i, r in enumerate(mine[: layout.max_m]):
                inverse[r] = e * layout.max_m + i
        return num_experts * layout.max_m, [min(len(m), layout.max_m) for m in routes], inverse
    rows = len(flat) + num_experts * (layout.alignment - 1)
    rows += -rows % layout.alignment
    ends, owners, start = [], [], 0
    for e, mine in enumerate(routes):
        for i, r in enumerate(mine):
            inverse[r] = start + i
        padded = len(mine) + -len(mine) % layout.alignment
        start += padded
        ends.append(start)
        owners += [e] * padded
    owners += [num_experts] * (rows - len(owners))
    return rows, ends if layout.metadata == "physical_psum" else owners, inverse


def check(target, device, layout, ids, num_experts, hidden=8, dtype=torch.bfloat16, poison=None):
    tokens = torch.randn(ids.shape[0], hidden).to(dtype)
    op = MoEPrePermuteFwdOp(layout, num_experts, target=target)
    num_rows, metadata, inverse = place(layout, ids, num_experts)
    if poison:
        poison(num_rows * hidden * tokens.element_size(), 4 * len(metadata), 4 * len(inverse))
    rows, got_metadata, got_inverse = op(tokens.to(device), ids.int().to(device))
    assert got_metadata.dtype == got_inverse.dtype == torch.int32
    assert rows.dtype == dtype
    assert got_inverse.tolist() == inverse
    assert got_metadata.tolist() == metadata
    want = torch.zeros(num_rows, hidden, dtype=dtype)
    for r, row in enumerate(inverse):
        if row >= 0:
            want[row] = tokens[r // ids.shape[1]]
    lead = (num_experts, layout.max_m) if isinstance(layout, MaskedLayoutSpec) else (num_rows,)
    assert rows.shape == (*lead, hidden)
    assert torch.equal(rows.cpu().view(num_rows, hidden), want)


@every_layout
def test_dtypes(target, device, dtype, layout, poison):
    check(target, device, layout, torch.randint(0, 6, (37, 3)), 6, 24, dtype, poison)


@every_layout
@pytest.mark.parametrize("num_experts", [1, 31, 33, 63, 65, 160, 255, 257, 1023, 1024, 1025, 1500])
def test_any_number_of_experts(target, device, layout, num_experts, poison):
    ids = torch.randint(0, num_experts, (50, 2))
    ids[-1, -1] = num_experts - 1
    check(target, device, layout, ids, num_experts, poison=poison)


@every_layout
@pytest.mark.parametrize(
    "ids",
    [
        [[-1, 2], [3, -1], [-1, -1]],
        [[4, 2], [3, 5], [2**31 - 1, -(2**31)]],
        [[-1, -1], [4, 9], [-1, 4]],
    ],
)
def test_ids_outside_the_range_are_dropped(target, device, layout, ids, poison):
    check(target, device, layout, torch.tensor(ids), 4, poison=poison)


@every_layout
def test_one_expert_takes_all_and_others_stay_empty(target, device, layout, poison):
    check(target, device, layout, torch.full((40, 2), 5), 16, poison=poison)
    check(target, device, layout, torch.tensor([[383]]), 384, poison=poison)
    check(target, device, layout, torch.zeros(3, 1, dtype=torch.int), 1, poison=poison)


@every_layout
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (255, 1), (257, 2), (3, 64)])
def test_token_counts(target, device, layout, num_tokens, top_k, poison):
    check(target, device, layout, torch.randint(0, 9, (num_tokens, top_k)), 9, poison=poison)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], MaskedLayoutSpec(9000)], ids=repr)
@pytest.mark.parametrize("routes", [65_535, 65_536, 70_000])
def test_more_routes_than_a_grid_axis(target, device, layout, routes, poison):
    check(target, device, layout, torch.randint(0, 8, (routes, 1)), 8, poison=poison)


@every_layout
def test_views(target, device, layout):
    storage = torch.randn(60, 64, device=device)
    ids = torch.randint(0, 5, (30, 12), dtype=torch.int32, device=device)
    op = MoEPrePermuteFwdOp(layout, 5, target=target)
    tokens, few = storage[::2, 8:40], ids[:, 2:6]
    for got, want in zip(op(tokens, few), op(tokens.contiguous(), few.contiguous()), strict=True):
        assert torch.equal(got, want)
    one = storage[:1].expand(30, 64)
    assert torch.equal(op(one, few)[0], op(one.contiguous(), few)[0])


@every_layout
def test_same_call_same_bits(target, device, layout):
    ids = torch.randint(0, 160, (600, 8), dtype=torch.int32, device=device)
    tokens = torch.randn(600, 16, device=device)
    op = MoEPrePermuteFwdOp(layout, 160, target=target)
    first = op(tokens, ids)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(op(tokens, ids), first, strict=True))


@every_layout
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_combine(target, device, dtype, layout, out_dtype, assert_accurate):
    T, K, E, H = 29, 4, 6, 40
    ids = torch.randint(-1, E + 1, (T, K))
    num_rows, _, inverse = place(layout, ids, E)
    rows = torch.full((num_rows, H), float("nan")).to(dtype)
    used = [r for r in inverse if r >= 0]
    rows[used] = torch.randn(len(used), H).to(dtype)
    weights = torch.rand(T, K)
    lead = (E, layout.max_m, H) if isinstance(layout, MaskedLayoutSpec) else (num_rows, H)
    op = MoEPostPermuteFwdOp(layout, RoutingEpilogueSpec(2.5), out_dtype, target=target)
    got = op(
        rows.view(lead).to(device),
        weights.to(device),
        torch.tensor(inverse, dtype=torch.int32, device=device),
    )
    assert got.dtype == (out_dtype or dtype)
    exact = torch.zeros(T, H, dtype=torch.float64)
    plain = torch.zeros(T, H)
    for r, row in enumerate(inverse):
        if row >= 0:
            exact[r // K] += 2.5 * weights[r // K, r % K].double() * rows[row].double()
            plain[r // K] += 2.5 * weights[r // K, r % K] * rows[row].float()
    assert_accurate(got.cpu(), exact, plain.to(got.dtype))


def test_weights_are_indexed_by_token_and_slot(target, device):
    rows = torch.arange(6.0, device=device)[:, None].expand(6, 8).contiguous()
    weights = torch.tensor([2.0**-i for i in range(6)], device=device).view(3, 2)
    inverse = torch.arange(6, dtype=torch.int32, device=device)
    out = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)(rows, weights, inverse)
    assert out[:, 0].tolist() == [0.5, 2 / 4 + 3 / 8, 4 / 16 + 5 / 32]


def test_combine_adds_in_float32(target, device):
    T, K, H = 64, 8, 1024
    rows = torch.randn(T * K, H, device=device).bfloat16()
    weights = torch.rand(T, K, device=device)
    weights /= weights.sum(1, keepdim=True)
    inverse = torch.arange(T * K, dtype=torch.int32, device=device)
    out = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)(rows, weights, inverse)
    exact = (rows.double().view(T, K, H) * weights.double()[..., None]).sum(1)
    # half a unit in the last place, plus the float32 sum's own error
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()


def test_combine_is_the_same_in_any_batch(target, device):
    T, K, H = 33, 8, 64
    rows = torch.randn(T * K, H, device=device).bfloat16()
    weights = torch.rand(T, K, device=device)
    inverse = torch.randperm(T * K, dtype=torch.int32, device=device)
    op = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)
    whole = op(rows, weights, inverse)
    for _ in range(20):
        assert torch.equal(op(rows, weights, inverse), whole)
    for t in (0, 17, 32):
        assert torch.equal(
            op(rows, weights[t : t + 1], inverse[t * K : t * K + K]), whole[t : t + 1]
        )


@pytest.mark.parametrize("skip", [1, 4])
@pytest.mark.parametrize("H", [32, 1048, 4104])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 6, 8, 12, 16])
def test_combine_views_and_out(target, device, K, H, skip):
    T = 12
    storage = torch.randn(2 * T * K, 2 * H, device=device)
    rows = storage[::2, 16 : 16 + H]
    weights = torch.rand(T, 2 * K + skip, device=device)[:, skip : skip + K]
    inverse = torch.empty(skip + T * K, dtype=torch.int32, device=device)[skip:]
    inverse.copy_(torch.randperm(T * K, device=device))
    op = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)
    want = op(rows.contiguous(), weights.contiguous(), inverse)
    terms = rows[inverse].double().unflatten(0, (T, K)) * weights.double()[..., None]
    # a rounding of each product and of each sum
    bound = (K + 1) * 2.0**-24 * terms.abs().sum(1)
    assert ((want.double() - terms.sum(1)).abs() <= bound).all()
    buffer = torch.full((T, 3 * H), 7.0, device=device)
    out = buffer[:, H : 2 * H]
    assert op(rows, weights, inverse, out) is out
    assert torch.equal(out, want)
    assert (buffer[:, :H] == 7).all()
    assert (buffer[:, 2 * H :] == 7).all()


def test_combine_of_slabs_that_lie_apart(target, device):
    T, K, E, M, H = 9, 4, 5, 8, 16
    storage = torch.full((E, M + 3, H), float("nan"), device=device)
    rows = storage[:, :M]
    rows.copy_(torch.randn(E, M, H, device=device))
    weights = torch.rand(T, K, device=device)
    inverse = torch.randperm(E * M, dtype=torch.int32, device=device)[: T * K]
    inverse[5] = -1
    op = MoEPostPermuteFwdOp(MaskedLayoutSpec(M), target=target)
    out = op(rows, weights, inverse)
    assert not out.isnan().any()
    assert torch.equal(out, op(rows.contiguous(), weights, inverse))


def test_slabs_are_refused_where_an_int32_does_not_count_their_steps():
    def slabs(*strides, shape=(4, 6, 64)):
        return torch.empty_strided(shape, (*strides, 1), dtype=torch.bfloat16, device="meta")

    assert post_permute.too_far(slabs(6 * 64, 64)) is None
    assert post_permute.too_far(slabs(2**40, 64 * 2**20)) is None
    assert post_permute.too_far(slabs(2**40, 0)) is None
    assert post_permute.too_far(slabs(0, 0)) is None
    assert post_permute.too_far(slabs(2**60, 64, shape=(1, 6, 64))) is None
    reason = post_permute.too_far(slabs(2**40 + 8, 64))
    assert reason
    assert "steps of 8 elements apart, got strides (1099511627784, 64, 1)" in reason


def test_combine_of_no_tokens_and_of_dropped_routes(target, device):
    op = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert op(torch.randn(4, 8, device=device), torch.rand(0, 2, device=device), none).shape == (
        0,
        8,
    )
    rows = torch.full((2, 8), float("nan"), device=device)
    out = torch.full((2, 8), 7.0, device=device)
    dropped = torch.full((4,), -1, dtype=torch.int32, device=device)
    op(rows, torch.rand(2, 2, device=device), dropped, out)
    assert out.tolist() == [[0.0] * 8] * 2


def test_out_must_not_overlap(target, device):
    op = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)
    buffer = torch.randn(8, 16, device=device)
    weights = torch.rand(4, 2, device=device)
    inverse = torch.arange(8, dtype=torch.int32, device=device)
    before = buffer.clone()
    with pytest.raises(ValueError, match="out must not overlap expert_output"):
        op(buffer, weights, inverse, buffer[2:6])
    assert torch.equal(buffer, before)
    # the columns of one matrix interleave without touching
    out = op(buffer[:, :8], weights, inverse, buffer[:4, 8:])
    assert torch.equal(out, op(before[:, :8].contiguous(), weights, inverse))


def test_errors(target, device):
    op = MoEPrePermuteFwdOp(LAYOUTS[0], 4, target=target)
    tokens = torch.randn(3, 8, device=device)
    ids = torch.zeros(3, 2, dtype=torch.int64, device=device)
    with pytest.raises(
        ValueError,
        match=r"local_expert_ids must be torch.int32, got torch.int64; use .*.int\(\)",
    ):
        op(tokens, ids)
    with pytest.raises(ValueError, match=r"local_expert_ids must be torch.int32, got torch.uint8"):
        op(tokens, ids.to(torch.uint8))
    with pytest.raises(
        ValueError, match=r"local_expert_ids must be \[T, K\] = \[3, K\], got \(2, 2\)"
    ):
        op(tokens, ids[:2].int())
    post = MoEPostPermuteFwdOp(LAYOUTS[0], target=target)
    with pytest.raises(ValueError, match=r"inverse_indices must be \[T\*K\] = \[6\], got \(5,\)"):
        post(
            tokens,
            torch.rand(3, 2, device=device),
            torch.zeros(5, dtype=torch.int32, device=device),
        )
    with pytest.raises(
        TypeError, match="layout must be a ContiguousLayoutSpec or a MaskedLayoutSpec"
    ):
        MoEPrePermuteFwdOp("tight", 4)
    with pytest.raises(ValueError, match="num_local_experts must be at least 1, got 0"):
        MoEPrePermuteFwdOp(LAYOUTS[0], 0)
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        MoEPostPermuteFwdOp(LAYOUTS[0], out_dtype=torch.int32)


@every_layout
def test_rows_without_columns(target, device, layout):
    ids = torch.zeros(3, 2, dtype=torch.int32, device=device)
    rows, _, inverse = MoEPrePermuteFwdOp(layout, 2, target=target)(
        torch.ones(3, 0, device=device), ids
    )
    out = MoEPostPermuteFwdOp(layout, target=target)(rows, torch.ones(3, 2, device=device), inverse)
    assert out.shape == (3, 0)
