"""The one process that sees every report: it keeps results, writes and prunes goldens at the end, and prints the summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.files import Snapshot
from pytest_fxbucket.golden.accept import WriteOutcome
from pytest_fxbucket.pytest_plugin.terminal import record, summary_lines

if TYPE_CHECKING:
    from pytest_fxbucket.golden.accept import FolderScan
    from pytest_fxbucket.pytest_plugin.options import Options
    from pytest_fxbucket.pytest_plugin.session import FxSession

_INTERRUPTED = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)


@dataclass(slots=True)
class GoldensOutcome:
    """What became of the goldens in the end."""

    written: WriteOutcome = field(default_factory=WriteOutcome)
    unowned: FolderScan | None = None
    """goldens that no plan or test owns; None if nobody looked for them"""
    removed: WriteOutcome | None = None
    """what --fxbucket-prune did; None without it"""
    report: list[str] = field(default_factory=list)
    """what became of the report, in sentences"""
    has_compared_nothing: bool = False
    """a comparison was asked for, and no step time was compared"""
    has_no_report: bool = False
    """a report was asked for and could not be written"""


class Controller:
    """Hooks of the one process that sees every report."""

    def __init__(self, fx: FxSession) -> None:
        self._fx = fx
        self._start: Snapshot | None = None
        self._compared: set[Path] = set()
        self._asked: set[Path] = set()
        self._broken_within: set[str] = set()
        """Node ids of tests of which a subtest did not pass: its report comes before the test's own, which may have passed."""
        self._outcomes: dict[str, str] = {}
        self._is_interrupted = self._has_stopped = self._has_reported = False
        self._done = GoldensOutcome()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Remember the goldens as they are now, so that one that changes during the run is left alone at its end."""
        options = self._fx.options
        if options.accept or options.prune:
            self._start = Snapshot.of(options.golden_dir)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what an item sent, be it from this process or a worker."""
        record(self._fx.results, report)
        if getattr(report, "context", None) is not None:
            self._broken_within |= {report.nodeid} if report.outcome != "passed" else set()
        elif report.when == "call":
            self._outcomes[report.nodeid] = report.outcome
        elif report.failed:
            # A teardown that fails comes behind the call and takes its place: the test did not run to its end.
            self._outcomes[report.nodeid] = "error"
        sent: Mapping[str, Any] = getattr(report, "fxbucket", {})
        self._fx.to_write.extend(sent.get("goldens", ()))
        self._compared.update(map(Path, sent.get("compared", ())))
        self._asked.update(map(Path, sent.get("asked", ())))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker of pytest-xdist knew of its collection."""
        sent: Mapping[str, list[str]] = getattr(node, "workeroutput", {}).get(OUTPUT, {})
        self._fx.whole_files |= {Path(path): ids for path, ids in sent.items()}

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell a real interrupt from pytest-xdist at --maxfail, which ends by one where a single process simply stops."""
        # pytest-xdist raises a KeyboardInterrupt of its own for that, told from others only by how its text begins.
        is_plain = isinstance(excinfo.value, pytest.exit.Exception) or type(excinfo.value) is KeyboardInterrupt
        self._is_interrupted = is_plain or not str(excinfo.value).startswith("stopping after ")
        self._has_stopped = not self._is_interrupted

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write accepted goldens, once, and look for those that nobody owns; after an interrupt nothing is touched."""
        fx, options = self._fx, self._fx.options
        if self.was_interrupted(session, exitstatus):
            self._done = GoldensOutcome(fx.to_write.abandon("the run was interrupted"))
            if options.report is not None:
                self._done.report = ["report NOT written: the run was interrupted"]
            return
        self._done = GoldensOutcome(fx.to_write.flush(options.accept, self._start))
        # A run that compared no golden, as one of other tests alone, says nothing of goldens.
        if not options.is_collect_only and (self._compared or options.prune):
            self._look()
        if options.report is not None and not options.is_collect_only and fx.is_reporting:
            self._report(options.report)
        # Only an option on the command line asks for a comparison now. The ini asks for one whenever step time is measured.
        if session.config.getoption("fxbucket_compare") and not options.is_collect_only and fx.is_reporting:
            self._done.has_compared_nothing = not fx.compared_step_times and not hasattr(session.config, "workerinput")
        # Any other status says already that something is wrong, and often more.
        if self._has_failed() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def was_interrupted(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> bool:
        """Say whether the run that ends was broken off, so that nothing may be written; --maxfail does not break it off."""
        is_odd = bool({exitstatus, session.exitstatus} & {*_INTERRUPTED}) and not self._has_stopped
        return self._is_interrupted or is_odd

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each plan, and what became of goldens."""
        self._has_reported = True
        lines = list(summary_lines(self._fx.results, terminalreporter.verbosity, self._always_shown))
        lines += golden_lines(self._done, self._fx.options)
        lines += self._done.report
        if self._done.has_compared_nothing:
            lines.append(
                f"--fxbucket-compare={self._fx.options.compare}: no step time was compared, since no item `benchmark` ran"
            )
        if lines:
            terminalreporter.section("fxbucket")
        for line in lines:
            terminalreporter.line(line)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Say what became of goldens where pytest prints no summary, as after a crash of its own."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and not self._has_reported:
            for line in golden_lines(self._done, self._fx.options):
                reporter.line(line)

    @property
    def _always_shown(self) -> Collection[str]:
        """Checks whose verdict is shown at any verbosity: with --fxbucket-compare the benchmark, also when it passes."""
        return ("benchmark",) if self._fx.options.compare is not None else ()

    def _look(self) -> None:
        from pytest_fxbucket.golden.accept import GoldenOwners, prune
        from pytest_fxbucket.golden.store import GoldenStore

        options = self._fx.options
        store = GoldenStore(options.golden_dir, options.rootdir)
        outcomes = {name: "failed" if name in self._broken_within else one for name, one in self._outcomes.items()}
        owners = GoldenOwners(store, self._compared, self._asked, lambda path: ran_whole(path, self._fx.whole_files, outcomes))
        self._done.unowned = found = owners.look()
        if options.prune and self._start is not None:
            self._done.removed = prune(found.orphans, self._start)

    def _report(self, folder: Path) -> None:
        from pytest_fxbucket.bench.report.page import write_report

        if not self._fx.measured:
            self._done.report = ["no report: no plan's step time was measured"]
            return
        try:
            index = write_report(folder, list(self._fx.measured.values()))[0]
        except BenchmarkError as error:
            self._done.report, self._done.has_no_report = [f"report NOT written: {error}"], True
            return
        count = len(self._fx.measured)
        self._done.report = [
            *self._fx.not_shown,
            f"report of {count} plan{'s' * (count != 1)}: {self._fx.options.shown(index)}",
        ]

    def _has_failed(self) -> bool:
        done = self._done
        if done.has_no_report or done.has_compared_nothing:
            return True
        # With --fxbucket-prune orphans are removed and do not fail the run; without it they do, once every other golden was
        # compared.
        if done.removed is not None:
            return bool(done.written.errors or done.removed.errors)
        return bool(done.written.errors or (done.unowned and done.unowned.orphans and done.unowned.has_seen_all))


def golden_lines(done: GoldensOutcome, options: Options) -> Iterator[str]:
    """Yield a line for each golden that was written or removed or could not be, and for each that nobody owns."""
    for what, outcome in (("written", done.written), ("removed", done.removed)):
        if outcome is not None:
            yield from (f"golden {what}: {options.shown(path)}" for path in outcome.paths)
            yield from (f"golden NOT {what}: {_short(error, options)}" for error in outcome.errors)
    # What was removed needs no advice on how to remove it.
    if done.removed is None and done.unowned and done.unowned.orphans:
        for orphan in done.unowned.orphans:
            yield f"golden that nobody owns: {options.shown(orphan.path)} ({orphan.reason})"
        fails = "every other golden was compared, so this fails the run; " if done.unowned.has_seen_all else ""
        yield f"{fails}to remove what nobody owns, run again with --fxbucket-prune"


def _short(sentence: str, options: Options) -> str:
    """Write paths as people read them: from rootdir."""
    return sentence.replace(f"{options.rootdir}/", "")


# Which test files with goldens of their own are run whole: only of these can it be said that no test asked for a golden.
#
# The process that collects knows this. Under pytest-xdist that is each worker, which tells the controller when it ends. A
# worker that dies tells nothing, but the others have collected the same.


OUTPUT = "fxbucket_whole_files"


class WholeFiles:
    """Hooks of the process that collects."""

    def __init__(self, fx: FxSession) -> None:
        self._fx = fx
        self._ids: dict[Path, list[str]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Keep the node ids of each file that has goldens and of which no test was taken away, by whatever means."""
        # As the outermost wrapper it has the items before and after other plugins take some away. With --lf pytest leaves tests
        # out while it collects a file, where nothing shows that they are missing, so then no file counts as whole.
        before = list(items)
        result = yield
        left = set(map(id, items))
        partial = {item.path for item in before if id(item) not in left or _depends_on_options(item)}
        is_choice = config.getoption("lf", False)
        by_file: defaultdict[Path, list[str]] = defaultdict(list)
        for item in items:
            by_file[item.path].append(item.nodeid)
        for path, ids in by_file.items():
            if not is_choice and path not in partial and self._has_goldens(path) and not _is_part_named(config, path):
                self._ids[path] = ids
        self._fx.whole_files = self._ids
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the controller, if this is a worker."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OUTPUT] = {str(path): ids for path, ids in self._ids.items()}

    def _has_goldens(self, path: Path) -> bool:
        options = self._fx.options
        if path.suffix != ".py" or not path.is_relative_to(options.rootdir):
            return False
        return (options.golden_dir / path.relative_to(options.rootdir).with_suffix("")).is_dir()


def ran_whole(path: Path, ids_of: Mapping[Path, Iterable[str]], outcomes: Mapping[str, str]) -> bool:
    """Say whether each test of the file ``path`` ran to its end; ``outcomes``: node id -> that of its call."""
    ids = ids_of.get(path)
    return ids is not None and all(outcomes.get(name) == "passed" for name in ids)


def _depends_on_options(item: pytest.Item) -> bool:
    """Say whether the number of tests like ``item`` depends on which plans the command line names."""
    return "fxbucket_plan" in getattr(item, "fixturenames", ()) and item.get_closest_marker("fxbucket_plan") is None


def _is_part_named(config: pytest.Config, path: Path) -> bool:
    """Say whether an argument names some tests of the file alone."""
    named = [arg.partition("::")[0] for arg in config.args if "::" in arg]
    files = [config.invocation_params.dir / name for name in named]
    # With --pyargs it is a module's name, so that any file may be meant.
    return any(not file.exists() or file.samefile(path) for file in files)
