"""Plots of a benchmark's report: the time over its floor against T, a line an implementation."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from tileops.workloads.report import OURS, Report

COLUMNS = 3
MARKERS = "osD^vPX*"


def panels(report: Report) -> list[tuple[str, str, str]]:
    """Return the case, operator and routing of each panel, in the order of the rows."""
    return list(dict.fromkeys((row.case, row.op, row.routing) for row in report.rows))


def draw(report: Report, file: Path | BytesIO) -> None:
    """Write a PNG or, by a path's suffix, another format that matplotlib knows.

    Raises:
        ValueError: If no row of the report has a time, or the suffix is of no known format.
    """
    timed = [row for row in report.rows if not math.isnan(row.microseconds)]
    shown = [key for key in panels(report) if any(_key(row) == key for row in timed)]
    if not shown:
        raise ValueError("nothing to plot: no row has a time")
    columns = min(COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure((4.6 * columns, 3.4 * lines + 0.5), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    names = sorted({row.by for row in timed}, key=lambda name: (name != OURS, name))
    ticks = sorted({row.tokens for row in timed})
    for axis, key in zip(axes, shown, strict=False):
        for index, name in enumerate(names):
            points = sorted(
                (row.tokens, row.microseconds / row.floor(report.rates))
                for row in timed
                if _key(row) == key and row.by == name
            )
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    marker=MARKERS[index % len(MARKERS)],
                    color=f"C{index}",
                    label=name,
                    linewidth=2 if name == OURS else 1.2,
                    markersize=4,
                )
        axis.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks], rotation=60, fontsize=7)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.set_title(f"{key[0]}, {key[2]} routing\n{key[1]}", fontsize=9)
        axis.set_xlabel("tokens")
        axis.set_ylabel("time / floor")
        axis.grid(alpha=0.3)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    handles = {
        label: line
        for axis in figure.axes
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    figure.savefig(file, dpi=150)


def _key(row) -> tuple[str, str, str]:
    return row.case, row.op, row.routing
