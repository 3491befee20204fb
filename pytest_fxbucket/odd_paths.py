"""Plan files that no argument of pytest can name, since a path ends there at `[` and at `::`: collected beside arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from pytest_fxbucket.collect import plan_collector


class OddPaths:
    """Adds the items of such plan files to those that pytest collects."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Before others deselect."""
        items += [item for path in self._paths for item in plan_collector(path, session).collect()]


def as_arguments(paths: Iterable[Path], base: Path) -> tuple[list[str], list[Path]]:
    """`paths` as arguments of pytest that was started in `base`, and those that cannot be."""
    shown = {path: str(path) if can_be_named(str(path)) else os.path.relpath(path, base) for path in paths}
    odd = [path for path, text in shown.items() if not can_be_named(text)]
    return [text for path, text in shown.items() if path not in odd], odd


def can_be_named(nodeid: str) -> bool:
    """Say whether an argument of pytest can name the file whose node id, or path, that is."""
    return "[" not in nodeid and "::" not in nodeid
