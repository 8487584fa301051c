"""Reports: what a benchmark found, where, and with what."""

from __future__ import annotations

import math
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import tileops
from tileops.workloads.verify import Call

OURS = "tileops"


@dataclass(frozen=True)
class Rates:
    """What the machine reaches.

    Attributes:
        flops: FLOP/s of a dense matrix product.
        bytes: Bytes per second, read and written, of a copy.
        fp8_flops: FLOP/s of one of FP8 operands; NaN where the machine has none.
    """

    flops: float
    bytes: float
    fp8_flops: float = math.nan


@dataclass(frozen=True)
class Row(Call):
    """One implementation on one call.

    Attributes:
        by: ``"tileops"`` or the peer.
        microseconds: Median time, NaN where there is none.
        how: Taken from calls (``"eager"``), from replays of a CUDA graph, or on a ``"cpu"``.
        error: The largest relative error of an output row.
        flops: Operations that the call needs.
        num_bytes: Bytes that it must move.
        skipped: Why there is no time, or None.
        failed: Whether that is a fault of ours: a wrong result, or an error.
        fp8: Whether the operations are on FP8 operands.
    """

    by: str
    microseconds: float = math.nan
    how: str = ""
    error: float = math.nan
    flops: float = 0.0
    num_bytes: float = 0.0
    skipped: str | None = None
    failed: bool = False
    fp8: bool = False

    def floor(self, rates: Rates) -> float:
        """Return the least microseconds that the machine could take."""
        fp8 = self.fp8 and not math.isnan(rates.fp8_flops)
        flops = rates.fp8_flops if fp8 else rates.flops
        return 1e6 * max(self.flops / flops, self.num_bytes / rates.bytes)


@dataclass
class Report:
    """A run: where, with what, and what came out."""

    command: str
    machine: str
    versions: dict[str, str]
    date: str
    target: str
    rates: Rates
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Report:
        """Return the report whose fields a JSON file holds, None for what is not a number."""
        rows = [
            Row(**{k: math.nan if v is None and k != "skipped" else v for k, v in row.items()})
            for row in content["rows"]
        ]
        rates = {k: math.nan if v is None else v for k, v in content["rates"].items()}
        return cls(**{**content, "rates": Rates(**rates), "rows": rows})


def machine(device: torch.device) -> str:
    """Name the processor and, for a GPU, its driver."""
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        found = subprocess.run(query, capture_output=True, text=True, check=False)
        return f"{torch.cuda.get_device_name(device)}, driver {found.stdout.strip() or 'unknown'}"
    names = {"processor": platform.processor() or platform.machine()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names |= dict(
                (part.strip() for part in line.split(":", 1)) for line in lines if ":" in line
            )
    except OSError:
        pass
    name = names.get("model name", names["processor"])
    return f"{name}, {torch.get_num_threads()} threads"


def today() -> str:
    """Return the date in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"tileops": tileops.__version__, "python": platform.python_version()}
    for package in ("torch", "tilelang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
