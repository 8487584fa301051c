"""The examples of the README, the documentation and the docstrings run."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import tilelang
import torch

import tileops.moe
import tileops.nn

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = tileops.nn.__all__
NAMES = {name: getattr(tileops.moe, name) for name in tileops.moe.__all__}
NAMES |= {name: getattr(tileops.nn, name) for name in MODULES}


@pytest.fixture(autouse=True)
def quiet_compiler():
    """TileLang prints what it compiles, in the middle of what an example prints."""
    tilelang.set_log_level("WARNING")
    yield
    tilelang.set_log_level("INFO")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page):
    text, namespace = page.read_text(), {}
    if "from transformers import" in text:
        pytest.importorskip("transformers")
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2))
        if block[1] == "python":
            exec(compile("\n" * line + block[2], page, "exec"), namespace)
        else:
            run_doctest(block[2], namespace, page.name, line)


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name):
    documented = [NAMES[name]]
    if inspect.isclass(NAMES[name]):
        documented += [member for member in vars(NAMES[name]).values() if inspect.isroutine(member)]
    for item in documented:
        run_doctest(inspect.getdoc(item) or "", {"torch": torch, **NAMES}, name, 0)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("FwdOp")] + MODULES)
def test_every_op_has_an_example(name):
    assert ">>> " in NAMES[name].__doc__


def run_doctest(text, namespace, name, line):
    examples = doctest.DocTestParser().get_doctest(text, namespace, name, None, line)
    report = []
    results = doctest.DocTestRunner(verbose=False).run(
        examples, out=report.append, clear_globs=False
    )
    assert results.failed == 0, "".join(report)
