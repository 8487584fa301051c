"""`verify`: the cases of manifests against float64."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from tileops.cli.app import (
    DTYPES,
    JsonFile,
    app,
    err,
    fail,
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
    target, dtype = target_named(target), one_of("--dtype", dtype, list(DTYPES))
    steps = selected(manifests, case, op, tokens, routing)
    from tileops.workloads import report, verify

    quiet_compiler()
    check_writable("--json", json_file)
    rows: list[verify.Row] = []
    content = {
        "command": command_line(),
        "machine": report.machine(verify.device_of(target)),
        "versions": report.versions(),
        "date": report.today(),
    }
    with progress_bar(len(steps)) as done:
        for found in verify.verify(steps, target, DTYPES[dtype]):
            rows += found
            for row in found:
                if not row.passed:
                    err.print(f"failed: {row}", style="red", soft_wrap=True)
            done(f"{found[0].case}, {found[0].tokens} tokens")
            if json_file is not None:  # each step, so that a run cut short leaves its results
                write(json_file, content | {"rows": [asdict(row) for row in rows]})
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
    report_skipped([(row.op, row.case, row.tokens, row.skipped) for row in rows])
    failures = sum(not row.passed for row in rows)
    if failures:
        raise fail(f"{failures} of {len(rows)} calls failed")
    if all(row.skipped for row in rows):
        raise fail("every call was skipped")
