"""Models of ONNX on the ops: attributes and inputs find their places, and others are refused."""

import doctest
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from test_onnx_moe import FORMS, onnxruntime_moe, tensors
from test_qmoe import E, T, run_onnxruntime
from test_qmoe import tensors as quantized

from tileops.integrations import onnx as integration
from tileops.moe import MoEFwdOp, MoERouterFwdOp, QMoEFwdOp, SwiGLUFwdOp

onnx = pytest.importorskip("onnx")
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
helper, Proto = onnx.helper, onnx.TensorProto
MICROSOFT = "com.microsoft"
KINDS = {torch.float32: Proto.FLOAT, torch.float16: Proto.FLOAT16, torch.bfloat16: Proto.BFLOAT16}
KINDS |= {torch.uint8: Proto.UINT8, torch.int32: Proto.INT32, torch.int64: Proto.INT64}


def model(node_type, inputs, domain=MICROSOFT, outputs=1, weights=(), **attributes):
    """A model of one node; inputs by number in ``weights`` are initializers, None is left out."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    given = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(node_type, names, results, domain=domain, **attributes)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "one",
        [info(n, KINDS[x.dtype], None) for n, x in given.items() if n not in weights],
        [info(name, KINDS.get(inputs[0].dtype), None) for name in results],
        [onnx.numpy_helper.from_array(integration.to_numpy(given[n]), n) for n in weights],
    )
    opsets = [helper.make_opsetid("", 28), helper.make_opsetid(MICROSOFT, 1)]
    feeds = {n: integration.to_numpy(x) for n, x in given.items() if n not in weights}
    return helper.make_model(graph, opset_imports=opsets), feeds


def evaluate(*args, target=None, device="cpu", **named) -> Any:
    """Run a model of one node on the ops."""
    made, feeds = model(*args, **named)
    evaluator = ReferenceEvaluator(made, new_ops=integration.reference_ops(target, device))
    results = [integration.to_torch(y, torch.device("cpu")) for y in evaluator.run(None, feeds)]
    return results[0] if len(results) == 1 else results


@pytest.mark.parametrize(("kind", "fusion", "fc3"), FORMS)
def test_moe(target, device, dtype, kind, fusion, fc3):
    parts = tensors(kind, fusion, fc3, dtype, biases=(True, False, True))
    settings = {"k": 2, "activation_type": kind, "swiglu_fusion": fusion}
    if kind == "swiglu":
        settings |= {"activation_alpha": 1.75, "activation_beta": 1.0, "swiglu_limit": 0.5}
    got = evaluate(
        "MoE", parts, target=target, device=device, normalize_routing_weights=1, **settings
    )
    parts = [None if x is None else x.to(device) for x in parts]
    want = MoEFwdOp(**settings, normalize_routing_weights=True, target=target)(*parts).cpu()
    assert got.dtype == dtype
    assert torch.equal(got, want)


def test_moe_agrees_with_onnxruntime():
    parts = tensors("swiglu", 1, False, torch.float32)[:6]
    settings = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "swiglu_limit": 0.7}
    want = onnxruntime_moe(parts, **settings)
    torch.testing.assert_close(evaluate("MoE", parts, **settings), want, rtol=1e-4, atol=1e-5)


def test_defaults_are_those_of_onnxruntime():
    parts = tensors("relu", 0, False, torch.float32)[:6]
    want = onnxruntime_moe(parts)
    torch.testing.assert_close(evaluate("MoE", parts), want, rtol=1e-4, atol=1e-5)


def test_sparse_mixer():
    parts = tensors("silu", 0, False, torch.float32)[:5]
    got = evaluate("MoE", parts, k=2, activation_type="silu", use_sparse_mixer=1)
    assert torch.equal(got, MoEFwdOp(2, "silu", use_sparse_mixer=True)(*parts))


def qmoe_inputs(args, router_weights=None):
    """The slots of the operator for the arguments of a call."""
    x, logits, w1, s1, b1, w2, s2, b2, z1, z2 = args
    return [x, logits, w1, s1, b1, w2, s2, b2, None, None, None, z1, z2, None, router_weights]


@pytest.mark.parametrize(("bits", "block", "points"), [(4, 32, True), (4, None, True), (8, 64, 0)])
def test_qmoe(target, device, dtype, bits, block, points):
    args, _ = quantized(bits, block, bool(points), 1, dtype)
    weights = torch.rand(T, E).to(dtype)
    settings = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}
    sizes = {"expert_weight_bits": bits} | ({} if block is None else {"block_size": block})
    inputs = qmoe_inputs(args, weights)
    initializers = [f"x{i}" for i in (2, 3, 5, 6)]
    where = {"target": target, "device": device}
    got = evaluate("QMoE", inputs, weights=initializers, **where, **sizes, **settings)
    args = [None if x is None else x.to(device) for x in (*args, weights)]
    want = QMoEFwdOp(**sizes, **settings, target=target)(*args).cpu()
    assert got.dtype == dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [4, 8])
def test_qmoe_agrees_with_onnxruntime(bits):
    args, _ = quantized(bits, 32, True, 1, torch.float32)
    settings = {"k": 2, "activation_type": "swiglu", "normalize_routing_weights": 1}
    want = run_onnxruntime(args, bits, 32, **settings)
    sizes = {"expert_weight_bits": bits, "block_size": 32, "swiglu_fusion": 1}
    got = evaluate("QMoE", qmoe_inputs(args), **sizes, **settings)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_attributes_of_qmoe_that_ask_for_nothing_new(bits):
    args, _ = quantized(bits, None, True, 1, torch.float32)
    settings = {"k": 2, "activation_type": "swiglu", "normalize_routing_weights": 1}
    forms = {"expert_weight_bits": bits, "swiglu_fusion": 1}
    plain = evaluate("QMoE", qmoe_inputs(args), **forms, **settings)
    settings |= {f"fc{number}_expert_weight_bits": bits for number in (1, 2, 3)}
    settings["block_size"] = 0
    got = evaluate("QMoE", qmoe_inputs(args), **forms, **settings)
    assert torch.equal(got, plain)
    want = run_onnxruntime(args, bits, None, **settings)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_swiglu(dtype):
    gate, up = torch.randn(2, 5, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    settings = {"limit": 0.5, "activation_alpha": 1.75, "activation_beta": 1.0}
    assert torch.equal(
        evaluate("SwiGLU", [gate, up], **settings), SwiGLUFwdOp(**settings)(gate, up)
    )
    assert torch.equal(evaluate("SwiGLU", [gate], **settings), SwiGLUFwdOp(**settings)(gate))
    assert torch.equal(evaluate("SwiGLU", [gate]), SwiGLUFwdOp()(gate))


def test_onnxs_own_swiglu_agrees():
    gate, up = torch.randn(5, 8), torch.randn(5, 8)
    want = evaluate("SwiGLU", [gate, up], domain="", alpha=1.5)
    got = evaluate("SwiGLU", [gate, up], activation_alpha=1.5)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_onnxs_own_swiglu_stays_the_evaluators():
    """What it runs still runs, float64 too, and what it refuses is refused."""
    new_ops = integration.reference_ops()
    made, _ = model("SwiGLU", [torch.ones(5, 8)] * 2, domain="", alpha=1.5)
    feeds = {name: np.random.randn(5, 8) for name in ("x0", "x1")}
    (want,) = ReferenceEvaluator(made).run(None, feeds)
    (got,) = ReferenceEvaluator(made, new_ops=new_ops).run(None, feeds)
    assert got.dtype == np.float64
    assert np.array_equal(got, want)
    one, feeds = model("SwiGLU", [torch.ones(5, 8)], domain="")
    with pytest.raises(TypeError):
        ReferenceEvaluator(one, new_ops=new_ops).run(None, feeds)


def test_router():
    scores, bias = torch.randn(7, 12), torch.randn(12)
    settings = {"local_expert_count": 4, "topk": 3, "local_expert_start": 2}
    settings |= {"scoring": "sigmoid", "route_scale": 2.5}
    got = evaluate("MoERouter", [scores, bias], outputs=2, **settings)
    for a, b in zip(got, MoERouterFwdOp(**settings)(scores, bias), strict=True):
        assert torch.equal(a, b)
    ids = torch.randint(0, 12, (7, 3))
    settings |= {"selection": "topk"}
    kinds = {torch.bfloat16: Proto.BFLOAT16, torch.float16: Proto.FLOAT16}
    for dtype, number in kinds.items():
        got = evaluate("MoERouter", [scores, None, ids], outputs=2, dtype=number, **settings)
        want = MoERouterFwdOp(**settings, dtype=dtype)(scores, None, ids)
        assert got[0].dtype == dtype
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_a_rank_of_experts_behind_a_router():
    """Two nodes in a model, beside one of ONNX itself."""
    text = """
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        rank (float[T, E] scores, float[T, H] x, float[L, F, H] up, float[L, H, F] down)
            => (float[T, H] y) {
            logits, scale = com.microsoft.MoERouter
                <local_expert_count = 3, local_expert_start = 2, topk = 4> (scores)
            expert = com.microsoft.MoE <k = 3, activation_type = "silu"> (x, logits, up, , down)
            y = Mul(expert, scale)
        }
    """
    scores, x = torch.randn(5, 8), torch.randn(5, 16)
    up, down = torch.randn(3, 12, 16), torch.randn(3, 16, 12)
    feeds = {"scores": scores, "x": x, "up": up, "down": down}
    evaluator = ReferenceEvaluator(
        onnx.parser.parse_model(text), new_ops=integration.reference_ops()
    )
    (got,) = evaluator.run(None, {name: value.numpy() for name, value in feeds.items()})
    logits, scale = MoERouterFwdOp(3, 4, 2)(scores)
    want = MoEFwdOp(3, "silu")(x, logits, up, None, down) * scale
    assert torch.equal(torch.from_numpy(got), want)


def test_an_attribute_may_be_a_functions():
    function = onnx.parser.parse_function("""
        <domain: "here", opset_import: ["com.microsoft": 1]>
        clamped <most> (x) => (y) { y = com.microsoft.SwiGLU <limit: float = @most> (x) }
    """)
    evaluator = ReferenceEvaluator(function, new_ops=integration.reference_ops())
    x = torch.randn(5, 8)
    for most in (0.5, 0.25):
        (got,) = evaluator.run(None, {"x": x.numpy()}, attributes={"most": most})
        assert torch.equal(torch.from_numpy(got), SwiGLUFwdOp(most)(x))


@pytest.mark.parametrize(
    ("node", "attributes", "message"),
    [
        ("MoE", {"swiglu_limit_after_activation": 1}, r"MoE of com.microsoft: .* must be 0, got 1"),
        ("MoE", {"use_sparse_mixer": 2}, "attribute use_sparse_mixer must be 0 or 1, got 2"),
        ("MoE", {"activation_type": "geglu"}, "MoEFwdOp: activation_type must be one of"),
        ("MoE", {"experts": 2}, r"attribute experts is not served; these are: \['k', "),
        ("QMoE", {"quant_type": "fp4"}, "attribute quant_type must be 'int', got 'fp4'"),
        ("QMoE", {"weights_prepacked": 1}, "attribute weights_prepacked must be 0 or -1, got 1"),
        ("QMoE", {"block_size": 16}, "QMoEFwdOp: block_size must be one of"),
        ("QMoE", {"block_size": -1}, "QMoEFwdOp: block_size must be one of"),
        (
            "QMoE",
            {"fc1_expert_weight_bits": 4, "fc2_expert_weight_bits": 8},
            "attribute fc2_expert_weight_bits must be expert_weight_bits, 4, got 8",
        ),
        (
            "QMoE",
            {"fc3_expert_weight_bits": 4, "expert_weight_bits": 8},
            "attribute fc3_expert_weight_bits must be expert_weight_bits, 8, got 4",
        ),
        ("SwiGLU", {"round_activation": 1}, "attribute round_activation must be 0, got 1"),
        ("MoERouter", {}, "MoERouter of com.microsoft: attribute local_expert_count must be given"),
        ("MoERouter", {"local_expert_count": 1, "dtype": 7}, "attribute dtype must be FLOAT, "),
    ],
)
def test_attributes_that_no_op_has(node, attributes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(node, [torch.ones(2, 4), torch.ones(2, 4)], **attributes)


@pytest.mark.parametrize(
    ("node", "name", "value", "kinds"),
    [
        ("MoE", "k", 2.0, "INT, got FLOAT 2.0"),
        ("MoE", "k", 2.75, "INT, got FLOAT 2.75"),
        ("MoE", "k", "2", "INT, got STRING 2"),
        ("MoE", "k", [2], r"INT, got list \[2\]"),
        ("MoE", "activation_type", 1, "STRING, got INT 1"),
        ("MoE", "swiglu_limit", 7, "FLOAT, got INT 7"),
        ("MoE", "activation_alpha", "1.5", "FLOAT, got STRING 1.5"),
        ("MoE", "normalize_routing_weights", 1.0, "INT, got FLOAT 1.0"),
        ("MoE", "swiglu_limit_after_activation", 0.0, "INT, got FLOAT 0.0"),
        ("QMoE", "expert_weight_bits", 4.0, "INT, got FLOAT 4.0"),
        ("QMoE", "fc1_expert_weight_bits", 4.0, "INT, got FLOAT 4.0"),
        ("QMoE", "block_size", 0.0, "INT, got FLOAT 0.0"),
        ("QMoE", "quant_type", 0, "STRING, got INT 0"),
        ("QMoE", "weights_prepacked", -1.0, "INT, got FLOAT -1.0"),
        ("QMoE", "accuracy_level", "4", "INT, got STRING 4"),
        ("SwiGLU", "limit", 7, "FLOAT, got INT 7"),
        ("SwiGLU", "round_activation", 0.0, "INT, got FLOAT 0.0"),
        ("MoERouter", "dtype", 10.0, "INT, got FLOAT 10.0"),
        ("MoERouter", "local_expert_count", 2.0, "INT, got FLOAT 2.0"),
    ],
)
def test_attributes_of_another_kind_are_not_converted(node, name, value, kinds):
    message = f"{node} of com.microsoft: attribute {name} must be of kind {kinds}"
    with pytest.raises(ValueError, match=message):
        evaluate(node, [torch.ones(2, 4), torch.ones(2, 4)], **{name: value})


@pytest.mark.parametrize("value", [7, True, "7"])
def test_a_functions_attribute_is_not_converted_either(value):
    function = onnx.parser.parse_function("""
        <domain: "here", opset_import: ["com.microsoft": 1]>
        clamped <most> (x) => (y) { y = com.microsoft.SwiGLU <limit: float = @most> (x) }
    """)
    evaluator = ReferenceEvaluator(function, new_ops=integration.reference_ops())
    with pytest.raises(ValueError, match=f"attribute limit must be of kind FLOAT, got .* {value}"):
        evaluator.run(None, {"x": np.ones((2, 4), np.float32)}, attributes={"most": value})


def test_inputs_that_no_op_has():
    args, _ = quantized(4, 32, True, 1, torch.float32)
    inputs = qmoe_inputs(args)
    inputs[8] = args[2]
    settings = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "block_size": 32}
    with pytest.raises(ValueError, match="QMoE of com.microsoft: input 8 is not served"):
        evaluate("QMoE", inputs, **settings)
    with pytest.raises(ValueError, match="SwiGLU of com.microsoft: takes 2 inputs, got 3"):
        evaluate("SwiGLU", [torch.ones(2, 4)] * 3)
    with pytest.raises(ValueError, match="an array must be of one of .*, got float64"):
        integration.to_torch(np.ones(3), torch.device("cpu"))


REQUIRED = {
    "MoE": {0: "input", 1: "router_probs", 2: "fc1_experts_weights", 4: "fc2_experts_weights"},
    "QMoE": {0: "input", 1: "router_probs", 2: "fc1_experts_weights", 3: "fc1_scales"}
    | {5: "fc2_experts_weights", 6: "fc2_scales"},
    "SwiGLU": {0: "gate"},
    "MoERouter": {0: "scores"},
}


@pytest.mark.parametrize(
    ("node", "number"), [(node, number) for node, names in REQUIRED.items() for number in names]
)
def test_an_input_that_is_missing_is_named(node, number):
    """Left empty with others behind it, and left off the end."""
    message = rf"{node} of com.microsoft: input {number} \({REQUIRED[node][number]}\) must be given"
    attributes = {"local_expert_count": 2} if node == "MoERouter" else {}
    outputs = 2 if node == "MoERouter" else 1
    inputs: list[Any] = [torch.ones(2, 4)] * {"MoE": 5, "QMoE": 7, "SwiGLU": 2}.get(node, 3)
    made, feeds = model(node, inputs, outputs=outputs, **attributes)
    made.graph.node[0].input[number] = ""
    short, _ = model(node, inputs, outputs=outputs, **attributes)
    del short.graph.node[0].input[number:]
    for broken in (made, short):
        evaluator = ReferenceEvaluator(broken, new_ops=integration.reference_ops())
        with pytest.raises(ValueError, match=message):
            evaluator.run(None, feeds)


def test_arrays_become_tensors_without_a_copy():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert integration.to_torch(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert integration.to_torch(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    assert integration.to_torch(array[:, ::-1], torch.device("cpu")).tolist() == [
        [2, 1, 0],
        [5, 4, 3],
    ]
    half = torch.randn(3).bfloat16()
    assert integration.to_numpy(half).ctypes.data == half.data_ptr()


@pytest.mark.parametrize("shape", [(0,), (0, 8), (0, 3, 8), (2, 0, 8)])
def test_empty_arrays_become_contiguous_tensors(dtype, shape):
    array = integration.to_numpy(torch.empty(shape, dtype=dtype))
    got = integration.to_torch(array, torch.device("cpu"))
    assert got.dtype == dtype
    assert got.shape == shape
    assert got.stride() == torch.empty(shape).stride()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_rows(target, device, shape):
    where = {"target": target, "device": device}
    kinds = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}
    dtype = torch.float16
    parts = tensors("swiglu", 1, False, dtype)[:6]
    args = qmoe_inputs(quantized(4, 32, True, 1, dtype)[0])
    for node, inputs, more in (("MoE", parts, {}), ("QMoE", args, {"block_size": 32})):
        x, logits = inputs[:2]
        inputs[:2] = x.new_empty(*shape, x.shape[-1]), logits[:0]
        got = evaluate(node, inputs, **where, **kinds, **more)
        assert (got.dtype, got.shape) == (dtype, inputs[0].shape)
    gate = torch.empty(*shape, 16, dtype=dtype)
    assert evaluate("SwiGLU", [gate, gate], **where).shape == (*shape, 16)
    assert evaluate("SwiGLU", [gate], **where).shape == (*shape, 8)
    probs, scale = evaluate(
        "MoERouter", [torch.empty(0, 12)], outputs=2, local_expert_count=4, topk=3, **where
    )
    assert (probs.shape, scale.shape) == ((0, 4), (0, 1))


def test_the_target_must_exist():
    with pytest.raises(ValueError, match="reference_ops: target must be one of .* got 'abacus'"):
        integration.reference_ops("abacus")


def test_its_example_runs():
    results = doctest.testmod(integration)
    assert results.attempted
    assert not results.failed


WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = None
from tileops.integrations import onnx
try:
    onnx.reference_ops()
except ImportError as error:
    print(error)
"""


def test_without_the_package_an_error_says_what_to_install():
    run = subprocess.run([sys.executable, "-c", WITHOUT_ONNX], capture_output=True, text=True)
    assert "pip install 'tileops[onnx]'" in run.stdout, run.stderr
