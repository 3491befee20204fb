"""Stored runs of a plan: those in pytest-benchmark's folder, of all kinds of machines, and in files that it wrote elsewhere.

pytest-benchmark passes over a file that it cannot read with a warning. Here a damaged file is an error wherever it may be the
one that is asked for: an older run in its place would hide a loss, or show one that is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pytest_fxbucket.bench.choice import StoredRun, best, by_age, is_all_one_wishes, passed_over
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.same_files import same_files
from pytest_fxbucket.bench.stored_files import number_of, records_in, run_files, shown
from pytest_fxbucket.commit.repository import Repository
from pytest_fxbucket.errors import BenchmarkError

LATEST = "latest"
OPTION = "--fxbucket-compare"


@dataclass(frozen=True, slots=True)
class Found:
    """The stored run that is meant, if any, and what to say of the choice."""

    run: StoredRun | None
    note: str = ""


def find(what: str, record: Record, folder: Path, rootdir: Path) -> Found:
    """The stored run of `record`'s plan that `what` names: "latest", an absolute path, or a commit.

    Of several it is one that is comparable, of the same pass, of a clean work tree, and the newest; earlier wishes come first.
    The order of age is that of the files' numbers in a folder, and of times between folders (`by_age`). `folder` is
    pytest-benchmark's storage. Raises BenchmarkError for a file that is damaged or of another version and may hold the run that
    is meant, UsageError for a commit that is unknown.
    """
    if what == LATEST:
        return _latest(record, folder, rootdir)
    file = Path(what)
    if file.is_absolute():
        runs = [StoredRun(read, file, failed) for read, failed in records_in(file, record, rootdir)]
        return _best(runs, record, rootdir) or Found(
            None, f"{shown(file, rootdir)} holds no run of {record.title}; {_store(record)}"
        )
    return _of_commit(what, record, folder, rootdir)


def runs_of(record: Record, folder: Path, rootdir: Path) -> tuple[list[Record], list[str]]:
    """All stored runs of the plan of `record`, oldest first, and a sentence for each file that cannot be read."""
    runs, damaged = _stored(record, folder, rootdir)
    ordered = by_age(runs, datetime.fromisoformat(record.time))
    return [run.record for run in ordered], [str(each.error) for each in damaged]


def _latest(record: Record, folder: Path, rootdir: Path) -> Found:
    """The newest run that was no regression itself: a loss that is stored does not become what later runs are measured by."""
    runs, damaged = _stored(record, folder, rootdir)
    chosen = best([run for run in runs if not run.has_failed], record)
    _refuse_damage([each for each in damaged if each.may_be_meant(chosen, runs, record)])
    if chosen is not None:
        return Found(chosen, passed_over(runs, chosen, record, rootdir))
    where = shown(folder, rootdir)
    if runs:
        return Found(
            None,
            f"all stored runs of {record.title} in {where} are regressions, or were never judged; {_store(record)} and without "
            f"{OPTION}",
        )
    return Found(None, f"there is no stored run of {record.title} in {where}; {_store(record)}")


def _of_commit(what: str, record: Record, folder: Path, rootdir: Path) -> Found:
    """The run of that very commit; else of one that differs in stored runs only. Any damaged file may hold it."""
    repository = Repository.of(rootdir / record.plan, OPTION)
    commit = repository.commit(what)
    runs, damaged = _stored(record, folder, rootdir)
    _refuse_damage(damaged)
    alike = same_files(repository, commit.sha, folder)
    for is_it in (lambda sha: sha == commit.sha, alike):
        of_commit = [run for run in runs if run.record.commit is not None and is_it(run.record.commit)]
        if found := _best(of_commit, record, rootdir):
            return found
    others = sorted({run.record.commit[:7] for run in runs if run.record.commit})
    there = f"stored are runs of {', '.join(others[-5:])}" if others else "none of any commit is stored"
    return Found(None, f"there is no stored run of {record.title} at {commit}, {there}; {_store(record)}")


def _best(runs: Sequence[StoredRun], record: Record, rootdir: Path) -> Found | None:
    chosen = best(runs, record)
    return None if chosen is None else Found(chosen, passed_over(runs, chosen, record, rootdir))


@dataclass(frozen=True, slots=True)
class _Damaged:
    file: Path
    error: BenchmarkError

    def may_be_meant(self, chosen: StoredRun | None, runs: Sequence[StoredRun], record: Record) -> bool:
        """Whether it may hold a run that would be taken instead of `chosen`: a newer one, or one that lacks nothing."""
        if chosen is None or not is_all_one_wishes(chosen, record):
            return True
        ordered = by_age(runs, datetime.fromisoformat(record.time))
        no_newer = ordered[: ordered.index(chosen) + 1]
        beside = [number_of(run.file) for run in no_newer if run.file.parent == self.file.parent]
        return number_of(self.file) >= max(beside, default=0)


def _refuse_damage(damaged: Sequence[_Damaged]) -> None:
    if damaged:
        raise max(damaged, key=lambda each: (number_of(each.file), str(each.file))).error


def _stored(record: Record, folder: Path, rootdir: Path) -> tuple[list[StoredRun], list[_Damaged]]:
    """All runs of the plan, and files that may hold one."""
    runs, damaged = [], []
    for file in run_files(folder):
        try:
            runs += [StoredRun(read, file, failed) for read, failed in records_in(file, record, rootdir)]
        except BenchmarkError as error:
            damaged.append(_Damaged(file, error))
    return runs, damaged


def _store(record: Record) -> str:
    return f"to store one, run {record.title}::benchmark with --benchmark-autosave"
