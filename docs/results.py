"""Hook of the documentation build: the performance page, from the JSON files of `results/`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from statistics import geometric_mean

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tileops.workloads import plot
from tileops.workloads.report import OURS, Report, Row

RESULTS = Path("results")
MARK = "<!-- results -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a plot for each operator of each benchmark."""
    for path, report in _reports():
        for op, part in _by_op(report).items():
            image = BytesIO()
            plot.draw(part, image)
            files.append(File.generated(config, _image(path, op), content=image.getvalue()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Put the tables where the page says."""
    if page.file.src_uri != "performance.md":
        return markdown
    parts = [_benchmark(path, report) for path, report in _reports()]
    parts += [_verification(content) for _, content in _contents() if "bound" in content["rows"][0]]
    return markdown.replace(MARK, "\n\n".join(parts))


def _contents() -> Iterator[tuple[Path, dict]]:
    """Yield what `bench --json` and `verify --json` wrote, the newest first."""
    found = [(path, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    found = [(path, content) for path, content in found if content.get("rows")]
    yield from sorted(found, key=lambda item: item[1]["date"], reverse=True)


def _reports() -> Iterator[tuple[Path, Report]]:
    for path, content in _contents():
        if "rates" in content:
            yield path, Report.from_json(content)


def _by_op(report: Report) -> dict[str, Report]:
    """Split a report by operator; leave out what has no time."""
    timed = [row for row in report.rows if not math.isnan(row.microseconds)]
    ops = dict.fromkeys(row.op for row in timed)
    return {op: replace(report, rows=[row for row in timed if row.op == op]) for op in ops}


def _with_fp8(report: Report) -> bool:
    return any(row.fp8 for row in report.rows)


def _image(path: Path, op: str) -> str:
    return f"img/{path.stem}-{op.replace(' ', '-')}.png"


def _origin(machine: str, versions: dict[str, str], date: str, command: str) -> str:
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{machine}; {listed}; {date}.\n\n```console\n{command}\n```\n"


def _benchmark(path: Path, report: Report) -> str:
    rates = report.rates
    lines = [
        f"## {report.machine.split(',')[0]}, {report.date}: {path.stem}",
        _origin(report.machine, report.versions, report.date, report.command),
        f"In this run a dense product reached {rates.flops / 1e12:.0f} TFLOP/s"
        + (f", one of FP8 {rates.fp8_flops / 1e12:.0f}," if _with_fp8(report) else "")
        + f" and a copy {rates.bytes / 1e12:.2f} TB/s.",
    ]
    for op, part in _by_op(report).items():
        lines += [f"### {op}", f"![{op}: time over floor]({_image(path, op)})", _table(part)]
    return "\n\n".join(lines)


def _table(report: Report) -> str:
    calls: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in report.rows:
        calls.setdefault((row.case, row.tokens, row.routing), {})[row.by] = row
    peers = list(dict.fromkeys(row.by for row in report.rows if row.by != OURS))
    ratios: dict[str, list[float]] = {peer: [] for peer in peers}
    head = ["case", "T", "routing", "us", "TFLOP/s", "TB/s", "x floor", *(f"x {p}" for p in peers)]
    rows = []
    for (case, tokens, routing), by in calls.items():
        if OURS not in by:
            continue
        ours = by[OURS]
        spent = ours.microseconds
        cells = [case, str(tokens), routing, f"{spent:.1f}", f"{ours.flops / spent / 1e6:.1f}"]
        cells += [f"{ours.num_bytes / spent / 1e6:.2f}", f"{spent / ours.floor(report.rates):.2f}"]
        for peer in peers:
            ratio = spent / by[peer].microseconds if peer in by else math.nan
            if not math.isnan(ratio):
                ratios[peer].append(ratio)
            cells.append("" if math.isnan(ratio) else f"{ratio:.2f}")
        rows.append(cells)
    means = [f"{geometric_mean(found):.2f} x {p}" for p, found in ratios.items() if found]
    summary = f"{len(rows)} calls" + (f"; geometric mean {', '.join(means)}" if means else "")
    table = [head, ["---"] * 3 + ["---:"] * (len(head) - 3), *rows]
    body = "\n".join(f"    | {' | '.join(cells)} |" for cells in table)
    return f'??? note "{summary}"\n\n{body}'


def _verification(content: dict) -> str:
    lines = [
        f"## Verification: {content['machine'].split(',')[0]}, {content['date']}",
        _origin(*(content[name] for name in ("machine", "versions", "date", "command"))),
        "| op | dtype | target | cases | calls | largest error | its bound | failed | skipped |\n"
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = content["rows"]
    for key in dict.fromkeys((row["op"], row["dtype"], row["target"]) for row in rows):
        group = [row for row in rows if (row["op"], row["dtype"], row["target"]) == key]
        ran = [row for row in group if row["skipped"] is None]
        if not ran:
            continue
        failed = [
            row
            for row in ran
            if None in (row["error"], row["bound"]) or row["error"] > row["bound"]
        ]
        worst = max(ran, key=lambda row: math.inf if row["error"] is None else row["error"])
        cells = [*key, len({row["case"] for row in ran}), len(ran)]
        numbers = (worst["error"], worst["bound"])
        cells += ["none" if x is None else f"{x:.2e}" for x in numbers] + [len(failed)]
        cells += [len(group) - len(ran)]
        lines[-1] += f"\n| {' | '.join(map(str, cells))} |"
    return "\n\n".join(lines)
