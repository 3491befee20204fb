"""Whose goldens lie on disk: those that no plan and no test owns any more are found, and removed where that is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.golden.disk import Snapshot, files_below, locked, obstacle
from pytest_fxbucket.golden.store import FORMAT, GoldenStore, format_of


@dataclass(frozen=True, slots=True)
class Orphan:
    """A golden that nobody owns, and what is missing, as a clause."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a look at the golden folder found."""

    orphans: tuple[Orphan, ...] = ()
    has_seen_all: bool = False
    """Whether this run compared every golden that has an owner."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What pruning did: goldens that are gone, and a sentence for each that had to stay."""

    paths: tuple[Path, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class Owners:
    """Finds the owners of goldens on disk, as plan files and test files say.

    `has_run_whole` says whether every test of a test file ran to its end in this run: a golden of that file that none of them
    asked for is then nobody's. A file that was run in part, or not, owns all the goldens in its folder.
    """

    store: GoldenStore
    compared: Collection[Path]
    has_run_whole: Callable[[Path], bool] = lambda _: False
    _rows: dict[Path, dict[str | None, bool] | None] = field(default_factory=dict)

    def look(self) -> Found:
        """Look at every golden below the golden folder; other files, links, and goldens of a newer format are none of ours."""
        orphans, has_seen_all = [], True
        for path in goldens_below(self.store.root):
            reason = None if path in self.compared else self._lacking(path)
            if reason is not None:
                orphans.append(Orphan(path, reason))
            elif path not in self.compared:
                has_seen_all = False
        return Found(tuple(orphans), has_seen_all)

    def _lacking(self, golden: Path) -> str | None:
        """Return why nobody owns `golden`; None if somebody does."""
        reasons = list(self._of_plans(golden))
        if None in reasons:
            return None
        test = self.store.source_folder(golden).with_suffix(".py")
        if test.is_file():
            if not self.has_run_whole(test):
                return None
            reasons.append(f"no test of {self.store.shown(test)} asks for it")
        return next(filter(None, reasons), f"{self._expected(golden)} is not there")

    def _of_plans(self, golden: Path) -> Iterator[str | None]:
        """Yield for each plan file whose golden it could be why it is not, or None if it is."""
        for plan, row in self.store.candidates(golden):
            if not plan.is_file():
                continue
            rows, shown = self._rows_of(plan), self.store.shown(plan)
            if rows is None or rows.get(row):
                yield None
            elif row not in rows:
                yield f"{shown} has no matrix row {row}"
            else:
                yield f"checks.golden is false in {shown}" + (f" (matrix row {row})" if row else "")

    def _rows_of(self, plan: Path) -> dict[str | None, bool] | None:
        """Return matrix id -> whether its golden is checked; None of a plan that cannot be read, which owns all it might."""
        from pytest_fxbucket.plan.load import load_plans

        if plan not in self._rows:
            try:
                self._rows[plan] = {one.matrix_id: one.checks.golden for one in load_plans(plan)}
            except FxbucketError:
                self._rows[plan] = None
        return self._rows[plan]

    def _expected(self, golden: Path) -> str:
        folder = self.store.source_folder(golden)
        return self.store.shown(folder / f"{golden.stem}.toml")


def goldens_below(root: Path) -> list[Path]:
    """Return the files below `root` whose first line is that of a golden this version can read or once could."""
    files = (path for path in files_below(root) if path.suffix == ".txt" and not path.is_symlink())
    return [path for path in files if (number := format_of(path)) is not None and number <= FORMAT]


def prune(orphans: Iterable[Orphan], start: Snapshot) -> Removed:
    """Remove `orphans`, and folders that this leaves empty; what is not as it was at the `start` of the run stays."""
    paths: list[Path] = []
    errors = []
    if not start.root.is_dir():
        return Removed()
    with locked(start.root):
        for path in (orphan.path for orphan in orphans):
            change = start.change(path)
            reason = f"{path} {change} since the run began, so it stays" if change else obstacle(path, start.root)
            if reason is not None:
                errors.append(reason)
                continue
            try:
                path.unlink()
            except OSError as error:
                errors.append(f"{path} could not be removed: {error.strerror or error}")
                continue
            paths.append(path)
            _remove_empty(path.parent, start.root)
    return Removed(tuple(paths), tuple(errors))


def _remove_empty(folder: Path, root: Path) -> None:
    """Remove `folder` and those around it, up to `root`, as far as they are empty."""
    with contextlib.suppress(OSError):  # not empty
        while folder != root:
            folder.rmdir()
            folder = folder.parent
