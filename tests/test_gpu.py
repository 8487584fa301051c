"""On the GPU: scale, graphs, streams, devices, large tensors, compilations, no synchronisation."""

from pathlib import Path

import pytest
import tilelang
import torch
from test_compile import NAMES, equal, programs, tokens
from torch.overrides import BaseTorchFunctionMode

from tileops.moe import (
    ContiguousLayoutSpec,
    FusedMoEFwdOp,
    FusedTopKFwdOp,
    MaskedLayoutSpec,
    MoEGroupedGemmFwdOp,
    MoEPostPermuteFwdOp,
    MoEPrePermuteFwdOp,
)
from tileops.workloads.manifest import layers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_graph_replays_on_new_data(name):
    program = programs("cuda", "cuda")[name]
    x, g = tokens(37, "cuda")
    program(x, g)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = program(x, g)
    for _ in range(3):
        new_x, new_g = tokens(37, "cuda")
        x.copy_(new_x)
        g.copy_(new_g)
        graph.replay()
        equal(captured, program(new_x, new_g))


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_call_gives_what_the_whole_one_does(name):
    program = programs("cuda", "cuda")[name]
    for _ in range(4):
        x, g = tokens(37, "cuda")
        result = program(x, g)
        with BaseTorchFunctionMode():  # under which no call is repeated
            equal(result, program(x, g))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_synchronises(name):
    program, args = programs("cuda", "cuda")[name], tokens(37, "cuda")
    program(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        program(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_current_stream():
    program = programs("cuda", "cuda")["FusedMoE"]
    x, g = tokens(64, "cuda")
    want = program(x, g)
    later = torch.full_like(x, float("nan"))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the op must wait for this and for the copy behind it
        later.copy_(x)
        got = program(later, g)
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_the_tensors():
    program = programs("cuda", "cuda:1")["FusedMoE"]
    args = tokens(21, "cuda:1")
    with torch.cuda.device(0):
        got = program(*args)
    assert got.device == torch.device("cuda:1")
    with torch.cuda.device(1):
        assert torch.equal(got, program(*args))


def test_more_than_two_to_the_31_elements():
    """T * K * H past 2^31: offsets must not wrap."""
    T, K, hidden, E = 40_000, 8, 7168, 4
    layout = ContiguousLayoutSpec.tight_physical_psum()
    x = torch.randn(T, hidden, device="cuda").bfloat16()
    ids = torch.randint(0, E, (T, K), dtype=torch.int32, device="cuda")
    rows, ends, inverse = MoEPrePermuteFwdOp(layout, E)(x, ids)
    assert rows.numel() > 2**31
    last = torch.arange(T - 50, T, device="cuda")
    for k in range(K):
        assert torch.equal(rows[inverse.view(T, K)[last, k].long()], x[last])
    scores = torch.rand(T, K, device="cuda")
    out = MoEPostPermuteFwdOp(layout)(rows, scores, inverse)
    want = (x[last].float() * scores[last].sum(1, keepdim=True)).bfloat16()
    torch.testing.assert_close(out[last], want, rtol=2**-7, atol=1e-5)
    # the GEMM reads past 2^31 elements here, and writes past them below
    w = torch.randn(E, 16, hidden, device="cuda").bfloat16() / hidden**0.5
    narrow = MoEGroupedGemmFwdOp(layout)(rows, w, ends)
    tail = slice(T * K - 200, T * K)
    torch.testing.assert_close(
        narrow[tail].float(), rows[tail].float() @ w[E - 1].float().T, rtol=2**-8, atol=1e-3
    )
    w = torch.randn(E, hidden, 16, device="cuda").bfloat16()
    wide = MoEGroupedGemmFwdOp(layout)(narrow, w, ends, rows)
    torch.testing.assert_close(
        wide[tail].float(), narrow[tail].float() @ w[E - 1].float().T, rtol=2**-8, atol=1e-3
    )


TOKENS = [0, 1, 2, 5, 16, 63, 64, 65, 128, 500, 1024, 4096, 8192]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
both_dtypes = pytest.mark.parametrize("dtype", list(UNIT))


def assert_near(got, want, dtype):
    """Two results rounded to ``dtype`` once each may differ by a unit of the last place."""
    got, want = got.double(), want.double()
    assert torch.linalg.vector_norm(got - want) <= UNIT[dtype] * torch.linalg.vector_norm(want)


@both_dtypes
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_a_whole_layer_at_every_scale(num_tokens, dtype):
    layer = layers()["qwen3-30b-a3b"]
    w, x = layer.weights(dtype, "cuda"), layer.tokens(num_tokens, dtype, "cuda")
    got, want = (
        FusedMoEFwdOp(**layer.settings(), target=t)(**x, **w) for t in ("cuda", "reference")
    )
    assert got.shape == (num_tokens, layer.hidden_size)
    assert_near(got, want, dtype)


@both_dtypes
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    "layout",
    [
        ContiguousLayoutSpec.tight_physical_psum(),
        ContiguousLayoutSpec.aligned_per_row(64),
        MaskedLayoutSpec(300),
    ],
    ids=repr,
)
def test_every_stage_at_every_scale(num_tokens, dtype, layout):
    """Each op against the reference on the very same inputs, in the shape of Qwen3-30B-A3B."""
    layer = layers()["qwen3-30b-a3b"]
    w, x = layer.weights(dtype, "cuda"), layer.tokens(num_tokens, dtype, "cuda")

    def both(make, *args):
        return (make(target)(*args) for target in ("cuda", "reference"))

    got, want = both(lambda t: FusedTopKFwdOp(8, renormalize=True, target=t), x["gating_output"])
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    assert torch.equal(got[1], want[1])
    scores, ids = want
    E = layer.num_experts
    got, want = both(lambda t: MoEPrePermuteFwdOp(layout, E, target=t), x["hidden_states"], ids)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    rows, metadata, inverse = want
    owned = inverse[inverse >= 0].long()

    def gemm(activation, a, b):
        got, want = both(
            lambda t: MoEGroupedGemmFwdOp(layout, activation=activation, target=t), a, b, metadata
        )
        got, want = (c.flatten(0, -2)[owned] for c in (got, want))
        assert_near(got, want, dtype)
        full = torch.zeros((*rows.shape[:-1], got.shape[-1]), dtype=dtype, device="cuda")
        full.flatten(0, -2)[owned] = want
        return full

    down = gemm(None, gemm("silu_and_mul", rows, w["w_gate_up"]), w["w_down"])
    got, want = both(lambda t: MoEPostPermuteFwdOp(layout, target=t), down, scores, inverse)
    assert_near(got, want, dtype)


def test_no_token_count_compiles_again():
    """After one call of any size, no other in the same tile class adds a kernel to the cache."""
    cache = Path(tilelang.env.TILELANG_CACHE_DIR)
    layer = layers()["qwen3-30b-a3b"]
    w = layer.weights(torch.bfloat16, "cuda")
    op = FusedMoEFwdOp(**layer.settings())
    for first, others in ((1, range(65)), (8192, (4097, 5000, 12_345))):
        op(**layer.tokens(first, torch.bfloat16, "cuda"), **w)
        before = set(cache.rglob("*.so")) | set(cache.rglob("*.cubin"))
        assert before
        for num_tokens in others:
            op(**layer.tokens(num_tokens, torch.bfloat16, "cuda"), **w)
        assert set(cache.rglob("*.so")) | set(cache.rglob("*.cubin")) == before
