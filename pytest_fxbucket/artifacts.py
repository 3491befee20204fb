"""What a failure leaves to look at: both graphs, the pass's report, each rank's log."""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.files import digest

if TYPE_CHECKING:
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.step.roles import Phase, StepGraph


_LONGEST = 80
_TRIES = 100
_elsewhere: dict[Path, tuple[Path, str]] = {}
"""For each folder of artifacts that cannot be used: the temporary one that is used instead, and why."""


class Folder:
    """The folder of one check of one plan; made when first written to, below a temporary one if it cannot be made in its place.

    Several processes may have the same folder. All but one of them are given ``log_of``, the name of their own log (without
    .log), which is all that they write and remove there.
    """

    def __init__(self, root: Path, plan: str, check: str, log_of: str | None = None) -> None:
        self._root, self._log_of = _elsewhere.get(root, (root, ""))[0], log_of
        self._of = plan, check
        self._names = _file_name(plan), _file_name(check)

    @property
    def path(self) -> Path:
        """Where it is, or is to be."""
        return self._root.joinpath(*self._names)

    def beside(self, name: str) -> Folder:
        """The folder ``name`` beside this one, for the same check run again on the way to its verdict."""
        plan, check = self._of
        return Folder(self._root, plan, f"{check}.{name}", self._log_of)

    def make(self) -> Path:
        """Create the folder, empty; its root is kept out of git."""
        self.clear()
        try:
            self._make_among_others()
        except OSError as error:
            self._root = _instead_of(self._root, str(error.strerror or error))
            self._make()
        return self.path

    def _make_among_others(self) -> None:
        """Make it again where another process clears its folder meanwhile: each does so once or twice before it begins."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._make()
        self._make()

    def _make(self) -> None:
        if link := self._link():
            raise OSError(f"{link.name} is a link, and nothing is written or emptied where that leads")
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        ignore = self._root / ".gitignore"
        if self._log_of is None and not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        # Only making a file shows whether files can be made here.
        with tempfile.TemporaryFile(dir=self.path):
            pass

    def _link(self) -> Path | None:
        """The first folder from the root on that is a link."""
        return next((one for one in (self._root, self.path.parent, self.path) if one.is_symlink()), None)

    def clear(self) -> None:
        """Remove the folder of an earlier run."""
        if self._link():
            return
        with contextlib.suppress(OSError):  # it may not be there, or the others' files may
            if self._log_of is None:
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                (self.path / f"{self._log_of}.log").unlink(missing_ok=True)
                self.path.rmdir()

    def write_graphs(self, step: StepGraph, passed: Mapping[int, Mapping[Phase, Passed]]) -> None:
        """Write the unbucketed graphs, the bucketed graphs by rank, and the pass's report."""
        if self._log_of is not None:
            return
        for phase, graph_module in step.graphs.items():
            self.write(f"{phase}.unbucketed.txt", str(graph_module.graph))
        for rank, graphs in passed.items():
            for phase, one in graphs.items():
                self.write(f"{phase}.bucketed.rank{rank}.txt", str(one.bucketed.graph))
                if one.bucketed.report is not None:
                    report = json.dumps(one.bucketed.report.to_dict(), indent=2)
                    self.write(f"{phase}.report.rank{rank}.json", report)

    def file(self, name: str) -> Path | None:
        """Path of a file to write, in the folder, which is there then; None if that is another process's business."""
        if self._log_of is not None:
            return None
        if not self.path.exists():
            self.make()
        return self.path / name

    def write(self, name: str, text: str) -> None:
        """Write a file, unless that is another process's business."""
        if (path := self.file(name)) is not None:
            path.write_text(text + "\n", encoding="utf-8")


def why_elsewhere(path: Path) -> str:
    """Why ``path`` lies below a temporary folder, as a clause; empty if it does not."""
    for root, (folder, why) in _elsewhere.items():
        if path.is_relative_to(folder):
            return f"since {root} cannot be used: {why}"
    return ""


def _instead_of(root: Path, why: str) -> Path:
    if root not in _elsewhere:
        _elsewhere[root] = Path(tempfile.mkdtemp(prefix="fxbucket-")), why
        atexit.register(_remove_unused, _elsewhere[root][0])
    return _elsewhere[root][0]


def _remove_unused(folder: Path) -> None:
    """Remove a temporary folder in which nothing is left to look at."""
    if not any(one.is_file() and one.name != ".gitignore" for one in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def _file_name(text: str) -> str:
    """``text`` as the name of one file: no two texts have the same, and none is too long."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    if plain == text and len(text) <= _LONGEST:
        return text
    return f"{plain[:_LONGEST]}-{digest(text.encode('utf-8', 'surrogateescape'))[:8]}"
