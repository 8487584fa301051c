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
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

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

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    source: str
    layer: Layer
    tokens: Annotated[list[PositiveInt], Field(min_length=1)] = list(TOKENS)
    index_tokens: list[PositiveInt] = list(INDEX_TOKENS)
    routing: Annotated[list[Routing], Field(min_length=1)] = list(get_args(Routing))
    ops: Annotated[list[str], Field(min_length=1)] | None = None

    @field_validator("ops")
    @classmethod
    def _known(cls, ops: list[str] | None) -> list[str] | None:
        from tileops.workloads.problems import PROBLEMS

        for op in ops or ():
            if op not in PROBLEMS:
                raise ValueError(f"{op!r} is none of {list(PROBLEMS)}")
        return ops


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key does not stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"{key!r} stands twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def load(path: Path) -> list[Case]:
    """Read a manifest.

    Raises:
        ManifestError: If there is no such file, it is no YAML, or a field is wrong.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"{path}: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ManifestError(f"{path}: must map names of cases to their fields")
    return [_case(path, str(name), fields) for name, fields in content.items()]


def _case(path: Path, name: str, fields: Any) -> Case:
    if not isinstance(fields, dict):
        raise ManifestError(f"{path}: {name}: must map fields to values, got {fields!r}")
    fields = {str(key): value for key, value in fields.items()}
    inside = ""
    try:
        if isinstance(layer := fields.get("layer"), dict):
            inside = "layer"
            given = {str(key): value for key, value in layer.items()}
            _refuse_name(path, name, given)
            fields["layer"] = Layer(**{**given, "name": name})
            inside = ""
        _refuse_name(path, name, fields)
        return Case.model_validate({**fields, "name": name})
    except ValidationError as error:
        lines = [_line(path, name, inside, **detail) for detail in error.errors()]
        raise ManifestError("\n".join(lines)) from None


def _refuse_name(path: Path, name: str, fields: dict[str, Any]) -> None:
    if "name" in fields:
        raise ManifestError(f"{path}: {name}: name: is the key under which the case stands")


def _line(path: Path, name: str, inside: str, *, loc: tuple, msg: str, input: Any, **_: Any) -> str:
    field = ".".join(map(str, (inside, *loc) if inside else loc)) or "fields"
    whole = isinstance(input, dict) or type(input).__name__ == "ArgsKwargs"
    shown = "" if whole else f", got {input!r}"
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
