"""Hooks of the documentation build: a page for each public name, and formulas without a network."""

from __future__ import annotations

import html
import re

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

INDEX = """\
# API

Construct an op once with its settings, then call it with tensors. Every name on this page is
imported from `tileops.moe`; layers as modules are in [`tileops.nn`](modules.md), the functions that
choose a target in [`tileops.targets`](targets.md), and what Transformers needs in
[`tileops.integrations.transformers`](transformers.md).

| name | what it does |
| --- | --- |
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each op of `tileops.moe`, and one for what else a module of it exports."""
    moe = griffe.load("tileops", search_paths=["."], resolve_aliases=True)["moe"]
    pages: dict[str, list[str]] = {}
    index = INDEX
    for name in sorted(moe.exports, key=lambda name: (not name.endswith("FwdOp"), name)):
        page = name if name.endswith("FwdOp") else moe[name].target_path.split(".")[-2]
        pages.setdefault(page, []).append(name)
        summary = moe[name].docstring.value.splitlines()[0]
        index += f"| [`{name}`][tileops.moe.{name}] | {summary} |\n"
    api = next(part["API"] for part in config.nav or [] if "API" in part)
    _add(files, config, "index", index)
    for page, names in pages.items():
        heading = page if page in names else page.replace("_", " ").capitalize()
        if page in names:
            content = f"::: tileops.moe.{page}\n    options:\n      heading_level: 1\n"
        else:
            content = f"# {heading}\n\n" + "\n".join(f"::: tileops.moe.{name}\n" for name in names)
        _add(files, config, page, content)
        api.append({heading: f"api/{page}.md"})
    for heading in ("Modules", "Transformers", "Targets"):
        api.append({heading: f"api/{heading.lower()}.md"})
    return files


def _add(files: Files, config: MkDocsConfig, page: str, content: str) -> None:
    files.append(File.generated(config, f"api/{page}.md", content=content))


def on_page_content(content: str, **_: object) -> str:
    r"""Turn the formulas that arithmatex marks, `\(...\)` and `\[...\]`, into MathML."""
    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
        lambda found: convert(
            html.unescape(found[2]), display="block" if found[1] == "div" else "inline"
        ),
        content,
        flags=re.DOTALL,
    )
