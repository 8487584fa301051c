"""`verify`, `bench` and `warmup`: manifests on a target."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.table import Table

from tileops.cli.app import (
    DTYPES,
    JsonFile,
    app,
    err,
    fail,
    note,
    one_of,
    out,
    progress_bar,
    quiet_compiler,
    registered,
)

if TYPE_CHECKING:
    from tileops.compilation import Build
    from tileops.workloads import bench, verify

Manifests = Annotated[
    list[Path] | None, typer.Argument(help="YAML files. Default: those of the library.")
]
Target = Annotated[str | None, typer.Option(help="Default: cuda on a Hopper GPU, else cpu.")]
Ops = Annotated[
    list[str] | None,
    typer.Option("--op", help="Only this operator, such as fused_moe_fwd. Repeat it for several."),
]
CaseNames = Annotated[
    list[str] | None, typer.Option("--case", help="Only this case. Repeat it for several.")
]
Tokens = Annotated[
    list[int] | None, typer.Option(min=1, help="Instead of the manifest's. Repeat for several.")
]
Routings = Annotated[
    list[str] | None,
    typer.Option("--routing", help="Instead of the manifest's. Repeat for several."),
]
Dtype = Annotated[str, typer.Option(help="Of tokens and weights.")]


def _steps(
    manifests: Sequence[Path] | None,
    cases: Sequence[str] | None,
    ops: Sequence[str] | None,
    tokens: Sequence[int] | None,
    routing: Sequence[str] | None,
) -> list[verify.Step]:
    """Read the manifests and list what is asked for; end the command in words if it is nothing."""
    from tileops.workloads import manifest, verify
    from tileops.workloads.layer import Routing
    from tileops.workloads.problems import PROBLEMS

    try:
        found = {case.name: case for case in manifest.load_all(manifests or ())}
    except manifest.ManifestError as error:
        raise fail(error) from None
    for name in cases or ():
        one_of("--case", name, list(found))
    for op in ops or ():
        one_of("--op", op, list(PROBLEMS))
    for kind in routing or ():
        one_of("--routing", kind, get_args(Routing))
    chosen = [found[name] for name in cases or found]
    steps = verify.steps(chosen, tokens, routing, ops)  # type: ignore[arg-type]
    if not steps:
        raise fail(f"no case of {list(found)} runs {ops}")
    return steps


def _target(name: str | None) -> str:
    from tileops.workloads.demo import best_target

    return one_of("--target", name or best_target(), registered())


def _command() -> str:
    return "python -m tileops " + shlex.join(sys.argv[1:])


@app.command("verify")
def run_verify(
    manifests: Manifests = None,
    target: Target = None,
    op: Ops = None,
    case: CaseNames = None,
    tokens: Tokens = None,
    routing: Routings = None,
    dtype: Dtype = "bfloat16",
    json_file: JsonFile = None,
) -> None:
    """Run each case of the manifests and compare the results with float64."""
    target, dtype = _target(target), one_of("--dtype", dtype, list(DTYPES))
    steps = _steps(manifests, case, op, tokens, routing)
    from tileops.workloads import bench, verify

    quiet_compiler()
    rows: list[verify.Row] = []
    with progress_bar(len(steps)) as done:
        for found in verify.verify(steps, target, DTYPES[dtype]):
            rows += found
            for row in found:
                if not row.passed:
                    err.print(f"failed: {row}", style="red", soft_wrap=True)
            done(f"{found[0].case}, {found[0].tokens} tokens" if found else "")
    table = Table("op", "case", "dtype", "target")
    for name in ("calls", "max error", "bound", "pass"):
        table.add_column(name, justify="right")
    for key in dict.fromkeys((row.op, row.case, row.dtype, row.target) for row in rows):
        group = [r for r in rows if (r.op, r.case, r.dtype, r.target) == key and not r.skipped]
        if group:
            # the row that is closest to its bound, or furthest beyond
            worst = max(group, key=lambda row: row.excess)
            passed = all(row.passed for row in group)
            numbers = f"{worst.error:.2e}", f"{worst.bound:.2e}", "yes" if passed else "NO"
            table.add_row(*key, str(len(group)), *numbers, style=None if passed else "red")
    out.print(table)
    _report_skipped([(row.op, row.case, row.tokens, row.skipped) for row in rows])
    if json_file is not None:
        _write(
            json_file,
            {
                "command": _command(),
                "machine": bench.machine(verify.device_of(target)),
                "versions": bench.versions(),
                "date": bench.today(),
                "rows": [asdict(row) for row in rows],
            },
        )
    failures = sum(not row.passed for row in rows)
    if failures:
        raise fail(f"{failures} of {len(rows)} calls failed")
    if all(row.skipped for row in rows):
        raise fail("every call was skipped")


def _report_skipped(found: Sequence[tuple[str, str, int, str | None]]) -> None:
    """Say once for each reason what was not run."""
    reasons: dict[str, list[tuple[str, str, int]]] = {}
    for *call, reason in found:
        if reason is not None:
            reasons.setdefault(reason, []).append(tuple(call))  # type: ignore[arg-type]
    for reason, calls in reasons.items():
        op, case, tokens = calls[0]
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        note(f"skipped {op} of {case} at {tokens} tokens{more}: {reason}")


def _write(path: Path, content: dict) -> None:
    try:
        path.write_text(json.dumps(_finite(content), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise fail(f"--json: {error}") from None


def _finite(value):
    """Return ``value`` with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.command("bench")
def run_bench(
    manifests: Manifests = None,
    target: Target = None,
    op: Ops = None,
    case: CaseNames = None,
    tokens: Tokens = None,
    routing: Routings = None,
    dtype: Dtype = "bfloat16",
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="torch, vllm, deep_gemm, triton_kernels, flashinfer, sonicmoe, or "
            "tileops-0.1=FOLDER with the public package in it. Repeat it for several."
        ),
    ] = None,
    graph: Annotated[
        bool | None,
        typer.Option(
            "--graph/--no-graph",
            help="Replay CUDA graphs. Default: for calls that take less than a millisecond.",
        ),
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of time over floor: a .png or .svg.")
    ] = None,
) -> None:
    """Time each case of the manifests, each number of tokens in a fresh process."""
    target, dtype = _target(target), one_of("--dtype", dtype, list(DTYPES))
    steps = _steps(manifests, case, op, tokens, routing)
    from tileops.workloads import bench
    from tileops.workloads.peers import PEERS

    for peer in peers or ():
        one_of("--peers", peer.partition("=")[0], PEERS)
    if plot is not None:
        try:
            from tileops.workloads import plot as plots
        except ModuleNotFoundError:
            raise fail("--plot needs one more package: python -m pip install matplotlib") from None
    quiet_compiler()
    report: bench.Report | None = None
    args = steps, target, peers or (), graph, DTYPES[dtype], _command()
    with progress_bar(len(steps)) as done:
        for report, rows in bench.bench(*args):
            if rows:
                done(f"{rows[0].case}, {rows[0].tokens} tokens")
                if json_file is not None:  # each step, so that a run cut short leaves its results
                    _write(json_file, asdict(report))
    assert report is not None
    _print_bench(report, [peer.partition("=")[0] for peer in peers or ()])
    if plot is not None:
        try:
            plots.draw(report, plot)
        except ValueError as error:
            raise fail(f"--plot: {error}") from None


def _print_bench(report: bench.Report, peers: Sequence[str]) -> None:
    from tileops.workloads.bench import OURS

    rates = report.rates
    note(
        f"{report.machine}; {', '.join(f'{k} {v}' for k, v in report.versions.items())}; "
        f"{report.date}\ndense {rates.flops / 1e12:.1f} TFLOP/s, copy {rates.bytes / 1e12:.3f} TB/s"
    )
    table = Table("op", "case")
    for name in ("T", "routing", "us", "by", "TFLOP/s", "TB/s", "x floor"):
        table.add_column(name, justify="right")
    for name in peers:
        table.add_column(f"x {name}", justify="right")
    calls: dict[tuple, dict[str, bench.Row]] = {}
    for row in report.rows:
        calls.setdefault((row.op, row.case, row.tokens, row.routing), {})[row.by] = row
    for key, by in calls.items():
        ours = by[OURS]
        if ours.skipped is not None:
            continue
        seconds = ours.microseconds / 1e6
        ratios = [_ratio(ours, by[name]) if name in by else "" for name in peers]
        table.add_row(
            *map(str, key),
            f"{ours.microseconds:.1f}",
            ours.how,
            f"{ours.flops / seconds / 1e12:.2f}",
            f"{ours.num_bytes / seconds / 1e12:.3f}",
            f"{ours.microseconds / ours.floor(rates):.2f}",
            *ratios,
        )
    out.print(table)
    _report_skipped([(f"{r.by} on {r.op}", r.case, r.tokens, r.skipped) for r in report.rows])


def _ratio(ours: bench.Row, peer: bench.Row) -> str:
    return "" if peer.skipped is not None else f"{ours.microseconds / peer.microseconds:.2f}"


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
    steps = _steps(manifests, case, op, tokens, ["uniform"])
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
