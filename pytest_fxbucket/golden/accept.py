"""Accepting goldens: texts are queued while items run and written once, at the end, by one process.

A worker of pytest-xdist hands its texts to the controller as plain dicts (``{"path": ..., "text": ...}``) on the
report of the item that gave them, so a worker that dies loses nothing that was reported, and no two processes write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.golden.disk import Snapshot, files_below, locked, not_written, obstacle, settle, sweep, write_whole

MODES = ("new", "changed", "all")


def accepts(mode: str | None, path: Path) -> bool:
    """Say whether accept mode `mode` lets `path` be written: new only if missing, changed only if there, all both."""
    return mode == "all" or mode == ("changed" if path.exists() else "new")


@dataclass(frozen=True, slots=True)
class Written:
    """What a flush did: goldens really changed on disk, and a sentence for each that could not be written."""

    paths: tuple[Path, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class AcceptQueue:
    """Golden texts that wait for the end of the run."""

    pending: dict[Path, str] = field(default_factory=dict)
    clashing: dict[Path, Sequence[str]] = field(default_factory=dict)
    """what was given two texts -> node ids of the tests that gave them, as far as they are known"""

    def add(self, path: Path, text: str) -> None:
        """Queue the whole file `text` that GoldenStore.render gave for `path`; GoldenError if it is damaged."""
        from pytest_fxbucket.golden.store import parse

        parse(text, str(path))
        if self.pending.setdefault(path, text) != text:
            self.clash(path)

    def clash(self, path: Path, *tests: str) -> None:
        """Have neither text of `path` written; `tests` gave them."""
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

    def flush(self, mode: str | None, start: Snapshot | None = None) -> Written:
        """Write what `mode` lets be written, each file whole or not at all, in path order, and forget it.

        What is not on disk as it was at the `start` of the run is somebody else's work, and left alone.
        """
        errors = [
            f"{path} was given {two_texts(tests)}, so neither is written; {_way_out(tests)}"
            for path, tests in sorted(self.clashing.items())
        ]
        waiting = [(path, text) for path, text in sorted(self.pending.items()) if path not in self.clashing]
        self.pending.clear()
        self.clashing.clear()
        paths: list[Path] = []
        with _held(start):
            for path, text in waiting:
                try:
                    if _write(path, text, mode, start):
                        paths.append(path)
                except OSError as error:
                    errors.append(not_written(path, str(path), error))
                except GoldenError as error:
                    errors.append(str(error))
        for folder in {path.parent for path in paths}:
            settle(folder)
        return Written(tuple(paths), tuple(errors))

    def abandon(self, reason: str) -> Written:
        """Write nothing and say so, if anything was queued."""
        count = len(self.drain())
        return Written(errors=(f"{count} accepted, but {reason}",)) if count else Written()


def two_texts(tests: Sequence[str]) -> str:
    """Name the tests that gave one place two texts."""
    return "two texts in one run" + (f", by {' and by '.join(dict.fromkeys(tests))}" if tests else "")


def is_one_parametrized(tests: Sequence[str]) -> bool:
    """Say whether `tests` are cases of one parametrized test."""
    return len({*tests}) > 1 == len({test.partition("[")[0] for test in tests})


def _way_out(tests: Sequence[str]) -> str:
    return "put the case into the name" if is_one_parametrized(tests) else "give each text a golden of its own"


@contextlib.contextmanager
def _held(start: Snapshot | None) -> Iterator[None]:
    """Keep other accepting runs out of the golden folder, and clean up after those that were killed."""
    if start is None or not start.root.is_dir():
        yield
        return
    with locked(start.root):
        sweep(files_below(start.root))
        yield


def _write(path: Path, text: str, mode: str | None, start: Snapshot | None) -> bool:
    """Write one golden; False if it is there already or no golden is to be written. Raises GoldenError and OSError."""
    from pytest_fxbucket.golden.store import check_not_newer

    def check() -> None:
        if start is not None and (change := start.change(path)):
            raise GoldenError(f"{path} {change} since the run began, so it is left alone; run again to compare with it")

    if _holds(path, text) or mode is None:
        return False
    if start is not None and (reason := obstacle(path, start.root)):
        raise GoldenError(reason)  # before the check, to which what lies behind a linked folder is somebody else's
    check()
    if not accepts(mode, path):
        raise GoldenError(f"{path} is {'there' if path.exists() else 'missing'}, and --fxbucket-accept={mode} leaves it so")
    check_not_newer(path)
    return write_whole(path, text, check)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_bytes() == text.encode()
