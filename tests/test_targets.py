import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from tileops import installed, targets
from tileops.moe import FusedMoEExpertsFwdOp, FusedTopKFwdOp
from tileops.targets import BUILTIN, Kernel, NoKernelError, Target
from tileops.workloads import TARGET as REFERENCE

LOGITS = torch.tensor([[0.0, 3.0, 1.0]])


def clear():
    for cached in (installed.third_party, installed.load, targets.resolve, targets._candidates):
        cached.cache_clear()
    installed._failures.clear()


@pytest.fixture
def install(monkeypatch):
    """Pretend that packages with entry points are installed: name -> TARGET, or an exception."""

    def put(**found):
        points = []
        for name, target in found.items():
            module: Any = types.ModuleType(f"installed_{name}")
            if isinstance(target, Exception):
                module.__getattr__ = lambda _, error=target: (_ for _ in ()).throw(error)
            else:
                module.TARGET = target
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points.append(EntryPoint(name, module.__name__, "tileops.targets"))
        monkeypatch.setattr(installed, "entry_points", lambda group: points)
        clear()

    yield put
    monkeypatch.undo()
    targets.set_default_target(None)
    clear()


def lucky(name, detect=lambda device: True, refuse=None):
    """A target whose routing selects expert 7, whatever the logits."""

    def launch(logits, bias, top_k, *settings, target):
        assert target == name
        return torch.ones(logits.shape[0], top_k), torch.full((logits.shape[0], top_k), 7).int()

    kernel = Kernel(launch) if refuse is None else Kernel(launch, refuse)
    return Target(name, {"fused_topk_fwd": [kernel]}, detect)


def ids(**settings):
    return FusedTopKFwdOp(1, **settings)(LOGITS)[1].item()


def test_in_tree_targets():
    assert targets.registered_targets() == ["cuda", "cpu", "reference"]
    for op in ("fused_topk_fwd", "moe_grouped_gemm_fwd", "fused_moe_experts_fwd", "fused_moe_fwd"):
        assert targets.registered_targets(op) == ["cuda", "cpu", "reference"]
    with pytest.raises(ValueError, match="op must be one of .*'fused_topk_fwd'.* got 'no_such_op'"):
        targets.registered_targets("no_such_op")
    assert targets.load_failures() == {}


def test_an_installed_target_serves_the_device_it_claims(install):
    install(acme=lucky("acme"))
    assert targets.registered_targets("fused_topk_fwd") == ["cuda", "cpu", "reference", "acme"]
    assert ids() == 7
    assert ids(target="acme") == 7
    assert ids(target=BUILTIN) == 1
    assert ids(target="reference") == 1


def test_an_installed_target_that_claims_nothing_is_there_by_name(install):
    install(acme=lucky("acme", detect=lambda device: False))
    assert ids() == 1
    assert ids(target="acme") == 7


def test_two_claims_of_one_device_are_an_error_naming_both(install):
    install(acme=lucky("acme"), best=lucky("best"))
    with pytest.raises(ValueError, match=r"several targets claim cpu: \['acme', 'best'\]"):
        ids()
    assert ids(target="best") == 7
    targets.set_default_target("acme")
    assert ids() == 7


def test_default_target(install):
    install(acme=lucky("acme", detect=lambda device: False))
    op = FusedTopKFwdOp(1)
    assert targets.default_target() is None
    targets.set_default_target("acme")
    assert targets.default_target() == "acme"
    assert op(LOGITS)[1].item() == 7
    assert ids(target=BUILTIN) == 1
    targets.set_default_target(BUILTIN)
    assert op(LOGITS)[1].item() == 1
    targets.set_default_target(None)
    assert op(LOGITS)[1].item() == 1
    with pytest.raises(
        ValueError, match="set_default_target: target must be one of .* got 'acmee'"
    ):
        targets.set_default_target("acmee")
    assert targets.default_target() is None


def test_a_target_that_fails_to_load_is_named_and_harms_nothing(install):
    install(broken=ImportError("no libacme.so"), odd=lambda: None)
    assert ids() == 1
    assert targets.registered_targets() == ["cuda", "cpu", "reference"]
    failures = targets.load_failures()
    assert "ImportError: no libacme.so" in failures["broken"]
    assert "TARGET is a function" in failures["odd"]
    with pytest.raises(
        ValueError, match=r"got 'broken'(.|\n)*'broken' did not load: .*no libacme.so"
    ):
        ids(target="broken")
    with pytest.raises(ValueError, match=r"got 'nothing'(.|\n)*'broken' did not load"):
        ids(target="nothing")


def test_a_detect_that_fails_claims_nothing(install):
    def detect(device):
        raise OSError("no driver")

    install(acme=lucky("acme", detect=detect))
    assert ids() == 1
    assert "OSError: no driver" in targets.load_failures()["acme"]


def test_a_taken_name_is_reported(install):
    install(cpu=lucky("cpu"), builtin=lucky("builtin"))
    assert ids() == 1
    assert ids(target="cpu") == 1
    assert set(targets.load_failures()) == {"cpu", "builtin"}


def test_refusals_list_every_candidate_and_who_could(install):
    kernels = {
        "fused_topk_fwd": [
            Kernel(lambda *args, **named: None, lambda *args, **named: "serves E = 4 only"),
            Kernel(lambda *args, **named: None, lambda *args, **named: "serves bfloat16 only"),
        ]
    }
    install(acme=Target("acme", kernels))
    with pytest.raises(NoKernelError) as caught:
        ids(target="acme")
    text = str(caught.value)
    assert text.startswith("target 'acme' cannot run fused_topk_fwd")
    assert "serves E = 4 only" in text
    assert "serves bfloat16 only" in text
    assert "'reference'" in text.splitlines()[0]
    assert isinstance(caught.value, ValueError)


def test_an_operator_staged_after_a_refused_call_is_served(monkeypatch):
    monkeypatch.setattr(targets, "_staged", dict(targets._staged))
    x = torch.ones(2)
    with pytest.raises(ValueError, match="plus_one"):
        targets.run("plus_one", "reference", x)
    targets.register_staged("plus_one", lambda x, *, target: x + 1, ("fused_topk_fwd",))
    assert torch.equal(targets.run("plus_one", "reference", x), x + 1)
    targets._candidates.cache_clear()


def test_a_target_without_the_operator_says_so(install):
    install(acme=lucky("acme"))
    x, w = torch.randn(2, 8), torch.randn(3, 16, 8)
    op = FusedMoEExpertsFwdOp(target="acme")
    routes = torch.rand(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(
        NoKernelError, match="target 'acme' has no kernel for fused_moe_experts_fwd"
    ):
        op(torch.empty(2, 8), x, w, torch.randn(3, 8, 8), *routes)
    assert "acme" not in targets.registered_targets("fused_moe_fwd")


def test_a_target_with_the_stages_has_the_layer(install):
    install(acme=Target("acme", REFERENCE.kernels))
    assert "acme" in targets.registered_targets("fused_moe_fwd")
    x, w = torch.randn(2, 8), torch.randn(3, 16, 8)
    out = FusedMoEExpertsFwdOp(target="acme")(
        torch.empty(2, 8), x, w, torch.randn(3, 8, 8), torch.rand(2, 1), torch.zeros(2, 1).int()
    )
    assert out.isfinite().all()


def test_a_target_may_supply_the_layer_whole(install):
    def launch(hidden_states, *args, target, out):
        out.fill_(42)

    kernels = {**REFERENCE.kernels, "fused_moe_experts_fwd": [Kernel(launch)]}
    install(acme=Target("acme", kernels))
    x, w = torch.randn(2, 8), torch.randn(3, 16, 8)
    out = FusedMoEExpertsFwdOp(target="acme")(
        torch.empty(2, 8), x, w, torch.randn(3, 8, 8), torch.rand(2, 1), torch.zeros(2, 1).int()
    )
    assert (out == 42).all()


def test_devices_without_a_target():
    with pytest.raises(NoKernelError, match="no in-tree target serves xpu.*target='reference'"):
        targets.resolve(None, torch.device("xpu"))


@pytest.mark.parametrize("wrong", [3, torch.device("cpu")])
def test_target_must_be_a_name(wrong):
    with pytest.raises(TypeError, match="FusedTopKFwdOp: target must be a name, BUILTIN or None"):
        FusedTopKFwdOp(1, target=wrong)
