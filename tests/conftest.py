import os

import pytest
import torch

from tileops.workloads.accuracy import bound, relative_error

# tests that run at a time share the processors: more threads would wait for each other
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))

TARGETS = ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KERNELS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pytest_generate_tests(metafunc):
    """`target`: every in-tree target; `kernels`: those that are checked against the reference."""
    for name, values in (("target", TARGETS), ("kernels", KERNELS)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


@pytest.fixture
def device(request):
    names = request.node.callspec.params
    return "cuda" if "cuda" in (names.get("target"), names.get("kernels")) else "cpu"


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16", "fp16"])
def dtype(request):
    names = request.node.callspec.params
    if request.param == torch.float32 and "cuda" in (names.get("target"), names.get("kernels")):
        pytest.skip("the cuda kernels take bfloat16 and float16")
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def assert_accurate():
    """Check a result against float64: twice torch's error in its dtype and a rounding pass."""

    def check(out, exact, same_dtype):
        error, limit = relative_error(out, exact), bound(same_dtype, exact)
        assert error <= limit, f"relative error {error:.3e} exceeds {limit:.3e}"

    return check


@pytest.fixture
def poison(device):
    """Fill the memory that the next allocations get with NaN: 0x7f7f is one in every format."""

    def fill(*num_bytes):
        blocks = [
            torch.full((n,), 0x7F, dtype=torch.uint8, device=device)
            for n in num_bytes
            for _ in "123"
        ]
        del blocks

    return fill
