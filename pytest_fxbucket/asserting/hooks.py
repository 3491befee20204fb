"""Hooks of the process that writes inline expectations into their files; and the refusal to do so with several workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.asserting.fixtures import EXPECT
from pytest_fxbucket.asserting.rewriting import EditQueue, Rewritten, counted

if TYPE_CHECKING:
    from pytest_fxbucket.controller import Controller
    from pytest_fxbucket.session import FxSession

_REFUSED = "fxbucket_refused"


class Expectations:
    """Takes edits from reports and writes each source file once, after the last test; after an interrupt nothing."""

    def __init__(self, fx: FxSession, controller: Controller) -> None:
        self._fx, self._controller = fx, controller
        self._queue = EditQueue(fx.options.rootdir)
        self._first: dict[str, tuple[str, str]] = {}  # path -> digest and node id of the first text
        self._done = Rewritten()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test sent, be it from this process or a worker."""
        told: dict[str, Any] = getattr(report, "fxbucket", {})
        self._queue.extend(told.get("edits", ()))
        for text in told.get("texts", ()):
            digest, test = self._first.setdefault(text["path"], (text["digest"], report.nodeid))
            if digest != text["digest"]:
                self._fx.to_write.clash(Path(text["path"]), test, report.nodeid)

    @pytest.hookimpl(tryfirst=True)
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
        lines = [f"rewritten: {options.shown(path)} ({counted(count)})" for path, count in self._done.files]
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

    The controller collects nothing, and a worker's own usage error would reach it as a crash.
    """
    workers = _workers(config)
    inline = [item for item in items if EXPECT in getattr(item, "fixturenames", ())] if workers > 1 else []
    if inline:
        config.workeroutput[_REFUSED] = refusal(workers, inline[0].nodeid)  # type: ignore[attr-defined]
        items.clear()


def refuse_worker(config: pytest.Config, nodeid: str) -> None:
    """Fail a test that came to the fixture where no one saw it coming, in a worker that is one of several."""
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
