"""What the commands share: the application, the two consoles, and how a command fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tileops import targets

app = typer.Typer(
    name="python -m tileops",
    help="Mixture-of-Experts operators as TileLang kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# a log file is no 80 columns wide
out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def fail(message: object) -> typer.Exit:
    """Print why a command cannot go on; return what it raises."""
    err.print(str(message), style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


def note(message: object) -> None:
    """Print a line beside the table."""
    out.print(str(message), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on stderr what is being done: one line in place on a terminal."""
    if not err.is_terminal:
        yield lambda message: err.print(f"{message} ...", highlight=False)
        return
    with err.status("starting") as status:
        yield lambda message: status.update(f"{message} ...")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that counts a step as done and says what it was; a bar on a terminal."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=err) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, advance=1, description=done)


def quiet_compiler() -> None:
    """Keep TileLang's notes on what it compiles out of tables and progress lines."""
    import tilelang

    tilelang.set_log_level("WARNING")


def registered(op: str | None = None) -> list[str]:
    """Return the targets that load; end the command in words where the checkout is incomplete."""
    try:
        return targets.registered_targets(op)
    except ImportError as error:
        raise fail(error) from None


def one_of(option: str, value: str, known: Sequence[str]) -> str:
    """Return ``value`` if it is known; end the command in words if not."""
    if value not in known:
        raise fail(f"{option} must be one of {list(known)}, got {value!r}")
    return value
