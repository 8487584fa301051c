"""The command line: `python -m tileops COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch

from tileops import targets
from tileops.compilation import CompileError
from tileops.targets import NoKernelError

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError:
    sys.exit("the command line needs two more packages: python -m pip install rich typer")

app = typer.Typer(
    name="python -m tileops",
    help="Mixture-of-Experts operators as TileLang kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on stderr what is being done: one line in place on a terminal."""
    if not err.is_terminal:
        yield lambda message: err.print(f"{message} ...", highlight=False)
        return
    with err.status("starting") as status:
        yield lambda message: status.update(f"{message} ...")


def fail(message: object) -> typer.Exit:
    """Print why a command cannot go on; return what it raises."""
    err.print(str(message), style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _registered(op: str | None = None) -> list[str]:
    """Return the targets that load; end the command in words where the checkout is incomplete."""
    try:
        return targets.registered_targets(op)
    except ImportError as error:
        raise fail(error) from None


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
    able = _registered("fused_moe_fwd")
    import tilelang

    from tileops.workloads import demo

    # its notes on what it compiles would run into the table and the progress line
    tilelang.set_log_level("WARNING")

    table = Table("target", title="Qwen3-30B-A3B layer: 128 experts, 8 per token, bfloat16")
    for name in ("tokens", "milliseconds", "relative error", "allowed"):
        table.add_column(name, justify="right")
    target = target or demo.best_target()
    if target not in able:
        raise fail(f"--target must be one of {able}, got {target!r}")
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
    """List the installed targets, which of them serve this machine, and which did not load."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    table = Table("target", *(_device_title(device) for device in devices))
    notes: list[str] = []
    for name in _registered():
        table.add_row(name, *(_service(name, device, notes) for device in devices))
    out.print(table)
    if len(devices) > 1:
        from tileops.kernels.cuda.device import no_compiler

        if (reason := no_compiler()) is not None:
            notes.append(f"cuda has only the kernels that are in the cache: {reason}")
    notes += [f"{name} did not load: {why}" for name, why in targets.load_failures().items()]
    for note in dict.fromkeys(notes):
        out.print(note, markup=False, highlight=False, soft_wrap=True)


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


if __name__ == "__main__":
    app()
