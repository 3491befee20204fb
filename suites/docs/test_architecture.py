"""The page of the architecture names what there is: rooms and their layers, files, classes and functions."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module

import pytest

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


@pytest.mark.parametrize("name", [name for name in NAMED if name.endswith(".py")])
def test_a_file_that_the_page_names_is_there(name: str) -> None:
    assert (PACKAGE / name).is_file() if "/" in name else list(PACKAGE.rglob(name))


@pytest.mark.parametrize("name", [name for name in NAMED if re.fullmatch(r"\w+(/\w+)+", name)])
def test_a_folder_that_the_page_names_is_there(name: str) -> None:
    assert (PACKAGE / name).is_dir()


@pytest.mark.parametrize(
    "name", [name for name in NAMED if name.partition(".")[0] in ROOMS and re.fullmatch(r"\w+(\.\w+)+", name)]
)
def test_a_name_that_the_page_gives_can_be_imported(name: str) -> None:
    if name.endswith(".py"):
        return
    parts = name.split(".")
    inner = next(n for n in range(len(parts), 0, -1) if _is_module(parts[:n]))
    value: object = import_module(".".join(["pytest_fxbucket", *parts[:inner]]))
    for part in parts[inner:]:
        value = getattr(value, part)


def _is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
