"""A folder in which the blocks of the pages run: the files that they write, and a small plan that fragments are merged over."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_fxbucket.plan.toml_text import to_toml
from suites.docs.blocks import ROOT, TRIED, Block
from suites.plans.llama import llama

# Entries written out: fragments that name others are refused as they are loaded, and many are not run.
BASE = (
    llama("layers = 2, dim = 16", 4).replace("layers.*", "layers.[0-1]")
    + "[checks]\ngolden = false\n[run]\nworld = { dp_shard = 2 }\n"
)


def merged(fragment: str) -> str:
    """Give the text of a plan: ``fragment`` over the small plan, by table and key; one with a factory is a plan itself."""
    tables = tomllib.loads(fragment)
    plan: dict[str, Any] = {} if "factory" in tables.get("model", {}) else tomllib.loads(BASE)
    if "graph" in tables:
        del plan["model"]
    for name, value in tables.items():
        both = isinstance(value, Mapping) and isinstance(plan.get(name), Mapping)
        plan[name] = {**plan[name], **value} if both else value
    return "".join(f"{name} = {to_toml(value)}\n" for name, value in plan.items())


def files() -> dict[str, Block]:
    """Python files that the pages write, by path."""
    return {block.file: block for block in TRIED if block.language == "python" and block.file}


def modules() -> set[str]:
    """Modules of those files."""
    return {file.removesuffix(".py").replace("/", ".") for file in files()}


def runs(block: Block) -> bool:
    """Whether the items of a ``toml`` block can be run: what it names of the user's is in a file of the pages."""
    named = set(re.findall(r'"(mytrainer[\w.]*):', block.text))
    return bool(named) and named <= modules() and not block.file


def write_files(folder: Path) -> None:
    """Write the files of all pages, and what they and tests of pages use of this repository."""
    for name, block in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    goldens = folder / "golden" / "fixtures" / "plans"
    goldens.mkdir(parents=True)
    for golden in (ROOT / "golden" / "fixtures" / "plans").glob("llama.*"):
        shutil.copy(golden, goldens)
