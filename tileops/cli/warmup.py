"""`warmup`: the kernels of manifests compiled ahead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tileops.cli.app import DTYPES, app, fail, note, one_of, progress_bar, registered
from tileops.cli.manifests import CaseNames, Dtype, Manifests, Ops, Tokens, selected

if TYPE_CHECKING:
    from tileops.compilation import Build


@app.command("warmup")
def run_warmup(
    manifests: Manifests = None,
    arch: Annotated[
        str, typer.Option(help="sm_90a, or a CPU's vector level such as x86-64-v3.")
    ] = "sm_90a",
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where kernels go. Default: TileLang's cache.")
    ] = None,
    op: Ops = None,
    case: CaseNames = None,
    tokens: Tokens = None,
    dtype: Dtype = "bfloat16",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: the number of processors.")
    ] = None,
) -> None:
    """Compile every kernel that the manifests' cases need, without a GPU, into a cache to ship."""
    registered()
    from tileops.compilation import CompileError, compile_builds
    from tileops.workloads import warmup

    arch = one_of("--arch", arch, warmup.architectures())
    dtype = one_of("--dtype", dtype, list(DTYPES))
    try:
        if cache_dir is not None:
            cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail(f"--cache-dir: {error}") from None
    steps = selected(manifests, case, op, tokens or warmup.TOKENS, ["uniform"])
    builds, refused = warmup.needed(steps, arch, DTYPES[dtype])
    counts = {True: 0, False: 0}
    with progress_bar(len(builds)) as done:

        def report(build: Build, compiled: bool) -> None:
            counts[compiled] += 1
            done(build.module.removeprefix("tileops.kernels."))

        try:
            processes = jobs or os.cpu_count() or 1
            compile_builds(builds, processes=processes, cache_dir=cache_dir, report=report)
        except CompileError as error:
            raise fail(error) from None
    for name, reason in refused.items():
        note(f"skipped {name}: {reason}")
    note(f"{arch}: {counts[True]} kernels compiled, {counts[False]} were in the cache already")
    if not builds:
        raise fail("no kernel serves any of these cases")
