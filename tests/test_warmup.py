"""Kernels compiled ahead of time: what is collected, that it suffices, what needs no compiler."""

import ast
import os
import threading
from pathlib import Path

import pytest
import torch
from test_cpu_target import finish, libraries, python
from typer.testing import CliRunner

from tileops import compilation
from tileops.__main__ import app
from tileops.compilation import Build, CompileError, collecting, compile_builds
from tileops.kernels.cpu import compiler
from tileops.kernels.cuda import device
from tileops.moe import FusedMoEFwdOp
from tileops.targets import NoKernelError
from tileops.workloads import verify, warmup
from tileops.workloads.manifest import load_all

ROOT = Path(__file__).parents[1]
LEVEL = compiler.levels()[0].name
"""The lowest level: every machine has it, and on most it is not the one they choose."""

CALL = """
    import torch
    from tileops.moe import FusedMoEFwdOp
    def call():
        x, logits = torch.ones(3, 32).bfloat16(), torch.randn(3, 8)
        w_gate_up, w_down = torch.ones(8, 48, 32).bfloat16(), torch.ones(8, 32, 24).bfloat16()
        return FusedMoEFwdOp(2, target="cpu")(x, logits, w_gate_up, w_down)
"""
WARM_UP = f"""
    from tileops.compilation import collecting, compile_builds
    with collecting({LEVEL!r}) as builds:
        call()
    for _ in range(2):
        compile_builds(builds, processes=2, report=lambda build, compiled: print(compiled))
"""
NO_NVCC = {"CUDA_HOME": "/nowhere"}


def compiled(cache):
    """The kernels in a folder by their keys, with the times at which they were compiled."""
    return {path.parent.name: time for path, time in libraries(cache).items()}


def test_after_a_warm_up_nothing_is_compiled(tmp_path):
    run, level = CALL + "    call()\n", {"TILEOPS_CPU_LEVEL": LEVEL}
    finish(python(run, tmp_path / "cold", **level))
    needed = compiled(tmp_path / "cold")
    assert len(needed) == 4

    told = finish(python(CALL + WARM_UP, tmp_path / "warm")).split()
    assert told == ["True"] * 4 + ["False"] * 4
    filled = compiled(tmp_path / "warm")
    assert filled.keys() == needed.keys()
    finish(python(run, tmp_path / "warm", **level))
    assert compiled(tmp_path / "warm") == filled


MANIFEST = """
small:
  source: nowhere
  tokens: [1, 40]
  index_tokens: []
  routing: [zipf]
  layer: {num_experts: 8, top_k: 2, hidden_size: 32, ffn_size: 24, shared_size: 16}
"""
COMMAND = "import sys, runpy; sys.argv[1:] = {!r}; runpy.run_module('tileops', run_name='__main__')"


def command(cache, *args, **env):
    return finish(python(COMMAND.format([str(arg) for arg in args]), cache, **env))


def test_after_the_command_a_run_of_the_cases_compiles_nothing(tmp_path):
    manifest = tmp_path / "small.yaml"
    manifest.write_text(MANIFEST)
    cache, level = tmp_path / "cache", {"TILEOPS_CPU_LEVEL": LEVEL}
    told = command(tmp_path, "warmup", manifest, "--arch", LEVEL, "--cache-dir", cache)
    filled = compiled(cache)
    assert f"{len(filled)} kernels compiled, 0 were in the cache already" in told
    told = command(cache, "warmup", manifest, "--arch", LEVEL)
    assert f"0 kernels compiled, {len(filled)} were in the cache already" in told
    told = command(cache, "verify", manifest, "--target", "cpu", **level)
    assert "fused_moe_fwd" in told
    assert compiled(cache) == filled
    # and what the count looks at does change where something is compiled
    command(tmp_path / "cold", "verify", manifest, "--target", "cpu", **level)
    assert compiled(tmp_path / "cold").keys() == filled.keys()


def test_the_kernels_of_all_manifests_are_few():
    """No number of tokens, experts or columns is compiled in: the models share their kernels."""
    steps = verify.steps(load_all(), warmup.TOKENS, ["uniform"])
    builds, refused = warmup.needed(steps, "sm_90a")
    assert not refused
    assert 10 < len(builds) < 90
    for tokens in ([3], [77, 3000], [9000, 70_000]):
        more, _ = warmup.needed(verify.steps(load_all(), tokens, ["uniform"]), "sm_90a")
        assert set(more) <= set(builds)


def test_an_unknown_architecture_is_refused_in_words():
    result = CliRunner().invoke(app, ["warmup", "--arch", "sm_100a"])
    assert result.exit_code == 1
    assert "--arch must be one of ['sm_90a', " in result.stderr


UNREADABLE = """
    import mmap, sys, warnings
    import torch
    import test_compile
    from tileops.compilation import collecting

    warnings.filterwarnings("ignore", "The given buffer is not writable")
    def reserve(*shape, dtype=torch.bfloat16):
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    E, H, F = test_compile.E, test_compile.H, test_compile.F
    test_compile.weights = lambda device: (reserve(E, 2 * F, H), reserve(E, H, F))
    shapes = {(E, 256, H): (E, 2, H // 128), (E, H, 128): (E, H // 128, 1)}
    test_compile.fp8_weights = lambda device: [
        part
        for shape, scales in shapes.items()
        for part in (
            reserve(*shape, dtype=torch.float8_e4m3fn), reserve(*scales, dtype=torch.float32)
        )
    ]
    for target, arch in (("cuda", "sm_90a"), ("cpu", {level!r})):
        for name, program in test_compile.programs(target, "cpu").items():
            with collecting(arch) as builds:
                program(reserve(9, H), reserve(9, E))
            assert builds, (target, name)
            print(target, name)
"""


def test_collecting_reads_and_writes_no_tensor(tmp_path):
    """Every op on memory whose first access ends the process."""
    code, path = UNREADABLE.replace("{level!r}", repr(LEVEL)), str(ROOT / "tests")
    path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    told = finish(python(code, tmp_path, PYTHONPATH=path)).splitlines()
    assert "cuda FusedMoE" in told
    assert "cpu MoE, sparse mixer" in told
    assert "cuda FusedMoEFP8, shared" in told
    assert compiled(tmp_path) == {}


def call(target, num_tokens=64, hidden=128, device="cpu"):
    options = {"dtype": torch.bfloat16, "device": device}
    return FusedMoEFwdOp(2, target=target)(
        torch.empty(num_tokens, hidden, **options),
        torch.empty(num_tokens, 16, **options),
        torch.empty(16, 512, hidden, **options),
        torch.empty(16, hidden, 256, **options),
    )


def test_the_builds_of_a_cuda_layer_are_found_without_a_gpu():
    with collecting("sm_90a") as builds:
        assert call("cuda").shape == (64, 128)
        call("cuda", 63)
    kernels = "tileops.kernels.cuda"
    assert builds[0] == Build(f"{kernels}.topk", "build", ("bfloat16", "softmax", 1))
    assert [str(build).removeprefix(f"{kernels}.").split("(")[0] for build in builds] == [
        "topk.build",
        "place_routes.build_place",
        "sm90.multiply_tiles.build",
        "sm90.multiply_tiles.build",
        "post_permute.build",
    ]
    with collecting("sm_90a") as builds:
        call("cuda", 7)
    assert {build.module for build in builds} == {
        f"{kernels}.{name}" for name in ("topk", "indexed_experts", "post_permute")
    }


def test_outside_of_collecting_tensors_on_the_cpu_are_no_gpus():
    with pytest.raises(NoKernelError, match="runs on GPUs of compute capability 9.0, got cpu"):
        call("cuda")


def test_what_cannot_be_served_is_refused_while_collecting():
    with collecting("sm_90a"), pytest.raises(NoKernelError, match="16-byte words"):
        call("cuda", hidden=36)
    with collecting(LEVEL), pytest.raises(NoKernelError, match="compute capability 9.0, got cpu"):
        call("cuda")
    for arch in ("sm_90a", "x86-64-v99"):
        with collecting(arch), pytest.raises(NoKernelError, match=f"not for '{arch}'"):
            call("cpu")


def test_a_level_that_this_machine_lacks_can_be_collected_and_compiled(monkeypatch, tmp_path):
    highest = compiler.levels()[-1].name
    monkeypatch.setattr(compiler, "machine_levels", lambda: compiler.levels()[:1])
    with collecting(highest) as builds:
        call("cpu")
    assert all(highest in build.args for build in builds)
    compile_builds(builds[:1], processes=1, cache_dir=tmp_path)
    assert len(compiled(tmp_path)) == 1


def test_collecting_leaves_other_threads_alone():
    seen = []
    with collecting(LEVEL):
        thread = threading.Thread(target=lambda: seen.append(compilation.collected_arch()))
        thread.start()
        thread.join()
        assert compilation.collected_arch() == LEVEL
    assert seen == [None]
    assert compilation.collected_arch() is None


def test_an_error_names_the_builder_and_its_arguments(tmp_path):
    build = Build("tileops.kernels.cpu.swiglu", "build", ("z80",))
    with pytest.raises(CompileError, match=r"cpu\.swiglu\.build\('z80'\) fails: .*not for 'z80'"):
        compile_builds([build], processes=2, cache_dir=tmp_path)


def test_a_kernel_that_does_not_reach_the_cache_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    build = Build("tileops.kernels.cpu.swiglu", "build", (LEVEL,))
    with pytest.raises(CompileError, match="not written to the cache"):
        compile_builds([build], processes=1, cache_dir=tmp_path)


BUILD_WITHOUT_NVCC = """
    from tileops.compilation import CompileError
    from tileops.kernels.cuda import swiglu
    try:
        print("artifact:", swiglu.build("bfloat16", True).artifact)
    except CompileError as error:
        print(error)
"""


def test_without_nvcc_an_error_says_how_to_get_a_kernel(tmp_path):
    error = finish(python(BUILD_WITHOUT_NVCC, tmp_path, **NO_NVCC))
    assert "cuda.swiglu.build('bfloat16', True) is not in the kernel cache" in error
    for way in ("pip install 'tilelang[nvcc]'", "CUDA_HOME", "python -m tileops warmup"):
        assert way in error


@pytest.mark.nvcc
@pytest.mark.skipif(not device.has_compiler(), reason="needs nvcc: CUDA's compiler is not here")
def test_a_filled_cache_needs_neither_nvcc_nor_a_gpu(tmp_path):
    build = Build("tileops.kernels.cuda.swiglu", "build", ("bfloat16", True))
    compile_builds([build], processes=1, cache_dir=tmp_path)
    filled = compiled(tmp_path)
    assert len(filled) == 1
    assert finish(python(BUILD_WITHOUT_NVCC, tmp_path, **NO_NVCC)).strip() == "artifact: None"
    assert compiled(tmp_path) == filled


CALL_ON_A_GPU = (
    CALL.replace('"cpu"', '"cuda"')
    + """
    torch.set_default_device({device!r})
    from tileops.compilation import collecting, compile_builds
    if {device!r} == "cpu":
        with collecting("sm_90a") as builds:
            call()
        compile_builds(builds, processes=2)
    else:
        call()
        torch.cuda.synchronize()
"""
)


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_compiler(), reason="needs nvcc: CUDA's compiler is not here")
def test_what_was_collected_on_the_cpu_suffices_on_a_gpu(tmp_path):
    finish(python(CALL_ON_A_GPU.format(device="cpu"), tmp_path))
    filled = compiled(tmp_path)
    assert len(filled) == 6
    finish(python(CALL_ON_A_GPU.format(device="cuda"), tmp_path, **NO_NVCC))
    assert compiled(tmp_path) == filled


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 5000])
def test_tensors_on_the_cpu_stand_for_those_of_a_gpu(num_tokens):
    with collecting("sm_90a") as found:
        call("cuda", num_tokens)
    with collecting("sm_90a") as needed:
        call("cuda", num_tokens, device="cuda")
    assert found == needed


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: p.stem)
def test_every_builder_can_be_collected(path):
    """None is made by ``tilelang.jit`` itself: that one would compile in a dry run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tilelang":
            assert not {"jit", "compile"} & {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("tilelang", "jit"), ("tilelang", "compile")}
