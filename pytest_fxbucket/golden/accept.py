"""Accepting goldens, by one process at the end of a run; and goldens that no plan and no test owns any more.

A worker of pytest-xdist hands its texts to the controller as plain dicts (``{"path": ..., "text": ...}``), each on the report
of the item that gave it. So a worker that dies loses nothing that was reported, and only one process writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_fxbucket.commit import Repository
from pytest_fxbucket.errors import FxbucketError, GoldenError
from pytest_fxbucket.files import Snapshot, files_below, locked, not_written, obstacle, settle, sweep, write_whole
from pytest_fxbucket.golden.store import FORMAT, GoldenStore, check_not_newer, format_of, parse

MODES = ("new", "changed", "all")


def accepts(mode: str | None, path: Path) -> bool:
    """Say whether accept mode ``mode`` lets ``path`` be written: new only if missing, changed only if there, all both."""
    return mode == "all" or mode == ("changed" if path.exists() else "new")


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What was done on disk: goldens that were written, or removed, and a sentence for each that could not be."""

    paths: tuple[Path, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class AcceptQueue:
    """Golden texts that wait for the end of the run."""

    pending: dict[Path, str] = field(default_factory=dict)
    clashing: dict[Path, Sequence[str]] = field(default_factory=dict)
    """Path that was given two different texts -> node ids of the tests that gave them, as far as they are known."""

    def add(self, path: Path, text: str) -> None:
        """Queue the whole file ``text`` that GoldenStore.render gave for ``path``; GoldenError if it is damaged."""
        # Damage is said here, where it is known who gave the text, and not at the end of the run.
        parse(text, str(path))
        if self.pending.setdefault(path, text) != text:
            self.clash(path)

    def clash(self, path: Path, *tests: str) -> None:
        """Have neither text of ``path`` written; ``tests`` gave them."""
        self.clashing[path] = self.clashing.get(path) or tests

    def extend(self, entries: Iterable[Mapping[str, str]]) -> None:
        """Queue entries that another queue drained."""
        for entry in entries:
            self.add(Path(entry["path"]), entry["text"])

    def drain(self) -> list[dict[str, str]]:
        """Return what is queued as plain dicts, and forget it."""
        entries = [{"path": str(path), "text": text} for path, text in self.pending.items()]
        self.pending.clear()
        return entries

    def flush(self, mode: str | None, start: Snapshot | None = None) -> WriteOutcome:
        """Write the queued goldens that ``mode`` allows, each file whole or not at all, in path order; then forget them all.

        A file that changed on disk since the ``start`` of the run is somebody else's work, and left alone.
        """
        errors = [
            f"{path} was given {two_texts(tests)}, so neither is written; "
            + ("put the case into the name" if is_one_parametrized(tests) else "give each text a golden of its own")
            for path, tests in sorted(self.clashing.items())
        ]
        waiting = [(path, text) for path, text in sorted(self.pending.items()) if path not in self.clashing]
        self.pending.clear()
        self.clashing.clear()
        paths: list[Path] = []
        with _accepting_alone(start):
            for path, text in waiting:
                try:
                    if _write(path, text, mode, start):
                        paths.append(path)
                except OSError as error:
                    errors.append(not_written(path, str(path), error))
                except GoldenError as error:
                    errors.append(str(error))
        # Once for each folder, behind all writes: it syncs the directory, which is what makes a rename outlive a crash.
        for folder in {path.parent for path in paths}:
            settle(folder)
        return WriteOutcome(tuple(paths), tuple(errors))

    def abandon(self, reason: str) -> WriteOutcome:
        """Write nothing and say so, if anything was queued."""
        count = len(self.drain())
        return WriteOutcome(errors=(f"{count} accepted, but {reason}",)) if count else WriteOutcome()


def two_texts(tests: Sequence[str]) -> str:
    """Name the ``tests`` that gave two texts to one golden, as part of a sentence."""
    return "two texts in one run" + (f", by {' and by '.join(dict.fromkeys(tests))}" if tests else "")


def is_one_parametrized(tests: Sequence[str]) -> bool:
    """Say whether ``tests`` are cases of one parametrized test."""
    return len({*tests}) > 1 == len({test.partition("[")[0] for test in tests})


@contextlib.contextmanager
def _accepting_alone(start: Snapshot | None) -> Iterator[None]:
    """Keep other accepting runs out of the golden folder, and clean up after those that were killed."""
    if start is None or not start.root.is_dir():
        yield
        return
    with locked(start.root):
        sweep(files_below(start.root))
        yield


def _write(path: Path, text: str, mode: str | None, start: Snapshot | None) -> bool:
    """Write one golden; False if it is there already or no golden is to be written. Raises GoldenError and OSError."""

    def check() -> None:
        if start is not None and (change := start.change(path)):
            raise GoldenError(f"{path} {change} since the run began, so it is left alone; run again to compare with it")

    is_there = path.is_file() and not path.is_symlink() and path.read_bytes() == text.encode()
    if is_there or mode is None:
        return False
    if start is not None and (reason := obstacle(path, start.root)):
        raise GoldenError(reason)  # before the check, to which what lies behind a linked folder is somebody else's
    check()  # ``write_whole`` calls it again right before the rename: somebody may write in between
    if not accepts(mode, path):
        raise GoldenError(f"{path} is {'there' if path.exists() else 'missing'}, and --fxbucket-accept={mode} leaves it so")
    check_not_newer(path)
    return write_whole(path, text, check)


# Owners of the goldens on disk: goldens that no plan and no test owns any more are found, and removed where that is asked for.
#
# A golden counts as owned wherever that is in doubt: if a plan cannot be read, or a test file was run in part or not at all.


@dataclass(frozen=True, slots=True)
class Orphan:
    """A golden that nobody owns, and why, as a clause."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class FolderScan:
    """What a look at the golden folder found."""

    orphans: tuple[Orphan, ...] = ()
    has_seen_all: bool = False
    """Whether this run compared every golden that has an owner."""


@dataclass(slots=True)
class GoldenOwners:
    """Finds the owners of goldens on disk, as plan files and test files say.

    ``has_run_whole`` says whether every test of a test file ran to its end in this run. Then a golden of that file that no test
    asked for has no owner. A test file that was run in part, or not at all, owns all goldens in its folder.
    """

    store: GoldenStore
    compared: Collection[Path]
    asked: Collection[Path] = ()
    """Goldens that a test has asked for, be it that it then compared nothing with them: these have an owner, too."""
    has_run_whole: Callable[[Path], bool] = lambda _: False
    _rows: dict[Path, dict[str | None, bool] | None] = field(default_factory=dict)

    def look(self) -> FolderScan:
        """Look at every golden below the golden folder; other files, links, and goldens of a newer format are ignored."""
        orphans, has_seen_all = [], True
        for path in goldens_below(self.store.root):
            reason = None if path in self.compared or path in self.asked else self._lacking(path)
            if reason is not None and not any(map(_is_left_out, self._owners(path))):
                orphans.append(Orphan(path, reason))
            elif path not in self.compared:
                has_seen_all = False
        return FolderScan(tuple(orphans), has_seen_all)

    def _owners(self, golden: Path) -> Iterator[Path]:
        """Plan files and the test file that ``golden`` could belong to, on disk or not."""
        yield from (plan for plan, _ in self.store.candidates(golden))
        yield self._test_file(golden)

    def _test_file(self, golden: Path) -> Path:
        folder = self.store.source_folder(golden)
        return folder.with_name(f"{folder.name}.py")  # whose own name may have dots

    def _lacking(self, golden: Path) -> str | None:
        """Return why nobody owns ``golden``; None if somebody does."""
        reasons = list(self._of_plans(golden))
        if None in reasons:
            return None
        test = self._test_file(golden)
        if test.is_file():
            if not self.has_run_whole(test):
                return None
            reasons.append(f"no test of {self.store.shown(test)} asks for it")
        plan = self.store.source_folder(golden) / f"{golden.stem}.toml"
        return next(filter(None, reasons), f"{self.store.shown(plan)} is not there")

    def _of_plans(self, golden: Path) -> Iterator[str | None]:
        """Yield, for each plan file on disk that ``golden`` could belong to by its name, why it does not; None if it does."""
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
        """Return matrix id -> whether its golden is checked; None for a plan that cannot be read, and so owns what it might."""
        from pytest_fxbucket.plan.load import load_plans

        if plan not in self._rows:
            try:
                self._rows[plan] = {one.matrix_id: one.checks.golden for one in load_plans(plan)}
            except FxbucketError:
                self._rows[plan] = None
        return self._rows[plan]


def _is_left_out(path: Path) -> bool:
    """Whether a sparse checkout leaves ``path`` out, which is an owner all the same."""
    if path.exists():
        return False
    try:
        repository = Repository.of(path, "pruning")
        return bool(repository.left_out(repository.path_of(path)))
    except FxbucketError:  # no git, or no repository
        return False


def goldens_below(root: Path) -> list[Path]:
    """Return the files below ``root`` whose first line is that of a golden this version can read or once could."""
    files = (path for path in files_below(root) if path.suffix == ".txt" and not os.path.islink(path))
    return [path for path in files if (number := format_of(path)) is not None and number <= FORMAT]


def prune(orphans: Iterable[Orphan], start: Snapshot) -> WriteOutcome:
    """Remove ``orphans``, and folders that this leaves empty; a file that changed since the ``start`` of the run stays."""
    paths: list[Path] = []
    errors = []
    if not start.root.is_dir():
        return WriteOutcome()
    # Under the lock of accepting runs, which would write what is removed here.
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
    return WriteOutcome(tuple(paths), tuple(errors))


def _remove_empty(folder: Path, root: Path) -> None:
    """Remove ``folder`` and its parents below ``root``, as far as they are empty."""
    with contextlib.suppress(OSError):  # not empty
        while folder != root:
            folder.rmdir()
            folder = folder.parent
