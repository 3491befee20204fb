"""Edits of expectations, collected from all tests and written into source files by one process at the end; its hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.files import digest, locked, not_written, settle, sweep, write_whole
from pytest_fxbucket.golden.accept import is_one_parametrized, two_texts
from pytest_fxbucket.pytest_plugin.expectations.inline import EXPECT, Edit, shown_in
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.pytest_plugin.controller import Controller
    from pytest_fxbucket.pytest_plugin.session import FxSession


@dataclass(frozen=True, slots=True)
class RewriteOutcome:
    """What a flush did: (file, number of expectations rewritten in it), and a sentence for each that was not."""

    files: tuple[tuple[Path, int], ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class EditQueue:
    """Edits that wait for the end of the run."""

    rootdir: Path
    _edits: dict[str, list[Edit]] = field(default_factory=dict)

    def extend(self, edits: Iterable[Edit]) -> None:
        """Take the edits of a test."""
        for edit in edits:
            self._edits.setdefault(edit["file"], []).append(edit)

    def abandon(self, reason: str) -> RewriteOutcome:
        """Write nothing and say so, if anything was to be written."""
        count = len({(edit["file"], edit["start"]) for edits in self._edits.values() for edit in edits if _changes(edit)})
        self._edits.clear()
        return (
            RewriteOutcome(errors=(f"{counted(count, 'expectation')} accepted, but {reason}",)) if count else RewriteOutcome()
        )

    def flush(self) -> RewriteOutcome:
        """Write each file, whole or not at all, in order of their paths, and forget the edits.

        A literal that was given two values stays as it is, and so does a file that is not what it was when the run began.
        """
        files, errors = [], list[str]()
        for name, edits in sorted(self._edits.items()):
            chosen = self._agreed(edits, errors)
            if not chosen:
                continue
            try:
                with locked(Path(name).parent):
                    sweep(list(Path(name).parent.iterdir()))
                    _write(Path(name), shown_in(self.rootdir, name), chosen)
                files.append((Path(name), len(chosen)))
            except UsageError as error:
                errors.append(str(error))
            except OSError as error:
                errors.append(not_written(Path(name), shown_in(self.rootdir, name), error))
        self._edits.clear()
        return RewriteOutcome(tuple(files), tuple(errors))

    def _agreed(self, edits: Iterable[Edit], errors: list[str]) -> list[Edit]:
        """One edit for each literal that is to change; ``errors`` gets a sentence for each literal that was given two texts."""
        first: dict[int, Edit] = {}
        clashing: dict[int, Edit] = {}
        for edit in edits:
            known = first.setdefault(edit["start"], edit)
            if known["new"] != edit["new"]:
                clashing.setdefault(edit["start"], edit)
        for start, other in sorted(clashing.items()):
            one = first[start]
            tests = (one["test"], other["test"])
            own = "compare with an fxbucket_golden that has the case in its name"
            errors.append(
                f"{shown_in(self.rootdir, one['file'])}:{one['line']}: the expectation was given {two_texts(tests)}, so it is "
                f"left as it is; {own if is_one_parametrized(tests) else 'give each its own fxbucket_expect'}"
            )
        return [edit for start, edit in first.items() if start not in clashing and _changes(edit)]


def _changes(edit: Edit) -> bool:
    return bool(edit["old"] != edit["new"])


def _write(path: Path, shown: str, edits: list[Edit]) -> None:
    """Write ``edits`` into ``path``; UsageError if its text has changed since they were made, or it may not be written."""
    source = path.read_bytes()
    _refuse_another(source, shown, edits)
    if not path.stat().st_mode & 0o222:
        raise UsageError(f"{shown} is read-only, so its expectations are left as they are; make it writable and run again")
    line_end = b"\r\n" if b"\r\n" in source else b"\n"
    # From the last edit to the first, so that the places of those still to come stay right.
    for edit in sorted(edits, key=lambda one: -int(one["start"])):
        new = str(edit["new"]).encode().replace(b"\n", line_end)
        source = source[: edit["start"]] + new + source[edit["end"] :]
    # Checked once more when nothing but the rename is left: an editor may have saved the file meanwhile.
    write_whole(path, source.decode("utf-8"), lambda: _refuse_another(path.read_bytes(), shown, edits))
    settle(path.parent)


def _refuse_another(source: bytes, shown: str, edits: list[Edit]) -> None:
    if {digest(source)} != {edit["digest"] for edit in edits}:
        raise UsageError(f"{shown} was changed since the run began, so its expectations are left as they are; run again")


# Hooks of the process that writes inline expectations into their files; and the refusal to do so with several workers.


_REFUSED = "fxbucket_refused"


class ExpectationHooks:
    """Takes edits from reports and writes each source file once, after the last test; after an interrupt nothing."""

    def __init__(self, fx: FxSession, controller: Controller) -> None:
        self._fx, self._controller = fx, controller
        self._queue = EditQueue(fx.options.rootdir.resolve())
        self._first: dict[str, tuple[str, str]] = {}  # path -> digest and node id of the first text
        self._done = RewriteOutcome()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test sent, be it from this process or a worker."""
        sent: dict[str, Any] = getattr(report, "fxbucket", {})
        self._queue.extend(sent.get("edits", ()))
        for text in sent.get("texts", ()):
            digest, test = self._first.setdefault(text["path"], (text["digest"], report.nodeid))
            if digest != text["digest"]:
                self._fx.to_write.clash(Path(text["path"]), test, report.nodeid)

    # Not tryfirst: under torchrun all processes agree on how the session ended before anything is written, as with goldens.
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write the accepted expectations."""
        if self._controller.was_interrupted(session, exitstatus):
            self._done = self._queue.abandon("the run was interrupted")
            return
        self._done = self._queue.flush()
        if self._done.errors:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was rewritten, and what was not."""
        options = self._fx.options
        lines = [f"rewritten: {options.shown(path)} ({counted(count, 'expectation')})" for path, count in self._done.files]
        lines += [f"NOT rewritten: {error}" for error in self._done.errors]
        if lines:
            terminalreporter.section("fxbucket: inline expectations")
        for line in lines:
            terminalreporter.line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """End the run with a usage error where a worker has refused to accept."""
        refused = getattr(node, "workeroutput", {}).get(_REFUSED)
        if refused:
            raise pytest.UsageError(refused)


def refuse_workers(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop all items of a worker that is one of several if a test would rewrite its source, and tell the controller why.

    The controller collects nothing and cannot refuse by itself; a usage error raised in a worker would look like a crash to it.
    """
    workers = _workers(config)
    inline = [item for item in items if EXPECT in getattr(item, "fixturenames", ())] if workers > 1 else []
    if inline:
        config.workeroutput[_REFUSED] = refusal(workers, inline[0].nodeid)  # type: ignore[attr-defined]  # xdist puts it there
        items.clear()


def refuse_worker(config: pytest.Config, nodeid: str) -> None:
    """Fail a test that asks for the fixture only while it runs, in a worker that is one of several."""
    if _workers(config) > 1:
        pytest.fail(refusal(_workers(config), nodeid), pytrace=False)


def note_sources(fx: FxSession, items: Sequence[pytest.Item]) -> None:
    """Remember the files of tests with inline expectations as they are when the run begins."""
    for item in items:
        if EXPECT in getattr(item, "fixturenames", ()):
            fx.sources.note(item.path)


def refusal(workers: int, nodeid: str) -> str:
    """The sentence that says why nothing is accepted."""
    return (
        f"--fxbucket-accept with {workers} workers: {nodeid} uses {EXPECT}, whose accepted texts go into the test's own "
        "source, which is for one process alone; accept with -n 0 or -n 1, or leave such tests out"
    )


def _workers(config: pytest.Config) -> int:
    workerinput: dict[str, Any] = getattr(config, "workerinput", {})
    return int(workerinput.get("workercount", 0))
