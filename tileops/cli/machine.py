"""`demo` and `targets`: a first run, and what the machine can do."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.table import Table

from tileops import targets
from tileops.cli.app import app, fail, note, one_of, out, progress, quiet_compiler, registered
from tileops.compilation import CompileError
from tileops.targets import NoKernelError


@app.command("demo")
def run_demo(
    target: Annotated[
        str | None, typer.Option(help="Default: cuda on a Hopper GPU, else cpu.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Repeat it for several sizes. Default: 1, 2, 4, ... 64."),
    ] = None,
) -> None:
    """Run one layer of Qwen3-30B-A3B in bfloat16: its time, and its error against the reference."""
    able = registered("fused_moe_fwd")
    from tileops.workloads import demo

    quiet_compiler()
    table = Table("target", title="Qwen3-30B-A3B layer: 128 experts, 8 per token, bfloat16")
    for name in ("tokens", "milliseconds", "relative error", "allowed"):
        table.add_column(name, justify="right")
    target = one_of("--target", target or demo.best_target(), able)
    accurate = True
    try:
        with progress() as report:
            for row in demo.run(target, tokens or demo.TOKENS, report):
                accurate &= row.accurate
                table.add_row(
                    row.target,
                    str(row.tokens),
                    f"{row.milliseconds:.3f}",
                    f"{row.error:.2e}",
                    f"{row.bound:.2e}",
                    style=None if row.accurate else "red",
                )
    except (NoKernelError, CompileError) as error:
        raise fail(error) from None
    out.print(table)
    if not accurate:
        raise fail("a relative error is larger than allowed")


@app.command("targets")
def list_targets() -> None:
    """List the installed targets, what serves this machine, their operators, and load failures."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    installed = registered()
    table = Table("target", *(_device_title(device) for device in devices))
    notes: list[str] = []
    for name in installed:
        table.add_row(name, *(_service(name, device, notes) for device in devices))
    out.print(table)
    operators = Table("operator", *installed)
    for op in targets.operators():
        has = targets.registered_targets(op)
        operators.add_row(op, *("yes" if name in has else "-" for name in installed))
    out.print(operators)
    if len(devices) > 1:
        from tileops.kernels.cuda.device import no_compiler

        if (reason := no_compiler()) is not None:
            notes.append(f"cuda has only the kernels that are in the cache: {reason}")
    notes += [f"{name} did not load: {why}" for name, why in targets.load_failures().items()]
    for line in dict.fromkeys(notes):
        note(line)


def _device_title(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device}\n{torch.cuda.get_device_name(device)} ({major}.{minor})"


def _service(name: str, device: torch.device, notes: list[str]) -> str:
    """Return how ``name`` serves ``device``; what stands in its way goes into ``notes``."""
    if name in ("cpu", "cuda") and name != device.type:
        return "-"
    if name in targets.registered_targets("fused_topk_fwd"):
        logits = torch.zeros(1, 8, device=device)
        try:
            targets.find_kernel(
                "fused_topk_fwd", name, logits, None, 2, "softmax", False, 1, 1, 1.0
            )
        except NoKernelError as error:
            notes.append(str(error))
            return "no, see below"
    try:
        return "yes, by default" if targets.resolve(None, device) == name else "yes, if named"
    except ValueError as error:
        notes.append(str(error))
        return "yes, if named"
