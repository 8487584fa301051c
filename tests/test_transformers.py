"""Models of Transformers whose experts run on FusedMoEExpertsFwdOp."""

import copy
import types

import hf_models
import pytest
import torch

from tileops.integrations import transformers as integration
from tileops.integrations.transformers import convert_transposed_experts, register
from tileops.moe import FusedMoEExpertsFwdOp

pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")
FAMILIES = list(hf_models.FAMILIES)
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


def float64_experts(module, hidden_states, top_k_index, top_k_weights):
    """Every expert in float64 on the inputs as they are, rounded once."""
    wide = copy.copy(module)
    wide._parameters = {name: weight.double() for name, weight in module._parameters.items()}
    forward = type(module).forward.__wrapped__
    out = forward(wide, hidden_states.double(), top_k_index, top_k_weights.double())
    return out.to(hidden_states.dtype)


@pytest.fixture(autouse=True)
def implementations(monkeypatch):
    """Both implementations of this file, for the time of a test."""
    mapping = moe.ALL_EXPERTS_FUNCTIONS._global_mapping
    monkeypatch.setattr(moe.ExpertsInterface, "_global_mapping", dict(mapping))
    register()
    moe.ALL_EXPERTS_FUNCTIONS.register("float64", float64_experts)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def made(family, *args, **kwargs):
    model = hf_models.model(family, *args, **kwargs)
    convert_transposed_experts(model)
    return model


def results(model, call):
    found = {}
    for name in ("float64", "eager", "tileops"):
        model.set_experts_implementation(name)
        found[name] = call()
    return found


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model_dtype(request, device):
    if device == "cuda" and request.param == torch.float32:
        pytest.skip("the cuda kernels take bfloat16 and float16")
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(kernels, device, family, model_dtype, assert_accurate):
    # in bfloat16 another rounding in the first layer may select other experts in the second
    changes = {} if model_dtype == torch.float32 else ONE_LAYER
    model = made(family, model_dtype, device, **changes)
    tokens = hf_models.prompts(device)
    logits = results(model, lambda: model(tokens, use_cache=False).logits)
    assert_accurate(logits["tileops"], logits["float64"], logits["eager"])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(kernels, device, family, model_dtype):
    model = made(family, model_dtype, device)
    tokens = hf_models.prompts(device)
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    settings["return_dict_in_generate"] = True
    found = results(model, lambda: model.generate(tokens, **settings))
    want, got = found["eager"], found["tileops"]
    for row in range(len(tokens)):
        for step, logits in enumerate(want.logits):
            a, b = (x.sequences[row, tokens.shape[1] + step] for x in (want, got))
            if a != b:
                gap = (logits[row, a] - logits[row, b]) / logits[row].abs().max()
                assert gap <= (1e-5 if model_dtype == torch.float32 else 2**-5), (row, step)
                break  # what follows another token is another text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_op_runs_once_for_each_layer(kernels, device, family, monkeypatch):
    calls = []
    forward = FusedMoEExpertsFwdOp.forward

    def counted(self, *args, **kwargs):
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(FusedMoEExpertsFwdOp, "forward", counted)
    model = made(family, torch.bfloat16, device)
    model.set_experts_implementation("tileops")
    model(hf_models.prompts(device))
    assert len(calls) == 2
    assert len(set(map(id, calls))) == 1, "each layer made an op of its own"


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_compiled_model(kernels, device, family):
    torch._dynamo.reset()
    model = made(family, torch.bfloat16, device, **ONE_LAYER)
    model.set_experts_implementation("tileops")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (7, 9):
        tokens = hf_models.prompts(device, length=length)
        torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("activation", ["gelu", "gelu_python", "swish"])
def test_other_activations(activation, assert_accurate):
    model = made("qwen3_moe", hidden_act=activation)
    tokens = hf_models.prompts()
    logits = results(model, lambda: model(tokens).logits)
    assert_accurate(logits["tileops"], logits["float64"], logits["eager"])


def routes(model, num_tokens=5, dtype=torch.float32):
    experts = hf_models.experts_of(model)[0]
    model.set_experts_implementation("tileops")
    ids = torch.rand(num_tokens, experts.num_experts).topk(3).indices
    hidden = torch.randn(num_tokens, hf_models.SHAPE["hidden_size"], dtype=dtype)
    return experts, hidden, ids, torch.rand(num_tokens, 3, dtype=dtype)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_routes_of_any_dtype(weights_dtype, ids_dtype):
    experts, hidden, ids, weights = routes(made("qwen3_moe"))
    weights = weights.to(weights_dtype)
    got = experts(hidden, ids.to(ids_dtype), weights)
    want = type(experts).forward.__wrapped__(experts, hidden, ids, weights.float())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("nowhere", [8, 9, -1])
def test_routes_to_experts_of_other_ranks_add_nothing(nowhere):
    experts, hidden, ids, weights = routes(made("gpt_oss"))
    ids[1:3, 0] = nowhere
    ids[4] = nowhere
    weights[4] = float("nan")
    got = experts(hidden, ids, weights)
    masked = weights.where(ids != nowhere, 0)
    want = experts(hidden, ids.where(ids != nowhere, 0), masked)
    torch.testing.assert_close(got, want)
    assert got[4].eq(0).all()


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_new_model_of_the_interface(is_transposed, has_bias):
    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = 8, torch.nn.GELU()
            w_gate_up, w_down = torch.randn(8, 48, 32) / 32**0.5, torch.randn(8, 32, 24) / 24**0.5
            if is_transposed:
                w_gate_up, w_down = (w.transpose(1, 2).contiguous() for w in (w_gate_up, w_down))
            self.gate_up_proj = torch.nn.Parameter(w_gate_up)
            self.down_proj = torch.nn.Parameter(w_down)
            self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(8, 48))
            self.down_proj_bias = torch.nn.Parameter(torch.randn(8, 32))

        def forward(self, *args):
            raise AssertionError("no implementation was chosen")

    moe.use_experts_implementation(Experts, is_transposed=is_transposed, has_bias=has_bias)
    config = types.SimpleNamespace(_experts_implementation="batched_mm")
    experts = Experts(config).eval()
    ids = torch.rand(5, 8).topk(3).indices
    args = torch.randn(5, 32), ids, torch.rand(5, 3)
    want = experts(*args)
    config._experts_implementation = "tileops"
    assert convert_transposed_experts(experts) == (2 if is_transposed else 0)
    torch.testing.assert_close(experts(*args), want)


def test_no_tokens():
    experts, hidden, ids, weights = routes(made("mixtral"), num_tokens=0)
    assert experts(hidden, ids, weights).shape == (0, hf_models.SHAPE["hidden_size"])


def test_hidden_states_that_are_a_view():
    experts, hidden, ids, weights = routes(made("mixtral"))
    wide = torch.randn(5, 2 * hidden.shape[1])[:, : hidden.shape[1]].copy_(hidden)
    assert torch.equal(experts(wide, ids, weights), experts(hidden, ids, weights))


def test_transposed_weights_are_refused_in_words():
    model = hf_models.model("gpt_oss")
    model.set_experts_implementation("tileops")
    with pytest.raises(ValueError, match=r"GptOssExperts.*convert_transposed_experts\(model\)"):
        model(hf_models.prompts())


def test_conversion_changes_the_order_in_memory_only():
    model = hf_models.model("gpt_oss")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = hf_models.prompts()
    eager = model(tokens).logits
    assert convert_transposed_experts(model) == 4
    assert convert_transposed_experts(model) == 0
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    torch.testing.assert_close(model(tokens).logits, eager)
    for where in ("meta", torch.bfloat16):
        moved = copy.deepcopy(model).to(where)
        assert convert_transposed_experts(moved) == 0, "moving the model undid the conversion"


def test_a_converted_model_is_saved_and_loaded(tmp_path):
    from transformers import AutoModelForCausalLM

    model = made("gpt_oss")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="tileops")
    assert convert_transposed_experts(loaded) == 4
    model.set_experts_implementation("tileops")
    tokens = hf_models.prompts()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_conversion_leaves_other_models_alone():
    model = hf_models.model("qwen3_moe")
    pointers = [weight.data_ptr() for weight in model.parameters()]
    assert convert_transposed_experts(model) == 0
    assert pointers == [weight.data_ptr() for weight in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_capture_in_a_graph_and_never_wait(family):
    experts, *args = routes(made(family, torch.bfloat16), dtype=torch.bfloat16)
    experts.to("cuda")
    args = [x.to("cuda") for x in args]
    want = experts(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(*args)
    graph.replay()
    assert torch.equal(captured, want)


def refused(model, message, error=ValueError):
    model.set_experts_implementation("tileops")
    with pytest.raises(error, match=message):
        model(hf_models.prompts())


def test_training_is_refused_in_words():
    refused(made("qwen3_moe").train(), r"Qwen3MoeExperts.*model\.eval\(\)", RuntimeError)


def test_gradients_are_refused_in_words():
    with torch.enable_grad():
        refused(made("qwen3_moe"), r"requires grad.*torch\.no_grad\(\)", RuntimeError)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu"])
def test_activations_that_the_op_lacks_are_refused_in_words(activation):
    model = made("mixtral", hidden_act=activation)
    refused(model, "MixtralExperts must have silu.*set_experts_implementation")


@pytest.mark.parametrize("changes", [{"alpha": 1.5}, {"limit": 6.0}])
def test_other_numbers_in_the_gate_of_gpt_oss_are_refused(changes):
    model = made("gpt_oss")
    for experts in hf_models.experts_of(model):
        vars(experts).update(changes)
    refused(model, "got alpha .* and limit")


def test_a_gate_of_the_models_own_is_refused(monkeypatch):
    model = made("mixtral")
    kind = type(hf_models.experts_of(model)[0])
    monkeypatch.setattr(kind, "_apply_gate", lambda self, x: x.chunk(2, -1)[0])
    refused(model, "got a gate of its own")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"has_gate": False}, "a gate, got none"), ({"has_post_expert_norm": True}, "no norm")],
)
def test_experts_of_another_form_are_refused(changes, message):
    model = made("mixtral")
    for experts in hf_models.experts_of(model):
        vars(experts).update(changes)
    refused(model, message)


def test_two_dtypes_in_a_model_are_refused():
    model = made("mixtral")
    for experts in hf_models.experts_of(model):
        experts.to(torch.bfloat16)
    refused(model, r"w_gate_up must be torch\.float32, got torch\.bfloat16")


@pytest.mark.parametrize("name", ["grouped_mm", "eager"])
def test_names_of_transformers_are_taken(name):
    with pytest.raises(ValueError, match="no other implementation has"):
        register(name)


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (None, TypeError), (3, TypeError)])
def test_names_that_are_none_are_refused(name, error):
    with pytest.raises(error, match=f"name must be a str that is not empty, got {name!r}"):
        register(name)


@pytest.mark.parametrize("found", [None, "4.57.6", "5.7.1"])
def test_transformers_that_cannot_do_it_is_named(found, monkeypatch):
    def version(package):
        if found is None:
            raise integration.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(integration, "version", version)
    with pytest.raises(ImportError, match=rf"5\.8 or later, got {found or 'none'}"):
        register()


def test_register_takes_a_name_and_a_target():
    register("plain", target="reference")
    register("plain", target="reference")
    model = made("qwen3_moe")
    tokens = hf_models.prompts()
    model.set_experts_implementation("plain")
    plain = model(tokens).logits
    model.set_experts_implementation("tileops")
    torch.testing.assert_close(model(tokens).logits, plain)
    with pytest.raises(ValueError, match="no_such_target"):
        register(target="no_such_target")
