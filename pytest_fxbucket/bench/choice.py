"""Which of several stored runs of a plan is the one to compare with, and what is passed over for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pytest_fxbucket.bench.comparable import comparable
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.stored_files import number_of, shown

_MOST = 3  # runs that were passed over and are named


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One measurement of a plan and the file that it was read from."""

    record: Record
    file: Path
    has_failed: bool = False
    """It was a regression against what it was compared with when it was taken, or that was never told."""

    @property
    def time(self) -> datetime:
        """When it was measured, by the clock of its machine."""
        return datetime.fromisoformat(self.record.time)

    def shown(self, rootdir: Path) -> str:
        """The file as people write it."""
        return shown(self.file, rootdir)


def by_age(runs: Sequence[StoredRun], now: datetime) -> list[StoredRun]:
    """The runs, oldest first: in a folder by the files' numbers, which ascend whatever clocks say; between folders by time.

    A run counts as no older than those before it in its folder. A time after `now` is not believed: such a run counts as of
    the time of the one before it, so that a clock that was wrong does not make it the newest for ever.
    """
    aged: list[tuple[datetime, int, datetime, str, StoredRun]] = []
    for folder in {run.file.parent for run in runs}:
        since = datetime.min.replace(tzinfo=UTC)
        for run in sorted((run for run in runs if run.file.parent == folder), key=lambda run: (number_of(run.file), run.time)):
            since = max(since, run.time) if run.time <= now else since
            aged.append((since, number_of(run.file), run.time, str(run.file), run))
    return [each[-1] for each in sorted(aged, key=lambda each: each[:-1])]


def best(runs: Sequence[StoredRun], record: Record) -> StoredRun | None:
    """The one to compare `record` with: comparable, of its pass, of a clean work tree, and the newest; earlier wishes first."""
    newest = reversed(by_age(runs, datetime.fromisoformat(record.time)))
    return min(newest, key=lambda run: _lacks(run, record), default=None)


def is_all_one_wishes(run: StoredRun, record: Record) -> bool:
    """Whether only a newer run could be better."""
    return not any(_lacks(run, record))


def passed_over(runs: Sequence[StoredRun], chosen: StoredRun, record: Record, rootdir: Path) -> str:
    """Say which of `runs`, newer than `chosen`, were not taken, and why; "" if there are none."""
    ordered = by_age(runs, datetime.fromisoformat(record.time))
    newer = ordered[: ordered.index(chosen) : -1]
    named = [f"{run.shown(rootdir)} ({_why(run, chosen, record)})" for run in newer[:_MOST]]
    more = f" and {len(newer) - _MOST} more" if len(newer) > _MOST else ""
    return f"newer, but passed over: {', '.join(named)}{more}" if named else ""


def _lacks(run: StoredRun, record: Record) -> tuple[bool, bool, bool]:
    return bool(comparable(run.record, record)), run.record.pass_name != record.pass_name, run.record.dirty


def _why(run: StoredRun, chosen: StoredRun, record: Record) -> str:
    """The first wish that `chosen` fulfils and the run does not."""
    told = (
        f"not comparable: {'; '.join(comparable(run.record, record))}",
        f"of pass {run.record.pass_name}",
        "of a dirty work tree",
    )
    pairs = zip(_lacks(run, record), _lacks(chosen, record), told, strict=True)
    return next((text for lacks, also, text in pairs if lacks > also), "a regression itself, or never judged")
