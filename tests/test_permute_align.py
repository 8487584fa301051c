import pytest
import torch

from tileops.moe import MoEPermuteAlignFwdOp


def check(target, device, ids, num_experts, block, poison=None):
    """Compare with the definition, one expert at a time; the lengths and fillers exactly."""
    routes = ids.numel()
    slots = routes + (num_experts + 1) * (block - 1)
    if poison:
        poison(4 * slots, 4 * -(-slots // block), 4)
    op = MoEPermuteAlignFwdOp(num_experts, block, target=target)
    sorted_ids, experts, count = op(ids.int().to(device))
    want_ids, want_experts = [], []
    for e in range(num_experts):
        mine = [r for r, v in enumerate(ids.flatten().tolist()) if v == e]
        mine += [routes] * (-len(mine) % block)
        want_ids += mine
        want_experts += [e] * (len(mine) // block)
    assert all(x.dtype == torch.int32 for x in (sorted_ids, experts, count))
    assert sorted_ids.shape == (slots,)
    assert experts.shape == (-(-slots // block),)
    assert count.tolist() == [len(want_ids)]
    assert sorted_ids.tolist() == want_ids + [routes] * (slots - len(want_ids))
    assert experts[: len(want_experts)].tolist() == want_experts
    assert (
        (experts[len(want_experts) :] < 0) | (experts[len(want_experts) :] >= num_experts)
    ).all()


@pytest.mark.parametrize("block", [1, 4, 16, 64, 100])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (37, 3), (257, 2), (600, 8)])
def test_token_counts_and_blocks(target, device, num_tokens, top_k, block, poison):
    check(target, device, torch.randint(0, 12, (num_tokens, top_k)), 12, block, poison)


@pytest.mark.parametrize("num_experts", [1, 5, 31, 33, 63, 65, 255, 257, 1023, 1024, 1025, 1500])
def test_any_number_of_experts(target, device, num_experts, poison):
    ids = torch.randint(0, num_experts, (40, 4))
    ids[-1, -1] = num_experts - 1
    check(target, device, ids, num_experts, 16, poison)


@pytest.mark.parametrize("ids", [[[-1, 2], [3, -1], [-1, -1]], [[4, 2**31 - 1], [0, -(2**31)]]])
def test_ids_outside_the_range_stand_nowhere(target, device, ids, poison):
    check(target, device, torch.tensor(ids), 4, 4, poison)


def test_hot_and_empty_experts(target, device, poison):
    check(target, device, torch.full((50, 1), 5), 16, 64, poison)
    check(target, device, torch.tensor([[7]]), 384, 64, poison)


@pytest.mark.parametrize("routes", [65_535, 65_536, 70_000])
def test_many_routes(target, device, routes, poison):
    check(target, device, torch.randint(0, 160, (routes, 1)), 160, 128, poison)


def test_same_call_same_bits(target, device):
    ids = torch.randint(0, 256, (3000, 8), dtype=torch.int32, device=device)
    op = MoEPermuteAlignFwdOp(256, target=target)
    first = op(ids)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(op(ids), first, strict=True))


def test_ids_may_be_a_view(target, device):
    ids = torch.randint(0, 9, (30, 12), dtype=torch.int32, device=device)[::2, 3:7]
    op = MoEPermuteAlignFwdOp(9, 16, target=target)
    assert all(torch.equal(a, b) for a, b in zip(op(ids), op(ids.contiguous()), strict=True))


def test_errors():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        MoEPermuteAlignFwdOp(4, 0)
    with pytest.raises(ValueError, match=r"topk_ids must be torch.int32, got torch.int64; use"):
        MoEPermuteAlignFwdOp(4)(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"topk_ids must be \[T, K\], got \(4,\)"):
        MoEPermuteAlignFwdOp(4)(torch.zeros(4, dtype=torch.int32))
