"""Adapters of peers, run with stand-ins of their libraries that take what the real ones do."""

import contextlib
import enum
import sys
import types
from importlib import import_module

import pytest
import torch

from tileops.moe import FusedMoEExpertsFwdOp, MoEGroupedGemmFP8FwdOp
from tileops.workloads import peers
from tileops.workloads.layer import Layer
from tileops.workloads.peers import PeerError, tileops_0_1
from tileops.workloads.problems import PROBLEMS, Draw
from tileops.workloads.problems_fp8 import PROBLEMS_FP8

ALIGNMENT = 4


def experts_problem(dtype=torch.float32, **settings):
    layer = Layer("small", 8, 2, 16, 24, **settings)
    (problem,) = PROBLEMS["fused_moe_experts_fwd"](Draw(layer, 9, dtype, torch.device("cpu")))
    return problem


def gemm_problem():
    draw = Draw(Layer("small", 8, 2, 16, 24), 9, torch.bfloat16, torch.device("cpu"))
    return next(p for p in PROBLEMS["moe_grouped_gemm_fwd"](draw) if p.part == "down")


def run(rows, ids, weights, expert):
    """Sum ``expert(e, rows)`` over a token's routes."""
    out = torch.zeros(rows.shape)
    for t in range(len(ids)):
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            out[t] += weight * expert(e, rows[t])
    return out


def plus(rows, bias, e):
    return rows if bias is None else rows + bias[e]


def swigluoai(gate, up, alpha=1.702, limit=7.0, beta=1.0):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def vllm():
    class MoEActivation(enum.Enum):
        SILU = "silu"
        GELU = "gelu"
        SWIGLUOAI = "swigluoai"

    def fused_experts(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation=MoEActivation.SILU,
        apply_router_weight_on_input=False,
        global_num_experts=-1,
        expert_map=None,
        quant_config=None,
    ):
        b1, b2 = (None, None) if quant_config is None else quant_config
        if global_num_experts == -1:
            global_num_experts = len(w1)
        assert expert_map is None or len(expert_map) == global_num_experts
        assert int(topk_ids.max()) < global_num_experts

        def expert(e, row):
            if expert_map is not None and (e := int(expert_map[e])) == -1:
                return torch.zeros_like(row)
            rows = plus(w1[e] @ row, b1, e)
            if activation == MoEActivation.SWIGLUOAI:
                inner = swigluoai(rows[0::2], rows[1::2])
            else:
                gate, up = rows.chunk(2)
                inner = getattr(torch.nn.functional, activation.value)(gate) * up
            return plus(w2[e] @ inner, b2, e)

        return run(hidden_states, topk_ids, topk_weights, expert)

    folder = "vllm.model_executor.layers.fused_moe"
    return {
        folder: {"MoEActivation": MoEActivation, "fused_experts": fused_experts},
        f"{folder}.config": {
            "biased_moe_quant_config": lambda w1_bias, w2_bias: (w1_bias, w2_bias)
        },
    }


def flashinfer():
    class ActivationType(enum.IntEnum):
        Swiglu = 3
        Geglu = 4

    @contextlib.contextmanager
    def autotune(tune_mode=True, cache=None, tuning_buckets=None):
        assert tuning_buckets == (9,)
        yield

    def cutlass_fused_moe(
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc2_expert_weights,
        output_dtype,
        quant_scales,
        fc1_expert_biases=None,
        fc2_expert_biases=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        swiglu_limit=None,
        ep_size=1,
        ep_rank=0,
        output=None,
        activation_type=ActivationType.Swiglu,
    ):
        num_local = len(fc2_expert_weights)
        assert int(token_selected_experts.max()) < num_local * ep_size

        def expert(e, row):
            if not ep_rank * num_local <= e < (ep_rank + 1) * num_local:
                return torch.zeros_like(row)
            up, gate = plus(fc1_expert_weights[e] @ row, fc1_expert_biases, e).chunk(2)
            if swiglu_alpha is not None:
                inner = swigluoai(gate, up, swiglu_alpha[e], swiglu_limit[e], swiglu_beta[e])
            elif activation_type == ActivationType.Swiglu:
                inner = torch.nn.functional.silu(gate) * up
            else:
                inner = torch.nn.functional.gelu(gate) * up
            return plus(fc2_expert_weights[e] @ inner, fc2_expert_biases, e)

        routes = token_selected_experts, token_final_scales
        output.copy_(run(input, *routes, expert).to(output_dtype))
        return [output]

    return {
        "flashinfer.autotuner": {"autotune": autotune},
        "flashinfer.fused_moe": {
            "ActivationType": ActivationType,
            "cutlass_fused_moe": cutlass_fused_moe,
        },
    }


def triton_kernels():
    class FnSpecs:
        def __init__(self, name, fn, fn_arg_names):
            self.fn = fn

    class FusedActivation:
        def __init__(self, specs, fn_args, reduction_n):
            assert reduction_n == 2
            self.apply = lambda rows: specs.fn(rows, *fn_args)

    def swiglu_fn(rows, alpha, limit):
        return swigluoai(rows[:, 0::2], rows[:, 1::2], alpha, limit)

    def topk(x, k, apply_softmax=True, y_indx=None):
        assert not apply_softmax
        assert y_indx.shape[1] == k
        return x.gather(1, y_indx.long()), y_indx, None

    def routing_from_bitmatrix(bitmatrix, expt_scal, expt_indx, n_expts_tot, n_expts_act):
        order = expt_indx.flatten().argsort(stable=True)
        routes = types.SimpleNamespace(
            gate_scal=expt_scal.flatten()[order],
            experts=expt_indx.flatten()[order].tolist(),
            n_expts_act=n_expts_act,
        )
        return routes, order, order

    def matmul_ogs(
        x, w, bias, routing, gather_indx=None, scatter_indx=None, gammas=None, fused_activation=None
    ):
        assert w.is_contiguous()
        assert bias is None or bias.dtype == torch.float32
        rows = x if gather_indx is None else x[gather_indx // routing.n_expts_act]
        pairs = zip(rows, routing.experts, strict=True)
        out = torch.stack([plus(row @ w[e], bias, e) for row, e in pairs])
        if fused_activation is not None:
            out = fused_activation.apply(out)
        if gammas is not None:
            out = out * gammas[:, None]
        if scatter_indx is not None:
            total = out.new_zeros(len(out) // routing.n_expts_act, out.shape[1])
            out = total.index_add_(0, scatter_indx // routing.n_expts_act, out)
        return out.to(x.dtype)

    return {
        "triton_kernels.matmul_ogs": {
            "FnSpecs": FnSpecs,
            "FusedActivation": FusedActivation,
            "matmul_ogs": matmul_ogs,
        },
        "triton_kernels.routing": {"routing_from_bitmatrix": routing_from_bitmatrix},
        "triton_kernels.swiglu": {"swiglu_fn": swiglu_fn},
        "triton_kernels.topk": {"topk": topk},
    }


def sonicmoe():
    class ActivationType(enum.Enum):
        SWIGLU = "swiglu"

    def moe_general_routing_inputs(
        x,
        router_scores,
        token_indices,
        expert_indices,
        w1,
        b1,
        w2,
        b2,
        E,  # noqa: N803
        stream_id,
        activation_type,
        is_inference_mode_enabled=False,
        concat_layout=False,
    ):
        assert activation_type == ActivationType.SWIGLU
        assert not concat_layout
        assert w1.shape == (2 * w2.shape[1], w2.shape[0], E)
        assert w1.permute(2, 0, 1).is_contiguous()
        assert w2.permute(2, 0, 1).is_contiguous()
        out = torch.zeros(x.shape)
        for score, t, e in zip(router_scores, token_indices, expert_indices, strict=True):
            rows = w1[:, :, e] @ x[t]
            out[t] += score * (w2[:, :, e] @ (torch.nn.functional.silu(rows[0::2]) * rows[1::2]))
        return out, torch.bincount(expert_indices, minlength=E)

    return {
        "sonicmoe": {"moe_general_routing_inputs": moe_general_routing_inputs},
        "sonicmoe.enums": {"ActivationType": ActivationType},
    }


def deep_gemm():
    def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims="nk"):
        assert len(a) == len(d) == len(grouped_layout)
        assert len(a) % ALIGNMENT == 0
        for first in range(0, len(a), ALIGNMENT):
            block = slice(first, first + ALIGNMENT)
            (e,) = {e for e in grouped_layout[block].tolist() if e != -1}
            d[block] = a[block] @ b[e].T

    return {
        "deep_gemm": {
            "get_mk_alignment_for_contiguous_layout": lambda: ALIGNMENT,
            "m_grouped_bf16_gemm_nt_contiguous": m_grouped_bf16_gemm_nt_contiguous,
        }
    }


LIBRARIES = (vllm, flashinfer, triton_kernels, sonicmoe, deep_gemm)
SILU, GELU = {}, {"activation": "gelu_and_mul"}
GPT_OSS = {"activation": "swigluoai", "expert_bias": True}
SOME_HERE = {"num_local_experts": 3}
TAKEN = {
    vllm: (SILU, GELU, GPT_OSS, SOME_HERE),
    flashinfer: (SILU, GELU, GPT_OSS, SOME_HERE),
    triton_kernels: (SILU, GPT_OSS),
    sonicmoe: (SILU,),
}


def prepare(library, problem):
    return import_module(f"tileops.workloads.peers.{library.__name__}_peer").prepare(problem)


def install(monkeypatch, library):
    for name, content in library().items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            parent = ".".join(parts[:count])
            if parent not in sys.modules or sys.modules[parent].__name__ != f"fake {parent}":
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(f"fake {parent}"))
        vars(sys.modules[name]).update(content)


@pytest.mark.parametrize(("library", "settings"), [(k, s) for k, v in TAKEN.items() for s in v])
def test_experts(monkeypatch, library, settings):
    install(monkeypatch, library)
    problem = experts_problem(**settings)
    call = prepare(library, problem)
    for _ in range(2):
        (out,) = call()
        torch.testing.assert_close(out.double(), problem.exact()[0], rtol=1e-5, atol=1e-5)


def test_grouped_gemm(monkeypatch):
    install(monkeypatch, deep_gemm)
    problem = gemm_problem()
    (out,) = problem.live(prepare(deep_gemm, problem)())
    torch.testing.assert_close(out.float(), problem.exact()[0], rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("library", LIBRARIES)
def test_absent(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library.__name__, None)
    problem = gemm_problem() if library is deep_gemm else experts_problem()
    with pytest.raises(ImportError):
        prepare(library, problem)


def test_tileops_0_1_has_the_fp8_gemm_on_slabs_only(tmp_path):
    (tmp_path / "tileops").mkdir()
    layer = Layer("small", 8, 2, 128, 128)
    draw = Draw(layer, 32, torch.bfloat16, torch.device("cpu"))
    found = [p for op in PROBLEMS_FP8.values() for p in op(draw)]
    assert len(found) == 7
    for problem in found:
        if not problem.part.endswith("masked"):
            with pytest.raises(PeerError, match="has no such op"):
                peers.prepare(f"tileops-0.1={tmp_path}", [problem], lambda outputs: None, None)


def test_tileops_0_1_gets_no_buffer():
    assert tileops_0_1.arguments(MoEGroupedGemmFP8FwdOp) == [
        *("a", "a_scale", "b", "b_scale", "layout_metadata")
    ]
    assert "output" not in tileops_0_1.arguments(FusedMoEExpertsFwdOp)


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_tileops_0_1_gets_a_second_try(tmp_path, monkeypatch, failures):
    """A package that fails while others build kernels may be right when it is asked again."""
    begun, ended, answers = [], [], [PeerError("busy")] * failures + [{"ready": True}]

    def ask(process, line):
        assert process == len(begun)
        answer = answers.pop(0)
        if isinstance(answer, PeerError):
            raise answer
        return answer

    def begin(folder):
        begun.append(folder)
        return len(begun)

    (tmp_path / "tileops").mkdir()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tileops_0_1, "_begin", begin)
    monkeypatch.setattr(tileops_0_1, "_ask", ask)
    monkeypatch.setattr(tileops_0_1, "_end", ended.append)
    monkeypatch.setattr(tileops_0_1, "_pack", lambda task: "")
    seen = []
    fails = pytest.raises(PeerError, match="busy") if failures == 2 else contextlib.nullcontext()
    with fails:
        tileops_0_1.prepare([experts_problem()], seen.append, None, str(tmp_path))
    assert len(seen) == (failures < 2)
    assert ended == list(range(1, failures + 1))


PACKAGE = """
class FUSEDTopKFwdOp:
    def __init__(self, **settings):
        self.settings = settings

    def __call__(self, gating_output, correction_bias):
        weights, ids = gating_output.float().softmax(-1).topk(self.settings["top_k"], -1)
        return weights / weights.sum(-1, keepdim=True), ids.int()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False])
def test_tileops_0_1_in_a_process_of_its_own(tmp_path, early):
    """It gets the tensors of this process, and a class is found whatever its capitals."""
    (tmp_path / "tileops" / "moe").mkdir(parents=True)
    (tmp_path / "tileops" / "__init__.py").touch()
    (tmp_path / "tileops" / "moe" / "__init__.py").write_text(PACKAGE)
    peer, seen = f"tileops-0.1={tmp_path}", []
    draw = Draw(Layer("small", 8, 2, 128, 128), 32, torch.bfloat16, torch.device("cuda"))
    if early:
        peers.start([peer])
    with torch.inference_mode():
        (problem,) = PROBLEMS["fused_topk_fwd"](draw)
        timed = peers.prepare(peer, [problem], seen.append, None)
        assert torch.equal(seen[0][1], problem.exact()[1])
        spent, _ = timed()
    assert spent > 0
