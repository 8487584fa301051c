"""`bench`: the cases of manifests timed, beside their floors and peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tileops.cli.app import (
    DTYPES,
    JsonFile,
    app,
    fail,
    note,
    one_of,
    out,
    progress_bar,
    quiet_compiler,
)
from tileops.cli.manifests import (
    CaseNames,
    Dtype,
    Manifests,
    Ops,
    Routings,
    Target,
    Tokens,
    command_line,
    report_skipped,
    selected,
    target_named,
    write,
)

if TYPE_CHECKING:
    from tileops.workloads import bench


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
    target, dtype = target_named(target), one_of("--dtype", dtype, list(DTYPES))
    steps = selected(manifests, case, op, tokens, routing)
    from tileops.workloads import bench
    from tileops.workloads.peers import PEERS

    for peer in peers or ():
        one_of("--peers", peer.partition("=")[0], PEERS)
    if plot is not None and find_spec("matplotlib") is None:
        raise fail("--plot needs one more package: python -m pip install matplotlib")
    quiet_compiler()
    report: bench.Report | None = None
    args = steps, target, peers or (), graph, DTYPES[dtype], command_line()
    with progress_bar(len(steps)) as done:
        for report, rows in bench.bench(*args):
            if rows:
                done(f"{rows[0].case}, {rows[0].tokens} tokens")
                if json_file is not None:  # each step, so that a run cut short leaves its results
                    write(json_file, asdict(report))
    assert report is not None
    _print_bench(report, [peer.partition("=")[0] for peer in peers or ()])
    if plot is not None:
        from tileops.workloads.plot import draw

        try:
            draw(report, plot)
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
    report_skipped([(f"{r.by} on {r.op}", r.case, r.tokens, r.skipped) for r in report.rows])


def _ratio(ours: bench.Row, peer: bench.Row) -> str:
    return "" if peer.skipped is not None else f"{ours.microseconds / peer.microseconds:.2f}"
