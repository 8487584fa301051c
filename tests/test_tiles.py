"""The list of row tiles, and more jobs a thread block than it is told of at a time, on the GPU."""

import pytest
import torch
from test_gpu import assert_near
from test_grouped_gemm import ends_of, tight_rows
from test_grouped_gemm_fp8 import check, operands

from tileops.kernels.cuda.grouped_gemm_tiles import COUNT, MOST_TOGETHER, grouped_gemm_tiles
from tileops.kernels.cuda.place_routes import place_tiles
from tileops.layouts import ContiguousLayoutSpec
from tileops.moe import (
    FusedMoEExpertsFwdOp,
    MaskedLayoutSpec,
    MoEGroupedGemmFP8FwdOp,
    MoEGroupedGemmFwdOp,
)

pytestmark = pytest.mark.gpu

COUNTS = {
    "none": (0, 0, 0),
    "few": (1, 0, 7, 8, 9, 160),
    "just too many for a tile": (161, 0, 321),
    "one crowded expert": (3, 160 * MOST_TOGETHER, 5),
    "more than go together": (160 * MOST_TOGETHER + 1, 40, 160 * 50),
    "many experts": (200,) * 1500,
}


def listed(counts, block_m, even):
    """Return the lines that the list should have."""
    lines, start = [], 0
    for expert, count in enumerate(counts):
        number = -(-count // block_m)
        height = 8 * -(-count // (8 * number)) if number and even else block_m
        number = -(-count // height)
        together = -(-number // -(-number // MOST_TOGETHER)) if number else 1
        first_line = len(lines) + 1
        for i in range(number):
            group = i // together * together
            end = min(start + (i + 1) * height, start + count)
            size = min(together, number - group)
            lines.append([expert, start + i * height, end, first_line + group, size])
        start += count
    return lines


def assert_all_jobs(lines, column_blocks):
    """Find all jobs as `sm90.jobs` does: every line with every block of columns, once."""
    jobs = set()
    for job in range(len(lines) * column_blocks):
        group, size = lines[job // column_blocks][3:]
        within = job - (group - 1) * column_blocks
        jobs.add((group + within % size, within // size))
    every = range(1, len(lines) + 1)
    assert jobs == {(line, block) for line in every for block in range(column_blocks)}


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_a_list_has_every_row_once_and_the_tiles_of_an_expert_together(counts, even):
    block_m = 160
    experts = torch.arange(len(counts), dtype=torch.int32, device="cuda")
    ids = experts.repeat_interleave(torch.tensor(counts, device="cuda"))
    ids = ids[torch.randperm(len(ids), device="cuda")]
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    layout = ContiguousLayoutSpec.tight_physical_psum()
    from_ends = grouped_gemm_tiles(ends, layout, len(ids), len(counts), block_m, even)
    from_ids = place_tiles(ids[:, None], len(counts), block_m, even)[2]
    lines = listed(counts, block_m, even)
    assert_all_jobs(lines, 3)
    for tiles in (from_ends, from_ids):
        assert tiles[0].tolist() == [len(lines), 0, 0, 0, 2**31 - 1, 0]
        assert tiles[1 : len(lines) + 1, :5].tolist() == lines


def test_a_list_that_is_too_long_ends_between_jobs():
    labels = torch.arange(3200, dtype=torch.int32, device="cuda") % 4  # every expert's rows: all
    layout = ContiguousLayoutSpec.tight_per_row()
    tiles = grouped_gemm_tiles(labels, layout, 3200, 4, 160)
    count = int(tiles[0, COUNT])
    assert count == (3200 + 4 * 159) // 160 < 80
    for column_blocks in (1, 5):
        assert_all_jobs(tiles[1 : count + 1, :5].tolist(), column_blocks)


# A job of so few columns is loaded at once, so that blocks are several jobs ahead.
def test_many_short_jobs_in_slabs():
    experts, rows, width, depth = 8, 4000, 4096, 64
    a = torch.randn(experts, rows, depth, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(experts, width, depth, dtype=torch.bfloat16, device="cuda")
    counts = torch.tensor([rows, 0, 1, 3999, 160, 161, 2000, 3000], device="cuda")
    out = torch.full((experts, rows, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    op = MoEGroupedGemmFwdOp(layout=MaskedLayoutSpec(max_m=rows), target="cuda")
    op(a, b, counts.int(), out=out)
    for expert, count in enumerate(counts.tolist()):
        want = a[expert, :count].float() @ b[expert].float().T
        torch.testing.assert_close(out[expert, :count].float(), want, rtol=2**-8, atol=1e-3)


# Up to 32 rows an expert, stages of weights are loaded in pairs: of an odd number, the last alone.
@pytest.mark.parametrize(
    ("tokens", "num_experts", "hidden", "ffn"),
    [
        (100_000, 8, 64, 64),
        (100_000, 300, 64, 64),
        (700, 100, 64, 320),
        (700, 100, 192, 64),
        (700, 100, 712, 128),
        (700, 100, 128, 8),
    ],
)
def test_many_short_jobs_of_two_products(tokens, num_experts, hidden, ffn):
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    up = torch.randn(num_experts, 2 * ffn, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.randn(num_experts, hidden, ffn, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(tokens, num_experts, device="cuda").topk(4).indices.int()
    ids[:150, 0] = 7  # more rows than one tile has
    weights = torch.rand(tokens, 4, device="cuda")
    args = x, up / hidden**0.5, down / ffn**0.5, weights, ids
    out, want = torch.full_like(x, float("nan")), torch.empty_like(x)
    FusedMoEExpertsFwdOp(target="cuda")(out, *args)
    FusedMoEExpertsFwdOp(target="reference")(want, *args)
    assert_near(out, want, torch.bfloat16)
    # no row is off: an activated row and a row of down are rounded before, up to 4 of them a token
    torch.testing.assert_close(out, want, rtol=2**-7, atol=4 * 2**-8)


def check_rows(layout, metadata, counts, width, depth):
    """Compare each result of a product with float64: float32 sums of size 1, rounded once."""
    a = torch.randn(sum(counts), depth, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(len(counts), width, depth, dtype=torch.bfloat16, device="cuda") / depth**0.5
    out = torch.full((len(a), width), float("nan"), dtype=torch.bfloat16, device="cuda")
    MoEGroupedGemmFwdOp(layout=layout, target="cuda")(a, b, metadata, out=out)
    for expert, rows in tight_rows(counts):
        want = a[rows].double() @ b[expert].double().T
        torch.testing.assert_close(out[rows].double(), want, rtol=2**-8, atol=2**-12)


FEW_ROWS = (1, 0, 64, 65, 200, 8, 31, *[3] * 25)


@pytest.mark.parametrize("depth", [8, 64, 72, 128, 192, 256, 320, 384, 712])
def test_few_rows_of_any_depth(depth):
    layout = ContiguousLayoutSpec.tight_physical_psum()
    check_rows(layout, ends_of(FEW_ROWS, "cuda"), FEW_ROWS, 264, depth)


def test_many_short_jobs_of_few_rows():
    counts = torch.randint(0, 50, (3000,), device="cuda")
    labels = torch.arange(3000, dtype=torch.int32, device="cuda").repeat_interleave(counts)
    check_rows(ContiguousLayoutSpec.tight_per_row(), labels, counts.tolist(), 512, 64)


@pytest.mark.parametrize("depth", [128, 256, 384, 640, 896])
def test_few_rows_of_any_depth_in_fp8(depth):
    args = operands((sum(FEW_ROWS),), len(FEW_ROWS), 384, depth, "cuda")
    op = MoEGroupedGemmFP8FwdOp(ContiguousLayoutSpec.tight_physical_psum(), target="cuda")
    check(op, *args, ends_of(FEW_ROWS, "cuda"), tight_rows(FEW_ROWS))


def test_many_short_jobs_in_fp8():
    experts, rows = 8, 4000
    args = operands((experts, rows), experts, 4096, 128, "cuda")
    counts = [rows, 0, 1, 3999, 64, 65, 2000, 3000]
    op = MoEGroupedGemmFP8FwdOp(MaskedLayoutSpec(rows), target="cuda")
    metadata = torch.tensor(counts, dtype=torch.int32, device="cuda")
    check(op, *args, metadata, [(e, (e, slice(0, c))) for e, c in enumerate(counts)])
