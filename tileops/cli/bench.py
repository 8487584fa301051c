"""`bench`: the cases of manifests timed, beside their floors and peers."""

from __future__ import annotations

import math
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
    err,
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
    check_writable,
    command_line,
    report_skipped,
    selected,
    target_named,
    write,
)

if TYPE_CHECKING:
    from tileops.workloads.report import Report, Row


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
    """Time each case of the manifests, each op and number of tokens in a fresh process."""
    target, dtype = target_named(target), one_of("--dtype", dtype, list(DTYPES))
    steps = selected(manifests, case, op, tokens, routing)
    from tileops.workloads import bench
    from tileops.workloads.peers import PEERS

    peers = list(dict.fromkeys(peers or ()))
    for peer in peers:
        name, _, folder = peer.partition("=")
        one_of("--peers", name, PEERS)
        if (name == "tileops-0.1") is not bool(folder):
            raise fail(f"--peers {name}: " + ("takes no folder" if folder else "needs =FOLDER"))
    check_writable("--json", json_file)
    if plot is not None and find_spec("matplotlib") is None:
        raise fail("--plot needs one more package: python -m pip install matplotlib")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise fail(f"--plot must end in .png, .svg or .pdf, got {plot}")
    check_writable("--plot", plot)
    quiet_compiler()
    report: Report | None = None
    args = steps, target, peers or (), graph, DTYPES[dtype], command_line()
    with progress_bar(len(steps)) as done:
        for report, rows in bench.bench(*args):
            if rows:
                done(f"{rows[0].case}, {rows[0].tokens} tokens")
                for row in rows:
                    if row.failed:
                        err.print(f"failed: {row}", style="red", soft_wrap=True)
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
    if any(row.failed for row in report.rows):
        raise fail("a result is wrong, or a call failed")
    if all(row.skipped for row in report.rows):
        raise fail("every call was skipped")


def _print_bench(report: Report, peers: Sequence[str]) -> None:
    from tileops.workloads.report import OURS

    rates = report.rates
    fp8 = "" if math.isnan(rates.fp8_flops) else f" (FP8 {rates.fp8_flops / 1e12:.1f})"
    note(
        f"{report.machine}; {', '.join(f'{k} {v}' for k, v in report.versions.items())}; "
        f"{report.date}\ndense {rates.flops / 1e12:.1f}{fp8} TFLOP/s, "
        f"copy {rates.bytes / 1e12:.3f} TB/s"
    )
    table = Table("op", "case")
    for name in ("T", "routing", "us", "by", "TFLOP/s", "TB/s", "x floor"):
        table.add_column(name, justify="right")
    for name in peers:
        table.add_column(f"x {name}", justify="right")
    calls: dict[tuple, dict[str, Row]] = {}
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


def _ratio(ours: Row, peer: Row) -> str:
    return "" if peer.skipped is not None else f"{ours.microseconds / peer.microseconds:.2f}"
