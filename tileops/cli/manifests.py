"""What the commands on manifests share: their options, what they select, and how they report."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from tileops.cli.app import fail, note, one_of, registered

if TYPE_CHECKING:
    from tileops.workloads import verify

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


def selected(
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
    chosen = [found[name] for name in dict.fromkeys(cases or found)]
    unique = [None if x is None else list(dict.fromkeys(x)) for x in (tokens, routing, ops)]
    steps = verify.steps(chosen, *unique)  # type: ignore[arg-type]
    if not steps:
        raise fail(f"no case of {list(found)} has {ops} among its ops")
    return steps


def target_named(name: str | None) -> str:
    """Return the target of that name, or for None the one that suits this machine."""
    from tileops.workloads.demo import best_target

    return one_of("--target", name or best_target(), registered())


def command_line() -> str:
    """Return what was typed, for who reads the results: of files only the names."""
    parts = [re.sub(r"(^|=)/\S*/", r"\1", part) for part in sys.argv[1:]]
    return "python -m tileops " + shlex.join(parts)


def report_skipped(found: Sequence[tuple[str, str, int, str | None]]) -> None:
    """Say once for each reason what was not run."""
    reasons: dict[str, list[tuple[str, str, int]]] = {}
    for *call, reason in found:
        if reason is not None:
            reasons.setdefault(reason, []).append(tuple(call))  # type: ignore[arg-type]
    for reason, calls in reasons.items():
        op, case, tokens = calls[0]
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        note(f"skipped {op} of {case} at {tokens} tokens{more}: {reason}")


def check_writable(option: str, path: Path | None) -> None:
    """End the command in words if a file cannot be written: before the work, not after it."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise fail(f"{option}: {error}") from None


def write(path: Path, content: dict) -> None:
    """Write results as JSON; end the command in words if that fails."""
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
