"""Manifests: YAML files of cases, each a layer and what to run on it.

A manifest maps the name of a case to its fields, which `Case` lists. The numbers are a model's own,
and `source` says where they are published:

    qwen3-30b-a3b:
      source: https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
      layer: {num_experts: 128, top_k: 8, hidden_size: 2048, ffn_size: 768}
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from tileops.workloads.layer import Layer, Routing

FOLDER = Path(__file__).with_name("manifests")

INDEX_TOKENS = (16384, 65536)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class ManifestError(ValueError):
    """A manifest that cannot be used; the message names file, case and field."""


class Case(BaseModel):
    """One layer of a manifest.

    Attributes:
        name: The key under which it stands.
        source: Where its numbers are published.
        layer: Its shape and routing.
        tokens: Values of T.
        index_tokens: More of them for the ops that handle indices only.
        routing: How tokens choose experts.
        ops: Only these operators; None is all that the layer can run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    layer: Layer
    tokens: tuple[PositiveInt, ...] = TOKENS
    index_tokens: tuple[PositiveInt, ...] = INDEX_TOKENS
    routing: tuple[Routing, ...] = ("uniform", "zipf", "hot", "alike")
    ops: tuple[str, ...] | None = None


def load(path: Path) -> list[Case]:
    """Read a manifest.

    Raises:
        ManifestError: If there is no such file, it is no YAML, or a field is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"{path}: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ManifestError(f"{path}: must map names of cases to their fields")
    return [_case(path, str(name), fields) for name, fields in content.items()]


def _case(path: Path, name: str, fields: Any) -> Case:
    if not isinstance(fields, dict):
        raise ManifestError(f"{path}: {name}: must map fields to values, got {fields!r}")
    layer = fields.get("layer")
    if isinstance(layer, dict):
        fields = {**fields, "layer": {**layer, "name": name}}
    try:
        return Case.model_validate({**fields, "name": name})
    except ValidationError as error:
        lines = [_line(path, name, **detail) for detail in error.errors()]
        raise ManifestError("\n".join(lines)) from None


def _line(path: Path, name: str, *, loc: tuple, msg: str, input: Any, **_: Any) -> str:
    field = ".".join(map(str, loc)) or "fields"
    shown = "" if isinstance(input, dict) else f", got {input!r}"
    return f"{path}: {name}: {field}: {msg.removeprefix('Value error, ')}{shown}"


def load_all(paths: Iterable[Path] = ()) -> list[Case]:
    """Read several manifests, or all that come with the library.

    Raises:
        ManifestError: As ``load``, and if two cases share a name.
    """
    cases: dict[str, Case] = {}
    for path in paths or sorted(FOLDER.glob("*.yaml")):
        for case in load(path):
            if case.name in cases:
                raise ManifestError(f"{path}: {case.name}: another case has this name")
            cases[case.name] = case
    return list(cases.values())


@cache
def layers() -> dict[str, Layer]:
    """Return the layers of the manifests that come with the library, by name."""
    return {case.name: case.layer for case in load_all()}
