"""Calls that repeat launch what the whole call would, and anything new about a call is noticed."""

import copy
import functools
import gc
import pickle
import sys
import weakref
from typing import Any

import pytest
import tilelang
import torch

from tileops import compilation, repeat, targets
from tileops.kernels import cuda
from tileops.moe import (
    FusedMoEExpertsFwdOp,
    FusedMoEFP8FwdOp,
    FusedMoEFwdOp,
    FusedTopKFwdOp,
)
from tileops.moe.modular import PrepareAndFinalizeNoOp
from tileops.repetition import Repetition
from tileops.workloads import verify, warmup
from tileops.workloads.manifest import load_all
from tileops.workloads.problems import PROBLEMS

E, K, H, F = 16, 2, 128, 256


class Kernel:
    """Writes down its launches."""

    def __init__(self, launches, name, built):
        self.torch_function = lambda *args: launches.append((name, built, args))

    def __call__(self, *args):
        self.torch_function(*args)


@pytest.fixture
def launches(monkeypatch):
    """The launches of the CUDA target, which here takes tensors on the CPU and runs nothing."""
    found = []

    def jit(**options):
        return lambda function: lambda *args: Kernel(found, function.__name__, args)

    monkeypatch.setattr(tilelang, "jit", jit)
    for module in [m for name, m in sys.modules.items() if name.startswith(cuda.__name__)]:
        for name, value in list(vars(module).items()):
            if name == "wrong_device":
                monkeypatch.setattr(module, name, lambda x: None)
            elif name.startswith("build") and hasattr(value, "__wrapped__"):
                builder = compilation.jit(value.__wrapped__, why_not=lambda: None)
                monkeypatch.setattr(module, name, builder)
    return found


def described(launches, inputs):
    """What was launched, with tensors as the place in the storage that they view."""
    storages = [x.untyped_storage().data_ptr() for x in inputs if x is not None]
    found = []
    for name, built, args in launches:
        line = [name, built]
        for x in args:
            if isinstance(x, torch.Tensor):
                start = x.untyped_storage().data_ptr()
                if start not in storages:
                    storages.append(start)
                where = storages.index(start), x.storage_offset()
                x = where, x.shape, x.stride(), x.dtype
            line.append(x)
        found.append(line)
    return found


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def layer_inputs(tokens, biased=False):
    biases = (None, bf16(E, 2 * F), bf16(E, H)) if biased else ()
    return bf16(tokens, H), bf16(tokens, E), bf16(E, 2 * F, H), bf16(E, H, F), *biases


def expert_inputs(tokens):
    x, _, *weights = layer_inputs(tokens)
    ids = torch.zeros(tokens, K, dtype=torch.int32)
    return bf16(tokens, H), x, *weights, torch.empty(tokens, K), ids


def fp8_inputs(tokens):
    x, g, up, down = layer_inputs(tokens)
    scales = torch.empty(E, 2 * F // 128, H // 128), torch.empty(E, H // 128, F // 128)
    up, down = up.to(torch.float8_e4m3fn), down.to(torch.float8_e4m3fn)
    return x, g, up, scales[0], down, scales[1]


CALLS = {
    "topk": (FusedTopKFwdOp(K, target="cuda"), lambda tokens: (bf16(tokens, E),)),
    "layer": (FusedMoEFwdOp(K, target="cuda"), layer_inputs),
    "biased": (FusedMoEFwdOp(K, target="cuda"), lambda tokens: layer_inputs(tokens, True)),
    "experts": (FusedMoEExpertsFwdOp(target="cuda"), expert_inputs),
    "fp8": (FusedMoEFP8FwdOp(K, target="cuda"), fp8_inputs),
}


def repeated(op):
    return [call for call in op._calls.values() if isinstance(call, Repetition)]


@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_launches_what_the_whole_one_does(name, tokens, launches):
    op, make = CALLS[name]
    op = copy.copy(op)
    for _ in range(2):
        op(*make(tokens))
    inputs = make(tokens)
    launches.clear()
    whole_result = op.forward(*inputs)
    whole, launches[:] = list(launches), []
    assert len(repeated(op)) == 1
    result = op(*inputs)
    assert described(launches, inputs) == described(whole, inputs)
    for x, y in zip(
        *(r if type(r) is tuple else (r,) for r in (result, whole_result)), strict=True
    ):
        assert (x is y) == any(x is given for given in inputs)
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert any(x is arg for *_, args in launches for arg in args)


@pytest.fixture
def layer(launches):
    """A layer with a call that repeats, and its inputs."""
    op = FusedMoEFwdOp(K, target="cuda")
    inputs = layer_inputs(2)
    for _ in range(3):
        op(*inputs)
    assert len(repeated(op)) == 1
    return op, inputs


@pytest.fixture
def whole_calls(monkeypatch):
    """Grows with each call that goes all the way."""
    seen, find = [], targets.find_kernel

    def record(op, *args, **named):
        seen.append(op)
        return find(op, *args, **named)

    monkeypatch.setattr(targets, "find_kernel", record)
    return seen


def test_a_repeated_call_chooses_no_kernel(layer, whole_calls):
    op, inputs = layer
    op(*inputs)
    assert not whole_calls


def changed(inputs):
    x, g, up, down = inputs
    yield "size", (bf16(3, H), bf16(3, E), up, down)
    yield "dtype", (x, g.float(), up, down)
    yield "stride", (bf16(2, 2 * H)[:, :H], g, up, down)
    yield "alignment", (x, bf16(2 * E + 1)[1:].view(2, E), up, down)
    yield "conjugate", (x, torch._neg_view(g), up, down)  # pyright: ignore[reportPrivateImportUsage]


def test_tensors_unlike_those_before_go_all_the_way(layer, whole_calls):
    op, inputs = layer
    for what, others in changed(inputs):
        whole_calls.clear()
        op(*others)
        assert whole_calls, what


def test_settings_and_targets_that_change_are_noticed(layer, whole_calls):
    op, inputs = layer
    op.renormalize = True
    op(*inputs)
    assert whole_calls
    op.renormalize = False
    whole_calls.clear()
    op(*inputs)
    assert not whole_calls
    targets.set_default_target(None)
    op(*inputs)
    assert whole_calls


def test_a_setting_that_changes_while_a_call_is_recorded_is_noticed(launches, monkeypatch):
    op, x = FusedTopKFwdOp(K, target="cuda"), bf16(2, E)
    op(x)
    record = repeat.record

    def record_late(*args):
        op.renormalize = True  # as another thread may do
        return record(*args)

    monkeypatch.setattr(repeat, "record", record_late)
    op(x)
    assert not repeated(op)


def test_autocast_is_noticed(layer, whole_calls):
    op, inputs = layer
    with torch.autocast("cpu"):
        op(*inputs)
    assert whole_calls


def test_errors_are_raised_as_before(layer):
    op, (x, g, up, down) = layer
    with pytest.raises(ValueError, match="w_down must be"):
        op(x, g, up, down[:, :, :-8])
    with pytest.raises(TypeError, match="gating_output"):
        op(x, None, up, down)
    with pytest.raises(RuntimeError, match="requires grad"):
        op(x, g, up.detach().requires_grad_(), down)


def test_modes_see_the_operator(layer, whole_calls):
    op, inputs = layer
    with torch.profiler.profile() as profile:
        op(*inputs)
    assert "tileops::fused_moe_fwd" in {event.key for event in profile.key_averages()}
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        assert type(op(*fakes)) is type(fakes[0])
    traced = torch.jit.trace(lambda *xs: op(*xs), inputs, check_trace=False)
    assert "fused_moe_fwd" in str(traced.graph)  # pyright: ignore[reportAttributeAccessIssue]


def test_overlaps_are_found_again(launches):
    op = FusedMoEExpertsFwdOp(target="cuda")
    out, x, *rest = expert_inputs(2)
    for _ in range(3):
        op(out, x, *rest)
    assert len(repeated(op)) == 1
    with pytest.raises(ValueError, match="must not overlap"):
        op(x, x, *rest)
    both = bf16(3, H)
    with pytest.raises(ValueError, match="must not overlap"):
        op(both[1:], both[:2], *rest)


def test_results_in_other_containers_are_not_repeated():
    x = torch.empty(2)
    for results in ((x,), [x], torch.topk(x, 1)):
        assert repeat.record(lambda given=results: given, (x,))[1] is None


def test_a_tensor_given_twice_is_never_confused(launches):
    op = FusedMoEFwdOp(K, target="cuda")
    x, g, up, down = bf16(2, 128), None, bf16(128, 2 * F, 128), bf16(128, 128, F)
    for _ in range(3):
        op(x, x, up, down)
    assert not repeated(op)
    g = bf16(2, 128)
    launches.clear()
    op(x, g, up, down)
    assert any(arg is g for *_, args in launches for arg in args)


def test_other_operators_and_parts_of_users_are_not_repeated(launches):
    class Movement(PrepareAndFinalizeNoOp):
        pass

    op = FusedMoEFwdOp(K, target="cuda", prepare_finalize=Movement())
    plain = FusedMoEFwdOp(K, target="cuda")
    for _ in range(3):
        op(*layer_inputs(2))
        plain(*layer_inputs(0))
    assert not repeated(op)
    result, repetition = repeat.record(lambda: torch.ones(2).add(1), ())
    assert repetition is None


def wrapped(function, calls) -> Any:
    @functools.wraps(function)
    def counted(*args):
        calls.append(args)
        return function(*args)

    return counted


def test_a_forward_of_users_is_called_each_time(launches, monkeypatch):
    calls = []

    class Layer(FusedMoEFwdOp):
        _check_routing = wrapped(FusedMoEFwdOp._check_routing, calls)

    class Select(FusedTopKFwdOp):
        forward = wrapped(FusedTopKFwdOp.forward, calls)

    patched = FusedTopKFwdOp(K, target="cuda")
    monkeypatch.setattr(patched, "forward", wrapped(patched.forward, calls))
    rows = (bf16(2, E),)
    plain = FusedTopKFwdOp(K, target="cuda")
    for _ in range(3):
        plain(*rows)
    assert repeated(plain)
    monkeypatch.setattr(FusedTopKFwdOp, "forward", wrapped(FusedTopKFwdOp.forward, calls))
    new = FusedTopKFwdOp(K, target="cuda")
    for op, inputs in (
        (Layer(K, target="cuda"), layer_inputs(2)),
        (Select(K, target="cuda"), rows),
        (patched, rows),
        (plain, rows),
        (new, rows),
    ):
        calls.clear()
        for _ in range(4):
            op(*inputs)
        assert len(calls) >= 4, op


def test_parts_that_users_replace_are_not_kept(launches):
    class Movement(PrepareAndFinalizeNoOp):
        pass

    op = FusedMoEFwdOp(K, target="cuda", prepare_finalize=Movement())
    op(*layer_inputs(2))
    held = weakref.ref(op.prepare_finalize)
    op.prepare_finalize = None
    assert held() is None


def outcome(call, *inputs):
    try:
        return [x.device for x in call(*inputs)]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_tensors_without_memory_fare_as_before(asked, launches):
    op, x = FusedTopKFwdOp(K, target=asked), torch.randn(3, E)
    for make in (lambda: x.to("meta"), x.to_sparse, x.to_mkldnn):
        expected = outcome(op.forward, make())
        for _ in range(3):
            assert outcome(op, make()) == expected


def test_a_target_that_is_none_is_refused_in_its_place(launches):
    op: Any = FusedTopKFwdOp(K)
    for op.target in ("unknown", 3):
        for x in (bf16(E), bf16(2, E)):
            expected = outcome(op.forward, x)
            for _ in range(3):
                assert outcome(op, x) == expected


def test_a_target_that_does_not_promise_it_is_not_repeated():
    op = FusedTopKFwdOp(K, target="reference")
    for _ in range(3):
        op(torch.randn(3, E))
    assert not repeated(op)


def test_no_tensor_is_kept_alive(layer, launches):
    op, _ = layer
    x = layer_inputs(2)
    held = [weakref.ref(t) for t in x]
    op(*x)
    del x, launches[:]
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_copies_start_without_what_is_remembered(layer):
    op, inputs = layer
    for other in (copy.deepcopy(op), copy.copy(op), pickle.loads(pickle.dumps(op))):
        assert repr(other) == repr(op)
        assert not hasattr(other, "_calls")


def test_no_more_than_so_many_signatures_are_kept(launches):
    op = FusedTopKFwdOp(K, target="cuda")
    for tokens in range(1, 600):
        op(bf16(tokens, E))
    assert len(op._calls) <= 256


def test_calls_that_are_collected_are_not_repeated(layer, launches):
    op, inputs = layer
    launches.clear()
    with compilation.collecting("sm_90a") as builds:
        op(*inputs)
    assert builds
    assert not launches
    op = FusedTopKFwdOp(K, target="cuda")
    with compilation.collecting("sm_90a") as builds:
        for _ in range(3):
            op(bf16(2, E))
    assert len(builds) == 1
    assert not hasattr(op, "_calls")


STEPS = verify.steps(load_all(), [1, 16, 512], ["uniform"])


@pytest.mark.parametrize(
    "step", STEPS, ids=lambda step: f"{step.case.name}-{step.tokens}-{len(step.ops)}"
)
def test_every_op_repeats_on_the_published_models(step, launches):
    draw = warmup.Shapes(step.case.layer, step.tokens, torch.bfloat16, torch.device("cpu"))
    for name in step.ops:
        for problem in PROBLEMS[name](draw):
            if not isinstance(problem.cls, type):
                continue  # a function
            op, inputs = problem.cls(**problem.settings, target="cuda"), problem.inputs
            try:
                for _ in range(2):
                    op(**inputs)
            except targets.NoKernelError:
                continue
            launches.clear()
            op.forward(**inputs)
            whole, launches[:] = list(launches), []
            op(**inputs)
            given = list(inputs.values())
            assert described(launches, given) == described(whole, given)
            assert repeated(op)
