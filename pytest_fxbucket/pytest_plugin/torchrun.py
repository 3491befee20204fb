"""A session under torchrun: all processes run the same items in one order and agree on each outcome; rank 0 alone reports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest

from pytest_fxbucket.pytest_plugin.pytest_internals import silence
from pytest_fxbucket.ranks.torchrun.member import DIFFERENCES, END, ITEMS, ItemProgress
from pytest_fxbucket.ranks.wire import cut

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.ranks.torchrun.member import Member
    from pytest_fxbucket.ranks.torchrun.rendezvous import Rendezvous, RendezvousRound

_COLLECT_LIMIT_S = 600.0
_END_LIMIT_S = 60.0
# Options and plugins that rank 0 alone has: they write report files, or choose and order items by pytest's cache of earlier
# runs, which may differ from machine to machine.
_REPORT_OPTIONS = ("xmlpath", "report_log", "htmlpath")
_CHOOSERS = ("lfplugin", "nfplugin", "stepwiseplugin")
_CHOOSING_OPTIONS = ("lf", "failedfirst", "newfirst", "stepwise")


@dataclass(frozen=True, slots=True)
class _Collected:
    """What one process has collected. Only rank 0 fills ``ids``, the items that all processes run."""

    errors: int
    ids: list[str]
    is_choice: bool
    """Whether ``ids`` may lack some of the items, since this machine's cache of earlier runs chose among them."""


class Torchrun:
    """The hooks of one of torchrun's processes."""

    def __init__(self, config: pytest.Config, member: Member) -> None:
        _refuse_xdist(config)
        self._config, self._member, self._is_first = config, member, member.rank == 0
        self._progress = ItemProgress()
        self._meeting: Rendezvous | None = None
        self._is_in_phase = False
        self._is_parted = False
        self._note = "has ended its session"
        self._odd_ends: list[str] = []
        if not self._is_first:
            for name in _REPORT_OPTIONS:
                if hasattr(config.option, name):
                    setattr(config.option, name, None)
            config.option.log_file = os.devnull  # without one pytest asks the ini file
            if config.option.basetemp:
                # pytest empties it, and another process may be at work there.
                config.option.basetemp = f"{config.option.basetemp}.{member.name}"

    def pools(self, warm: Sequence[str]) -> Pools:
        """Pools of which this process holds one rank; ``warm``: see Pools."""
        from pytest_fxbucket.ranks.torchrun.pool import TorchrunPools

        return TorchrunPools(self.meeting, self._progress, warm)

    @property
    def log_name(self) -> str | None:
        """Name of this rank's log, the only file that it writes; None on rank 0, which writes everything."""
        return None if self._is_first else self._member.name

    @property
    def meeting(self) -> Rendezvous:
        """The rendezvous, made when the session starts."""
        assert self._meeting is not None
        return self._meeting

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Meet the other processes; all ranks but 0 print nothing."""
        from pytest_fxbucket.errors import RankError
        from pytest_fxbucket.ranks.torchrun.rendezvous import Rendezvous

        if not self._is_first:
            self._be_quiet()
        try:
            self._meeting = Rendezvous(self._member)
        except RankError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.INTERRUPTED)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def pytest_report_header(self) -> str:
        """Say that there are others."""
        member = self._member
        nodes = f" on {member.nodes} nodes" if member.nodes > 1 else ""
        return f"fxbucket: torchrun, {member.world} ranks{nodes}; rank 0, on this one, reports and writes goldens"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> Generator[None]:
        """Have rank 0's items, in its order, everywhere."""
        # Two rounds, so that all processes end with the same sentence: first rank 0 tells its items, then each process tells
        # how its own differ. As a wrapper that begins early this sees the items as others have left them.
        yield
        ids = [item.nodeid for item in items]
        is_choice = any(self._config.getoption(name, False) for name in _CHOOSING_OPTIONS)
        said = self._exchange(ITEMS, _Collected(session.testsfailed, ids if self._is_first else [], is_choice))
        self._check_collected(said, session)
        first = cast("_Collected", said.entries[0])
        difference = "" if self._is_first else _difference(ids, first.ids, first.is_choice)
        differences = self._exchange(DIFFERENCES, difference)
        for rank, text in sorted(differences.entries.items()):
            if text:
                self._stop(f"the processes collected different items: {self.meeting.who(rank)} {text}")
        items[:] = _ordered(items, first.ids)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Count the item, so that topics of this one come after those of the one before."""
        self._progress.next_item()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        """Be in set-up."""
        yield from self._phase(0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """Be in the test itself."""
        yield from self._phase(1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        """Be in teardown."""
        yield from self._phase(2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Exchange the outcomes of a phase, and let each process report the one that was agreed."""
        report = yield
        meeting, session = self.meeting, item.session
        # A failure only because another process did not come to a job of ranks is an effect: that one's own failure is shown
        # first.
        mine = _outcome(report, meeting.was_left, str(session.shouldstop or session.shouldfail or ""))
        meeting.was_left = False
        outcomes, absent = self._report(mine)
        # A process that is gone fails the first phase without it and ends the session. Teardowns that still run are not failed
        # too.
        self._apply(agree(outcomes, [] if self._is_parted else absent, meeting.who), report)
        self._is_parted = self._is_parted or bool(absent)
        stops = absent + [f"{meeting.who(rank)}: {one.stop}" for rank, one in sorted(outcomes.items()) if one.stop]
        if stops and not mine.stop:
            session.shouldstop = meeting.gone_text() or stops[0]
        return report

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remember for the others why this process ends."""
        is_control_c = type(excinfo.value) is KeyboardInterrupt
        self._note = "was interrupted (Ctrl-C)" if is_control_c else f"has ended its session: {excinfo.value}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Give all processes one exit status, so that torchrun sees no difference between them."""
        from pytest_fxbucket.errors import RankError

        if self._meeting is None:
            return
        meeting, status = self._meeting, int(exitstatus)
        try:
            said = meeting.exchange(END, status, limit_s=_END_LIMIT_S, note=self._note)
        except RankError as error:
            meeting.leave(f"has ended its session: {error}")
            session.exitstatus = status or pytest.ExitCode.INTERRUPTED
            return
        statuses: dict[int, int] = said.entries  # type: ignore[assignment]  # what this sender puts in
        worst = next((one for _, one in sorted(statuses.items()) if one), 0)
        session.exitstatus = worst or (pytest.ExitCode.INTERRUPTED if said.missing else 0)
        odd = {rank: one for rank, one in sorted(statuses.items()) if one != statuses.get(0)}
        self._odd_ends = [f"{meeting.who(rank)} ended with exit status {one}" for rank, one in odd.items()]
        self._odd_ends += self._texts(said.missing)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the processes that ended with another status than rank 0, or did not say theirs."""
        lines = list(dict.fromkeys([*self._odd_ends, *([self._meeting.over] if self._meeting and self._meeting.over else [])]))
        if lines:
            terminalreporter.section("torchrun")
        for line in lines:
            terminalreporter.line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Let the process end once rank 0 has reported."""
        if self._meeting is None:
            return
        # It is ending; what torchrun says now must not change the exit status.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._is_first:
            sys.stdout.flush()
            self._meeting.say_done()
        elif not self._meeting.over:
            self._meeting.await_done(_END_LIMIT_S)
        gone, who = self._meeting.gone, self._meeting.who
        # Without rank 0 nobody prints a report: the first rank that is left says so, once.
        if 0 in gone and self._member.rank == min(set(range(self._member.world)) - gone.keys()):
            sys.stderr.write(f"\nfxbucket: {who(0)} is gone: {gone[0]}; it would have reported, so there is no report\n")
        self._meeting.close()

    def _phase(self, number: int) -> Generator[None]:
        self._progress.enter(number)
        self._is_in_phase = True
        try:
            yield
        finally:
            self._is_in_phase = False

    def _be_quiet(self) -> None:
        silence(self._config)
        manager = self._config.pluginmanager
        for name in (*_CHOOSERS, "fxbucket-controller", "fxbucket-expectations"):
            if manager.hasplugin(name):
                manager.unregister(name=name)

    def _exchange(self, topic: str, value: object) -> RendezvousRound:
        from pytest_fxbucket.errors import RankError

        try:
            said = self.meeting.exchange(topic, value, limit_s=_COLLECT_LIMIT_S)
        except RankError as error:
            self._stop(str(error))
        if said.missing:
            self._stop("; ".join(self._texts(said.missing)))
        return said

    def _check_collected(self, said: RendezvousRound, session: pytest.Session) -> None:
        # With errors of its own this process is ended by pytest, which shows them.
        if session.testsfailed or self._config.getoption("continue_on_collection_errors", False):
            return
        for rank, one in sorted(cast("dict[int, _Collected]", said.entries).items()):
            if one.errors:
                self._stop(f"{self.meeting.who(rank)} could not collect all its tests ({one.errors} errors)")

    def _stop(self, why: str) -> NoReturn:
        pytest.exit(why, returncode=pytest.ExitCode.INTERRUPTED)

    def _report(self, mine: AgreedOutcome) -> tuple[dict[int, AgreedOutcome], list[str]]:
        """How this phase ended in each process, and a sentence for each process that said nothing."""
        from pytest_fxbucket.errors import RankError
        from pytest_fxbucket.ranks.torchrun.rendezvous import PATIENCE_S

        try:
            said = self.meeting.exchange(self._progress.report(), mine.cut(), limit_s=PATIENCE_S)
        except RankError as error:
            # From here on this process waits for nobody: what is left of its items would hold it up each time.
            self.meeting.end(str(error))
            return {self._member.rank: mine}, [str(error)]
        return cast("dict[int, AgreedOutcome]", said.entries), self._texts(said.missing)

    def _texts(self, missing: Mapping[int, str]) -> list[str]:
        return [f"{self.meeting.who(rank)} {why}" for rank, why in sorted(missing.items())]

    def _apply(self, agreed: Agreed, report: pytest.TestReport) -> None:
        """Let the report say what was agreed; a failure of this process itself stays as pytest shows it."""
        if not agreed.has_failed:
            return
        # A failure that reads the same on the rank that is shown is this process's own as well.
        has_own = report.outcome == "failed" and not hasattr(report, "wasxfail")
        if has_own and (
            agreed.rank is None or agreed.rank == self._member.rank or report.longreprtext == "\n".join(agreed.lines[1:])
        ):
            if agreed.others:
                report.sections.append(("other ranks", "\n".join(agreed.others)))
            return
        report.outcome = "failed"
        report.longrepr = "\n".join(agreed.lines)
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        # What the test accepted here, in goldens and in its own text, must not be written, since it has failed elsewhere.
        with contextlib.suppress(AttributeError):
            for accepted in ("goldens", "edits"):
                report.fxbucket.pop(accepted, None)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        # torchrun sends SIGTERM to all processes once one has failed. Within a phase the test fails with the reason at once;
        # between phases the reason is only noted, and whatever waits next ends with it. The store may be in use by the code
        # that was interrupted, so only the kernel is asked who is gone.
        __tracebackhide__ = True
        from pytest_fxbucket.ranks.torchrun.rendezvous import RendezvousLost

        meeting = self.meeting
        if meeting.over:
            return
        meeting.end(meeting.gone_text() or "torchrun told this process to end (SIGTERM)")
        if self._is_in_phase:
            raise RendezvousLost(meeting.over)


def _refuse_xdist(config: pytest.Config) -> None:
    if config.getoption("tx", None) or config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "-n under torchrun: torchrun's processes run the same items together, workers of pytest-xdist run some each; "
            "leave out -n, or torchrun"
        )


def _outcome(report: pytest.TestReport, is_effect: bool, stop: str) -> AgreedOutcome:
    if hasattr(report, "wasxfail"):
        return AgreedOutcome("xpassed" if report.passed else "xfailed", stop=stop)
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        return AgreedOutcome("skipped", reason.removeprefix("Skipped: "), stop=stop)
    return AgreedOutcome(report.outcome, report.longreprtext if report.failed else "", is_effect, stop)


def _difference(mine: list[str], theirs: list[str], is_choice: bool) -> str:
    """How ``mine`` differ from rank 0's items; empty: not. With ``is_choice`` rank 0 may have left out some that are here."""
    # Counted, since one node id may be in a list twice.
    lacking, more = Counter(theirs) - Counter(mine), Counter(mine) - Counter(theirs)
    if lacking:
        return f"lacks {next(name for name in theirs if name in lacking)}, which rank 0 has"
    if more and not is_choice:
        return f"has {next(name for name in mine if name in more)}, which rank 0 lacks"
    return ""


def _ordered(items: list[pytest.Item], ids: list[str]) -> list[pytest.Item]:
    named: dict[str, deque[pytest.Item]] = {}
    # One node id may belong to several items: they keep the order among themselves that they have here.
    for item in items:
        named.setdefault(item.nodeid, deque()).append(item)
    return [named[name].popleft() for name in ids]


# The outcomes of one test on several processes, merged into one.


@dataclass(frozen=True, slots=True)
class AgreedOutcome:
    """How one phase of a test ended in one process. ``kind``: passed, failed, skipped, xfailed, xpassed."""

    kind: str
    text: str = ""
    """What is shown of a failure, or the reason of a skip."""
    is_effect: bool = False
    """Failed only because another process did not come."""
    stop: str = ""
    """Why this process will run no more tests, if so."""

    def cut(self) -> AgreedOutcome:
        """The same outcome with its texts shortened for sending; each says how much was left out."""
        return AgreedOutcome(self.kind, cut(self.text), self.is_effect, cut(self.stop))


@dataclass(frozen=True, slots=True)
class Agreed:
    """One outcome for all. ``rank``: the rank whose failure it is, if it is of one; ``lines``: what other ranks show."""

    has_failed: bool
    rank: int | None = None
    lines: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """A line for each other process that failed in another way."""


def agree(outcomes: Mapping[int, AgreedOutcome], absent: Sequence[str], who: Callable[[int], str]) -> Agreed:
    """The outcome of one phase. A failure on any rank fails all; one of a rank's own is shown before one of waiting in vain.

    ``absent``: a sentence for each process that said nothing, which is a failure too.
    """
    failed = {rank: one for rank, one in sorted(outcomes.items()) if one.kind == "failed"}
    if failed:
        rank = min(failed, key=lambda rank: (failed[rank].is_effect, rank))
        first = failed[rank]
        brief = _brief(first.text)
        others = [f"{who(other)}: {_brief(one.text)}" for other, one in failed.items() if _brief(one.text) != brief]
        absent = [line for line in absent if line not in first.text]
        return Agreed(True, rank, (f"on {who(rank)}:", *first.text.splitlines(), *absent), (*others, *absent))
    if absent:
        return Agreed(True, None, tuple(absent))
    if len({one.kind for one in outcomes.values()}) > 1:
        each = ", ".join(f"{who(rank)} {_ended(one)}" for rank, one in sorted(outcomes.items()))
        return Agreed(True, None, (f"the processes disagree: {each}",))
    return Agreed(False)


def _ended(one: AgreedOutcome) -> str:
    return f"{one.kind} ({one.text})" if one.text else one.kind


def _brief(text: str) -> str:
    """The line of a failure that says most: pytest marks those of the error with an E."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[0] if lines else "failed")
