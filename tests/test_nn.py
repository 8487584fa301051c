"""The modules: against blocks of Transformers, as modules go, and under torch's transforms."""

import copy
import io
import pickle

import hf_models
import pytest
import torch

from tileops.integrations.transformers import convert_transposed_experts, register
from tileops.moe import FusedMoEFwdOp
from tileops.nn import MoE, MoESharedExpert

H, F, E, K, S = 32, 24, 8, 3, 40
SHARED = ("deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_next")


def kind_of(family):
    return MoESharedExpert if family in SHARED else MoE


def block_of(family, dtype=torch.float32, device="cpu", convert=True):
    """The MoE block of a small random model, with the config that it was made from."""
    pytest.importorskip("transformers")
    model = hf_models.model(family, dtype, device)
    model.set_experts_implementation("eager")
    if convert:
        convert_transposed_experts(model)
    return model.model.layers[1].mlp


def clear_tokens(block, count=9):
    """Tokens whose selected logits lie apart from the rest, so that no rounding selects others."""
    router = block.gate if hasattr(block, "gate") else block.router
    x = torch.randn(200, H).to(router.weight)
    logits = x.double() @ router.weight.double().T
    if getattr(router, "bias", None) is not None:
        logits += router.bias.double()
    best = logits.sort(descending=True).values
    chosen = x[best[:, K - 1] - best[:, K] > 0.1][:count]
    assert len(chosen) == count
    return chosen


def output(block, x):
    out = block(x[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.parametrize("family", list(hf_models.FAMILIES))
@torch.no_grad()
def test_same_as_the_block(kernels, device, family, dtype, assert_accurate):
    block = block_of(family, dtype, device)
    module = kind_of(family).from_hf(block, copy=True)
    x = clear_tokens(block)
    exact = output(copy.deepcopy(block).double(), x.double())
    assert_accurate(output(module, x), exact, output(block, x))


@pytest.mark.parametrize("family", list(hf_models.FAMILIES))
def test_config_gives_the_shapes_of_the_block(family):
    config = pytest.importorskip("transformers") and hf_models.config(family)
    made = kind_of(family).from_config(config, device="meta", dtype=torch.bfloat16)
    taken = kind_of(family).from_hf(block_of(family), copy=True)
    shapes = [{n: w.shape for n, w in m.state_dict().items()} for m in (made, taken)]
    assert shapes[0] == shapes[1]
    assert repr(made) == repr(taken)
    assert made.w_down.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_memory_is_shared_where_layouts_agree(family):
    block = block_of(family)
    module = MoE.from_hf(block)
    mine = {w.untyped_storage().data_ptr() for w in module.state_dict().values()}
    theirs = {w.untyped_storage().data_ptr() for w in block.state_dict().values()}
    assert mine == theirs
    assert all(w.requires_grad for w in block.parameters()), "the block was changed"
    assert not any(w.requires_grad for w in module.parameters())


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_next", "shared_w_gate_up"),
        ("glm4_moe", "shared_w_gate_up"),
        ("gpt_oss", "w_gate_up, w_down"),
    ],
)
def test_nothing_is_copied_unasked(family, names):
    block = block_of(family, convert=False)
    with pytest.raises(ValueError, match=f"copy must be True.* layout of {names} is another"):
        kind_of(family).from_hf(block)


def test_what_is_copied_is_shared_no_more():
    block = block_of("qwen3_next")
    module = MoESharedExpert.from_hf(block, copy=True)
    joined = torch.cat([block.shared_expert.gate_proj.weight, block.shared_expert.up_proj.weight])
    assert torch.equal(module.shared_w_gate_up, joined)
    assert module.w_down.data_ptr() == block.experts.down_proj.data_ptr()
    assert module.shared_w_down.data_ptr() == block.shared_expert.down_proj.weight.data_ptr()


def test_a_router_in_half_precision_becomes_float32():
    block = block_of("deepseek_v3", torch.bfloat16)
    with pytest.raises(ValueError, match="router.weight.*correction_bias"):
        MoESharedExpert.from_hf(block)
    module = MoESharedExpert.from_hf(block, copy=True)
    assert module.router.weight.dtype == module.correction_bias.dtype == torch.float32
    assert torch.equal(module.correction_bias, block.gate.e_score_correction_bias.float())


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
@torch.no_grad()
def test_a_block_is_replaced_in_its_model(family):
    pytest.importorskip("transformers")
    model = hf_models.model(family)
    tokens = hf_models.prompts(count=2)
    want = model(tokens).logits
    for layer in model.model.layers:
        layer.mlp = kind_of(family).from_hf(layer.mlp, copy=True)
    torch.testing.assert_close(model(tokens).logits, want)


def test_a_registered_model_keeps_what_replaced_blocks_lose(tmp_path):
    transformers = pytest.importorskip("transformers")
    register()
    model = hf_models.model("qwen3_moe")
    model.set_experts_implementation("tileops")
    with torch.no_grad():
        assert len(model(hf_models.prompts(), output_router_logits=True).router_logits) == 2
    model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert not load(tmp_path, output_loading_info=True)[1]["missing_keys"]


def test_only_a_block_of_gpt_oss_makes_a_pair():
    module = MoE.from_hf(block_of("gpt_oss"))
    out, scores = pickle.loads(pickle.dumps(module))(torch.randn(2, 5, H))
    assert out.shape == (2, 5, H)
    assert scores is None
    built = MoE.from_config(hf_models.config("gpt_oss"))
    assert built(torch.randn(2, 5, H)).shape == (2, 5, H)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("gpt_oss", "experts.alpha", 1.5),
        ("gpt_oss", "experts.limit", 6.0),
        ("gpt_oss", "router.top_k", 2),
        ("qwen3_moe", "gate.top_k", 2),
        ("qwen3_moe", "gate.norm_topk_prob", False),
        ("mixtral", "experts.act_fn", torch.nn.GELU()),
        ("qwen3_next", "shared_expert.act_fn", torch.nn.ReLU()),
        ("deepseek_v3", "gate.routed_scaling_factor", 1.0),
        ("glm4_moe", "gate.num_group", 2),
        ("glm4_moe", "gate.topk_group", 1),
    ],
)
def test_a_block_that_computes_something_else_than_its_config_is_refused(family, name, value):
    block = block_of(family)
    part, attribute = name.split(".")
    setattr(getattr(block, part), attribute, value)
    with pytest.raises(ValueError, match=f"{attribute} of .* must be .* as its config says"):
        kind_of(family).from_hf(block, copy=True)


def test_a_dense_layer_is_refused():
    dense = hf_models.model("deepseek_v3", first_k_dense_replace=1).model.layers[0].mlp
    with pytest.raises(ValueError, match="block must have experts.*got DeepseekV3MLP without"):
        MoESharedExpert.from_hf(dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_experts_of_another_dtype_are_refused(dtype):
    block = block_of("mixtral").to(dtype)
    with pytest.raises(ValueError, match=rf"block\.experts must be .* got {dtype}; .*docs/fp8\.md"):
        MoE.from_hf(block)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@torch.no_grad()
def test_no_shared_experts_are_a_plain_layer():
    pytest.importorskip("transformers")
    block = hf_models.model("deepseek_v3", n_shared_experts=0).model.layers[1].mlp
    x = clear_tokens(block)
    torch.testing.assert_close(MoE.from_hf(block)(x), output(block, x))
    with pytest.raises(ValueError, match=r"use tileops\.nn\.MoE$"):
        MoESharedExpert.from_hf(block)


def test_blocks_of_the_other_kind_are_refused():
    with pytest.raises(ValueError, match="use tileops.nn.MoESharedExpert"):
        MoE.from_hf(block_of("qwen3_next"))
    with pytest.raises(ValueError, match=r"use tileops\.nn\.MoE$"):
        MoESharedExpert.from_hf(block_of("mixtral"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu_new"}, "hidden_act of the config must be one of"),
        ("qwen3_next", {"hidden_act": "gelu"}, "must be silu, which the shared expert has"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit of the config must be"),
        ("mixtral", {"model_type": "no_moe"}, "model_type of the config must be one of"),
    ],
)
def test_configs_that_the_op_cannot_serve_are_refused(family, changes, message):
    config = pytest.importorskip("transformers") and hf_models.config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        kind_of(family).from_config(config)


def test_a_block_with_other_weights_is_refused():
    block = block_of("mixtral")
    block.shared_expert = block_of("qwen3_next").shared_expert
    with pytest.raises(ValueError, match="differs in shared_w_down, shared_w_gate_up"):
        MoE.from_hf(block)


def routed(**changes):
    settings = {"router_bias": True, "expert_bias": True, "renormalize": True}
    return MoE(H, F, E, K, **settings | changes)


def grouped(**changes):
    settings = {"scoring_func": "sigmoid", "num_expert_group": 4, "topk_group": 2}
    settings |= {"correction_bias": True, "router_dtype": torch.float32, "shared_gate": True}
    return MoESharedExpert(H, F, E, K, S, **settings | changes)


MAKERS = [routed, grouped]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 0, 3), (2, 1, 3)])
def test_any_leading_shape(target, device, make, lead):
    module = make(device=device, dtype=torch.bfloat16, target=target)
    x = torch.randn(*lead, H, device=device).bfloat16()
    out = module(x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert torch.equal(out.reshape(-1, H), module(x.reshape(-1, H)))


def test_tokens_apart_in_memory():
    module = routed()
    x = torch.randn(3, 2, 2 * H)[..., :H].transpose(0, 1)
    assert torch.equal(module(x), module(x.contiguous()))


@pytest.mark.parametrize("expert_bias", [False, True])
def test_it_is_the_op_on_its_weights(expert_bias):
    module = routed(expert_bias=expert_bias)
    x = torch.randn(5, H)
    logits = x @ module.router.weight.T + module.router.bias
    weights = module.w_gate_up, module.w_down, None, module.b_gate_up, module.b_down
    want = FusedMoEFwdOp(K, renormalize=True)(x, logits, *weights)
    torch.testing.assert_close(module(x), want)
    assert (module.b_down is not None) is expert_bias


@pytest.mark.parametrize("shared_gate", [False, True])
def test_shared_expert_in_plain_torch(shared_gate):
    module = grouped(shared_gate=shared_gate)
    x = torch.randn(5, H)
    gate, up = (x @ module.shared_w_gate_up.T).chunk(2, -1)
    shared = (torch.nn.functional.silu(gate) * up) @ module.shared_w_down.T
    if shared_gate:
        shared = shared * torch.sigmoid(x @ module.shared_gate.weight.T)
    logits = module.router(x)
    op = FusedMoEFwdOp(K, "sigmoid", num_expert_group=4, topk_group=2)
    alone = op(x, logits, module.w_gate_up, module.w_down, module.correction_bias)
    torch.testing.assert_close(module(x), alone + shared)


@pytest.mark.parametrize("make", MAKERS)
def test_state_dict_round_trip(make):
    module, other, x = make(), make(), torch.randn(4, H)
    assert not torch.equal(module(x), other(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(x), other(x))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(module(x), twin(x))


def test_names_of_the_state():
    assert list(routed().state_dict()) == [
        *("w_gate_up", "w_down", "b_gate_up", "b_down", "router.weight", "router.bias")
    ]
    assert list(grouped().state_dict()) == [
        *("w_gate_up", "w_down", "shared_w_gate_up", "shared_w_down", "correction_bias"),
        *("router.weight", "shared_gate.weight"),
    ]


def test_what_must_be_float32_stays_so():
    module = grouped()
    module.correction_bias.normal_()
    bias, router = module.correction_bias.clone(), module.router.weight.clone()
    module.to(torch.bfloat16).half().bfloat16()
    assert torch.equal(module.correction_bias, bias)
    assert torch.equal(module.router.weight, router)
    assert module.w_down.dtype == module.shared_gate.weight.dtype == torch.bfloat16
    module(torch.randn(3, H).bfloat16())
    moved = module.to("meta")
    assert {w.device.type for w in moved.state_dict().values()} == {"meta"}
    assert moved.correction_bias.dtype == torch.float32


def test_a_float32_router_is_no_part_of_autocast(target, device):
    module = grouped(device=device, target=target, dtype=torch.bfloat16)
    x = torch.randn(2, 3, H, device=device).bfloat16()
    want = module.router(x)
    compiled = torch.compile(module.router, fullgraph=True, backend="eager")
    with torch.autocast(device, dtype=torch.bfloat16):
        for logits in (module.router(x), compiled(x)):
            assert logits.dtype == torch.float32
            assert torch.equal(logits, want)
        assert module(x).dtype == x.dtype


def test_a_router_of_the_modules_dtype():
    module = routed().to(torch.bfloat16)
    assert module.router.weight.dtype == torch.bfloat16
    module(torch.randn(3, H).bfloat16())


@pytest.mark.parametrize("make", MAKERS)
def test_weights_are_drawn_after_the_device_is_known(make):
    torch.manual_seed(1)
    want = make()
    made = make(device="meta").to_empty(device="cpu")
    for weight in made.state_dict().values():
        weight.fill_(float("nan"))
    made.reset_parameters()
    for name, weight in made.state_dict().items():
        assert weight.isfinite().all(), name
        if weight.numel() > 64:  # enough for their spread to tell
            other = want.state_dict()[name]
            torch.testing.assert_close(weight.std(), other.std(), rtol=0.2, atol=0)


def test_repr():
    text = repr(routed())
    assert text.startswith("MoE(\n  hidden_size=32, ffn_size=24, num_experts=8, op=FusedMoEFwdOp(")
    assert "top_k=3" in text
    assert "(router): Linear(in_features=32, out_features=8, bias=True)" in text
    assert "shared_size=40, hidden_size=32" in repr(grouped())


@pytest.mark.parametrize("make", MAKERS)
def test_export(kernels, device, make):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.RMSNorm(H)
            self.moe = make(target=kernels)

        def forward(self, x):
            return x + self.moe(self.norm(x))

    model = Model().to(device, torch.bfloat16).requires_grad_(False)
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}
    x = torch.randn(2, 3, H, device=device).bfloat16()
    program = torch.export.export(model, (x,), dynamic_shapes=(sizes,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(4, 5, H, device=device).bfloat16()
    assert torch.equal(torch.export.load(file).module()(x), model(x))


@pytest.mark.parametrize("make", MAKERS)
def test_compile(kernels, device, make):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    module = make(target=kernels, device=device, dtype=torch.bfloat16)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for lead in ((2, 3), (4, 7), (3, 2)):
        x = torch.randn(*lead, H, device=device).bfloat16()
        assert torch.equal(compiled(x), module(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("make", MAKERS)
def test_inference_mode(make):
    module, x = make(), torch.randn(3, H)
    with torch.inference_mode():
        inferred = module(x)
    assert torch.equal(inferred, module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_captures_in_a_graph(make):
    module = make(device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 3, H, device="cuda").bfloat16()
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module(x)
    x.copy_(torch.randn(2, 3, H))
    graph.replay()
    assert torch.equal(captured, module(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MoE(H, F, E, E + 1), ValueError, "MoE: top_k must be at most 8"),
        (lambda: MoE(0, F, E, K), ValueError, "MoE: hidden_size must be at least 1, got 0"),
        (lambda: MoE(H, 2.0, E, K), TypeError, "MoE: ffn_size must be an int"),
        (lambda: MoE(H, F, E, K, expert_bias=1), TypeError, "MoE: expert_bias must be a bool"),
        (lambda: MoE(H, F, E, K, correction_bias=True), ValueError, "sigmoid scores only"),
        (lambda: MoE(H, F, E, K, dtype=torch.float64), ValueError, "MoE: dtype must be one of"),
        (lambda: MoE(H, F, E, K, target="none"), ValueError, "none"),
        (lambda: MoE(H, F, E, K, num_expert_group=3), ValueError, "must divide E = 8, got 3"),
        (
            lambda: MoE(H, F, E, K, router_dtype=torch.float16),
            ValueError,
            "MoE: router_dtype must be one of",
        ),
        (
            lambda: MoESharedExpert(H, F, E, K, 0),
            ValueError,
            "MoESharedExpert: shared_size must be at least 1",
        ),
        (
            lambda: routed()(torch.ones(3, H + 1)),
            ValueError,
            r"MoE: hidden_states must be \[..., H\] = \[..., 32\], got \(3, 33\)",
        ),
        (
            lambda: grouped()(torch.ones(3, H).bfloat16()),
            ValueError,
            r"MoESharedExpert: hidden_states must be torch.float32, as the weights, got",
        ),
        (
            lambda: routed()(torch.ones(3, H, requires_grad=True)),
            RuntimeError,
            r"hidden_states requires grad.*torch\.no_grad\(\)",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()
