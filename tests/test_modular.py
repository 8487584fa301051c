from typing import Any

import pytest
import torch
from test_fused_moe import experts_case

from tileops.moe import (
    FusedMoEExpertsFwdOp,
    FusedMoEExpertsModular,
    FusedMoEFwdOp,
    FusedMoEPrepareAndFinalize,
    FusedMoESharedExpertFwdOp,
    FusedTopKFwdOp,
    PrepareResult,
    WeightedReduce,
    WeightedReduceNoOp,
)
from tileops.moe.modular import PrepareAndFinalizeNoOp


class RouteRows(FusedMoEExpertsModular):
    """Experts that leave a row a route, unweighted, for someone else to reduce."""

    activation = "silu_and_mul"

    def output_shape(self, num_tokens, hidden_size, top_k):
        return (num_tokens, top_k, hidden_size)

    def forward(
        self,
        output,
        hidden_states,
        w_gate_up,
        w_down,
        topk_weights,
        topk_ids,
        b_gate_up=None,
        b_down=None,
    ):
        assert output.shape == (*topk_ids.shape, hidden_states.shape[1])
        for k in range(topk_ids.shape[1]):
            e = topk_ids[:, k].long()
            gate, up = torch.einsum("th,tfh->tf", hidden_states, w_gate_up[e]).chunk(2, -1)
            act = torch.nn.functional.silu(gate) * up
            output[:, k] = torch.einsum("tf,thf->th", act, w_down[e])
        return output

    def make_weighted_reduce(self):
        return RouteReduce()


class RouteReduce(WeightedReduce):
    def apply(self, output, expert_output, topk_weights, topk_ids):
        return torch.sum(expert_output * topk_weights[..., None], 1, out=output)


class Doubled(FusedMoEPrepareAndFinalize):
    """Sends every token twice, with half its weights each: the token count changes."""

    def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
        self.num_experts = num_experts
        twice = hidden_states.repeat(2, 1), topk_weights.repeat(2, 1) / 2, topk_ids.repeat(2, 1)
        return PrepareResult(*twice)

    def finalize(self, output, expert_output, topk_weights, topk_ids, weighted_reduce):
        reduced = output.new_empty(topk_ids.shape[0], output.shape[1])
        weighted_reduce.apply(reduced, expert_output, topk_weights, topk_ids)
        torch.add(*reduced.chunk(2), out=output)


class Shard(FusedMoEPrepareAndFinalize):
    """One rank of expert parallelism: global ids become local ones, foreign ones are dropped."""

    def __init__(self, first):
        self.first = first

    def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
        return PrepareResult(hidden_states, topk_weights, topk_ids - self.first)

    def finalize(self, output, expert_output, topk_weights, topk_ids, weighted_reduce):
        weighted_reduce.apply(output, expert_output, topk_weights, topk_ids)


@pytest.fixture
def layer():
    x, wg, wd, _, _, _, _ = experts_case("cpu", torch.float32, T=12, E=6, K=3)
    logits = torch.linspace(-2, 2, 6)[torch.rand(12, 6).argsort(-1)]
    return x, logits, wg, wd


SETTINGS = {
    "top_k": 3,
    "scoring_func": "sigmoid",
    "renormalize": True,
    "routed_scaling_factor": 2.5,
}


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["cpu", "reference"])
@pytest.mark.parametrize("experts", [None, RouteRows()])
@pytest.mark.parametrize("movement", [None, PrepareAndFinalizeNoOp(), Doubled()])
def test_parts_of_the_users_make_the_same_layer(layer, where, experts, movement):
    want = FusedMoEFwdOp(**SETTINGS, target="reference")(*layer)
    parts = {"prepare_finalize": movement, "experts": experts}
    close(FusedMoEFwdOp(**SETTINGS, **parts, target=where)(*layer), want)
    shared, routed = FusedMoESharedExpertFwdOp(**SETTINGS, **parts, target=where)(
        *layer, shared_w_gate_up=torch.ones(8, 72), shared_w_down=torch.ones(72, 4)
    )
    close(routed, want)
    assert shared.shape == want.shape
    if isinstance(movement, Doubled):
        assert movement.num_experts == 6


def test_ranks_with_local_weights_add_up(layer):
    x, logits, wg, wd = layer
    want = FusedMoEFwdOp(**SETTINGS, target="reference")(*layer)
    total = torch.zeros_like(want)
    for first in (0, 2, 4):
        op = FusedMoEFwdOp(**SETTINGS, prepare_finalize=Shard(first), target="cpu")
        total += op(x, logits, wg[first : first + 2], wd[first : first + 2])
    close(total, want)


def test_prepare_gets_scaled_weights(layer):
    seen = []

    class Look(PrepareAndFinalizeNoOp):
        def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
            seen.append((topk_weights, topk_ids))
            return super().prepare(hidden_states, topk_weights, topk_ids, num_experts)

    FusedMoEFwdOp(**SETTINGS, prepare_finalize=Look(), target="reference")(*layer)
    topk = FusedTopKFwdOp(3, "sigmoid", True, routed_scaling_factor=2.5, target="reference")
    for got, want in zip(seen[0], topk(layer[1]), strict=True):
        assert torch.equal(got, want)


def test_biases_reach_the_experts(layer):
    x, wg, wd, weights, ids, bg, bd = experts_case("cpu", torch.float32, T=12, E=6, K=3)
    logits = layer[1]
    want = FusedMoEFwdOp(**SETTINGS, target="reference")(x, logits, wg, wd, None, bg, bd)
    op = FusedMoEFwdOp(**SETTINGS, prepare_finalize=PrepareAndFinalizeNoOp(), target="reference")
    close(op(x, logits, wg, wd, None, bg, bd), want)


def test_no_op_reduce_copies_only_between_buffers():
    a, b = torch.randn(3, 4), torch.empty(3, 4)
    reduce = WeightedReduceNoOp()
    nothing = torch.empty(3, 1), torch.empty(3, 1, dtype=torch.int32)
    assert reduce.apply(b, a, *nothing) is b
    assert torch.equal(a, b)
    version = a._version
    assert reduce.apply(a, a, *nothing) is a
    assert a._version == version


def test_the_in_tree_experts_are_modular():
    op = FusedMoEExpertsFwdOp(activation="gelu_and_mul")
    assert isinstance(op, FusedMoEExpertsModular)
    assert op.activation == "gelu_and_mul"
    assert op.output_shape(5, 16, 2) == (5, 16)
    assert isinstance(op.make_weighted_reduce(), WeightedReduceNoOp)


def test_quantised_tokens_need_experts_that_take_them(layer):
    class Quantised(PrepareAndFinalizeNoOp):
        def prepare(self, hidden_states, topk_weights, topk_ids, num_experts):
            return PrepareResult(hidden_states, topk_weights, topk_ids, scale=torch.ones(1))

    op = FusedMoEFwdOp(**SETTINGS, prepare_finalize=Quantised(), target="reference")
    with pytest.raises(ValueError, match="prepare_finalize must return tokens without a scale"):
        op(*layer)
    FusedMoEFwdOp(**SETTINGS, prepare_finalize=Quantised(), experts=RouteRows())(*layer)


@pytest.mark.parametrize("name", ["prepare_finalize", "experts"])
def test_wrong_parts(name):
    with pytest.raises(TypeError, match=f"FusedMoEFwdOp: {name} must be a FusedMoE"):
        FusedMoEFwdOp(2, **{name: object()})


@pytest.mark.parametrize(
    "kind", [FusedMoEPrepareAndFinalize, FusedMoEExpertsModular, WeightedReduce]
)
def test_the_interfaces_are_abstract(kind):
    with pytest.raises(TypeError, match="abstract"):
        kind()


def test_prepare_must_return_a_result(layer):
    class Tuple(PrepareAndFinalizeNoOp):
        def prepare(self, hidden_states, topk_weights, topk_ids, num_experts) -> Any:
            return hidden_states, topk_weights, topk_ids

    op = FusedMoEFwdOp(**SETTINGS, prepare_finalize=Tuple(), target="reference")
    with pytest.raises(TypeError, match="prepare must return a PrepareResult, got tuple"):
        op(*layer)


@pytest.mark.parametrize(
    "parts",
    [
        {"prepare_finalize": Shard(0)},
        {"experts": RouteRows()},
        {"prepare_finalize": Shard(0), "experts": RouteRows()},
    ],
    ids=lambda parts: "+".join(parts),
)
def test_traceable_parts_make_a_traceable_layer(layer, parts):
    torch._dynamo.reset()
    op = FusedMoEFwdOp(**SETTINGS, **parts, target="cpu")
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    close(compiled(*layer), op(*layer))
    x, logits, *weights = layer
    close(compiled(x[:7], logits[:7], *weights), op(x[:7], logits[:7], *weights))
