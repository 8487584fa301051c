import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [p.name for p in (ROOT / "kernels").iterdir() if p.is_dir() and p.name[0] not in "._"]


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def sources(tmp_path):
    """A copy of what the package is built from: building writes beside it."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("tileops", "kernels", "workloads"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_target_folder_is_linked_into_the_package(folder):
    link = ROOT / "tileops" / "kernels" / folder
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / "kernels" / folder


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_folder_with_code_is_a_package():
    missing = [
        folder
        for top in ("tileops", *(f"kernels/{name}" for name in FOLDERS), "workloads")
        for folder in {path.parent for path in (ROOT / top).rglob("*.py")}
        if not (folder / "__init__.py").exists()
    ]
    assert missing == []


def test_importing_the_package_leaves_tilelang_and_transformers_alone():
    code = """
import sys, tileops.moe, tileops.nn, tileops.integrations.transformers
print([m for m in sys.modules if m.startswith(("tilelang", "transformers"))])
"""
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout.strip() == "[]"


def test_wheel_runs_in_a_new_environment(sources, tmp_path):
    build = run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path),
        cwd=sources,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tileops"}
    assert "tileops/py.typed" in names
    assert [f for f in FOLDERS if f"tileops/kernels/{f}/__init__.py" not in names] == []

    # torch and TileLang come from this environment, and the package must not
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    assert pip.returncode == 0, pip.stdout + pip.stderr
    packages = [path for path in sys.path if path.endswith("-packages")]
    code = f"""
import sys
sys.path += {packages}
import torch, tileops
from tileops.moe import FusedTopKFwdOp
print(tileops.__file__)
print(FusedTopKFwdOp(top_k=2, target="cpu")(torch.tensor([[0.0, 3.0, 1.0]]))[1].tolist())
"""
    result = run(python, "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    where, ids = result.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert ids == "[[1, 2]]"


def test_a_checkout_without_symbolic_links_says_so(sources):
    links = [path for path in sources.rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        target = link.readlink()
        link.unlink()
        link.write_text(str(target))
    code = "import tileops; tileops.targets.registered_targets()"
    result = run(sys.executable, "-c", code, cwd=sources)
    assert result.returncode == 1
    assert "symbolic links" in result.stderr.splitlines()[-1]
    command = run(sys.executable, "-m", "tileops", "demo", cwd=sources)
    assert command.returncode == 1
    assert "symbolic links" in command.stderr
    assert "Traceback" not in command.stderr
