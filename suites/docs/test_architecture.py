"""The page of the architecture names what there is: rooms and their layers, files, classes and functions."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module

from suites.docs.blocks import ROOT

PACKAGE = ROOT / "pytest_fxbucket"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}


def test_a_reader_finds_every_room_in_the_layer_that_lint_holds_it_to() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", TEXT, re.MULTILINE)
    shown = {room: int(layer) for layer, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    held = {room: number for number, layer in enumerate(layers, 1) for room in re.findall(r"\w+", layer)}
    assert shown == held
    assert set(shown) == ROOMS


def test_files_and_folders_that_the_page_names_are_there() -> None:
    files = [name for name in NAMED if name.endswith(".py")]
    folders = [name for name in NAMED if re.fullmatch(r"\w+(/\w+)+", name)]
    assert files
    assert folders
    gone = [name for name in files if not ((PACKAGE / name).is_file() if "/" in name else [*PACKAGE.rglob(name)])]
    assert gone + [name for name in folders if not (PACKAGE / name).is_dir()] == []


def test_names_that_the_page_gives_can_be_imported() -> None:
    names = [name for name in NAMED if name.partition(".")[0] in ROOMS and re.fullmatch(r"\w+(\.\w+)+", name)]
    assert names
    assert [name for name in names if not name.endswith(".py") and not _is_there(name.split("."))] == []


def _is_there(parts: list[str]) -> bool:
    inner = next(n for n in range(len(parts), 0, -1) if _is_module(parts[:n]))
    value: object = import_module(".".join(["pytest_fxbucket", *parts[:inner]]))
    for part in parts[inner:]:
        value = getattr(value, part, None)
    return value is not None


def _is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
