"""The CPU target's own promises: compiler, vector level, compilations, threads, rounding."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tileops.kernels.cpu import compiler
from tileops.kernels.cpu.threads import parallel
from tileops.moe import (
    ContiguousLayoutSpec,
    FusedMoEFwdOp,
    FusedTopKFwdOp,
    MoEGroupedGemmFwdOp,
    MoEPostPermuteFwdOp,
)
from tileops.targets import NoKernelError

TIGHT = ContiguousLayoutSpec.tight_physical_psum()
ONE = torch.tensor([1], dtype=torch.int32)

LAYER = """
    import torch
    from tileops.moe import FusedMoEFwdOp
    torch.manual_seed(0)
    wg, wd = torch.randn(8, 48, 32).bfloat16(), torch.randn(8, 32, 24).bfloat16()
    op = FusedMoEFwdOp(2, renormalize=True, target="cpu")
    reference = FusedMoEFwdOp(2, renormalize=True, target="reference")
    def run(T):
        x, g = torch.randn(T, 32).bfloat16(), torch.randn(T, 8)
        torch.testing.assert_close(op(x, g, wg, wd), reference(x, g, wg, wd), rtol=2e-2, atol=2e-1)
"""


def python(code, cache, **environment):
    """Start ``code`` in a new process whose kernels go to the folder ``cache``."""
    env = {**os.environ, "TILELANG_CACHE_DIR": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def libraries(cache):
    return {path: path.stat().st_mtime_ns for path in Path(cache).rglob("*.so")}


def test_no_token_count_compiles_again(tmp_path):
    finish(python(LAYER + "    run(1)\n", tmp_path))
    after_one = libraries(tmp_path)
    assert after_one
    finish(python(LAYER + "    for T in (*range(65), 1000, 1777): run(T)\n", tmp_path))
    assert libraries(tmp_path) == after_one


def test_order_of_building_does_not_change_the_cache(tmp_path):
    runs = "    for dtype in ({}): wg, wd, x = (t.to(dtype) for t in (wg, wd, torch.ones(3, 32)))"
    runs += "; op(x, torch.randn(3, 8), wg, wd)\n"
    finish(python(LAYER + runs.format("torch.float32, torch.bfloat16, torch.float16"), tmp_path))
    before = libraries(tmp_path)
    finish(python(LAYER + runs.format("torch.float16, torch.float32, torch.bfloat16"), tmp_path))
    assert libraries(tmp_path) == before


def test_processes_may_share_an_empty_cache(tmp_path):
    for process in [python(LAYER + "    run(5)\n", tmp_path) for _ in range(4)]:
        finish(process)


def test_levels_have_kernels_of_their_own(tmp_path):
    """A cache that machines of unlike levels share must not hand one the other's instructions."""
    lower = compiler.machine_levels()[0].name
    if lower == compiler.level().name:
        pytest.skip("this machine has one level only")
    finish(python(LAYER + "    run(5)\n", tmp_path))
    high = libraries(tmp_path)
    finish(python(LAYER + "    run(5)\n", tmp_path, TILEOPS_CPU_LEVEL=lower))
    both = libraries(tmp_path)
    assert high.items() <= both.items()
    assert len(both) == 2 * len(high)


def test_the_level_is_named():
    assert compiler.level() in compiler.machine_levels()
    flags = compiler.flags(compiler.level().name)
    assert "native" not in " ".join(flags)
    assert "-ffast-math" not in flags


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("TILEOPS_CPU_LEVEL", "z80")
    message = "TILEOPS_CPU_LEVEL must be one of .* got 'z80'"
    with pytest.raises(ValueError, match=message):
        compiler.level()
    with pytest.raises(NoKernelError, match=message):
        FusedTopKFwdOp(1, target="cpu")(torch.randn(2, 4))


def test_no_compiler_is_said_in_words(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    x = torch.randn(2, 8)
    for op, args in (
        (FusedMoEFwdOp(1), (x, torch.randn(2, 3), torch.randn(3, 16, 8), torch.randn(3, 8, 8))),
        (MoEGroupedGemmFwdOp(TIGHT), (x, torch.randn(1, 8, 8), ONE)),
    ):
        with pytest.raises(NoKernelError) as caught:
            op(*args)
        assert "no C++ compiler" in str(caught.value)
        assert "'reference'" in str(caught.value)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("units", [0, 1, 5, 64])
def test_threads_share_the_work_exactly(threads, units):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ranges = []
        parallel(units, 1, lambda lo, hi: ranges.append((lo, hi)))
    finally:
        torch.set_num_threads(before)
    assert sorted(i for lo, hi in ranges for i in range(lo, hi)) == list(range(units))
    assert len(ranges) <= max(threads, 1)


def test_an_error_in_a_thread_reaches_the_caller():
    def fail(lo, hi):
        raise ArithmeticError(lo)

    with pytest.raises(ArithmeticError):
        parallel(8, 1, fail)


def test_results_do_not_depend_on_the_number_of_threads():
    x, g = torch.randn(9, 64).bfloat16(), torch.randn(9, 4)
    wg, wd = torch.randn(4, 96, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16()
    op, before = FusedMoEFwdOp(2, target="cpu"), torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(op(x, g, wg, wd))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_passes_through(dtype):
    """Widening and narrowing in the kernels are exact on all 65,536 patterns."""
    values = torch.arange(-(2**15), 2**15).short().view(dtype).view(4096, 16)
    out = MoEPostPermuteFwdOp(TIGHT, target="cpu")(
        values, torch.ones(4096, 1), torch.arange(4096).int()
    )
    nan = values.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], values[~nan])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype):
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64).int()
    ties = (bits & ~0xFFFF) | 0x8000 if dtype == torch.bfloat16 else (bits & ~0x1FFF) | 0x1000
    values = torch.cat([bits, ties]).view(torch.float32).view(-1, 16)
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.9, 65520.0]
    specials += [2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -(2.0**-14), 3.3e38, 3.4e38, 1e-40, 6e-8]
    values = torch.cat([values, torch.tensor([specials])])
    op = MoEPostPermuteFwdOp(TIGHT, out_dtype=dtype, target="cpu")
    rows = values.shape[0]
    out = op(values, torch.ones(rows, 1), torch.arange(rows).int())
    torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0, equal_nan=True)
