"""Stored runs of a plan: in pytest-benchmark's folder, with runs of all kinds of machines, and in files written elsewhere.

pytest-benchmark warns of a file that it cannot read, and goes on. Here a damaged file is an error if it may hold the run that
is asked for: to take an older run instead could hide a regression, or show one that does not exist.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.commit import Repository
from pytest_fxbucket.errors import BenchmarkError, FxbucketError, UsageError
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record

LATEST = "latest"
OPTION = "--fxbucket-compare"
COMPARED = "fxbucket_compared"
"""Key beside a measurement in the extra info: the run that it was compared with when it was taken, and the outcome."""
NO_MEASURE = ("failed", "error", "untold")
"""Outcomes of runs that "latest" passes over: slower, never judged, perhaps slower."""

_EXPECTED = "latest, a file of pytest-benchmark, or a commit such as main or HEAD~1"
_RUN = re.compile(r"([0-9]{4,})_.*\.json")
_MEND = "; restore the file, or remove it and measure again"


def compared_with(text: str, where: str, base: Path, plan: Path) -> str:
    """The value of ``--fxbucket-compare``, checked: "latest", the absolute path of a file, or a commit as it was named.

    ``where`` names the option in errors, ``base`` is the folder of relative paths, ``plan`` a file of the repository whose
    commits are meant. Raises FxbucketError, one sentence, for a value that is none of the three.
    """
    text = text.strip()
    if not text:
        raise UsageError(f"{where}: nothing is given; expected {_EXPECTED}")
    path = Path(os.path.normpath(base / text))
    if text == LATEST:
        return text
    if path.is_file():
        return str(path)
    # Such a name is meant as a file: a typo in it should not be told as a commit that git does not know.
    if path.suffix == ".json":
        near = get_close_matches(path.name, sorted(each.name for each in path.parent.glob("*.json")), n=1)
        meant = f"; did you mean {Path(text).parent / near[0]}?" if near else ""
        raise UsageError(f"{where}: {text} is not there{meant}")
    try:
        Repository.of(plan, where).commit(text)
    except UsageError as error:
        is_latest = get_close_matches(text.lower(), [LATEST], cutoff=0.8) and "did you mean" not in str(error)
        raise UsageError(f"{error}{f'; did you mean {LATEST}?' if is_latest else ''}") from None
    return text


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One measurement of a plan and the file that it was read from."""

    record: Record
    file: Path
    has_failed: bool = False
    """Whether it was a regression when it was taken, or may have been one, or its comparison ended in an error."""

    @property
    def time(self) -> datetime:
        """When it was measured, by the clock of its machine."""
        return datetime.fromisoformat(self.record.time)


@dataclass(frozen=True, slots=True)
class StoredMatch:
    """The stored run to compare with, if any, and a note: why there is none, or which newer runs were passed over."""

    run: StoredRun | None
    note: str = ""


def find(what: str, record: Record, folder: Path, rootdir: Path) -> StoredMatch:
    """The stored run of ``record``'s plan that ``what`` names: "latest", an absolute path, or a commit.

    Of several runs one that is comparable is preferred, then one of the same pass, then one of a clean work tree, then the
    newest by :func:`by_age`. ``folder`` is pytest-benchmark's storage. Raises BenchmarkError for a file that is damaged or of
    another version and may hold the run that is meant, UsageError for a commit that is unknown.
    """
    row = "" if record.row is None else f"[{record.row}]"
    to_store = f"to store one, run {record.plan}::benchmark{row} with --benchmark-autosave"
    if what == LATEST:
        return _latest(record, folder, rootdir, to_store)
    if not Path(what).is_absolute():
        return _of_commit(what, record, folder, rootdir, to_store)
    none = f"{shown(Path(what), rootdir)} holds no run of {record.title}; {to_store}"
    there = runs_in(Path(what), record, rootdir)
    return _chosen(there, there, record, rootdir) or StoredMatch(None, none)


def runs_of(record: Record, folder: Path, rootdir: Path) -> tuple[list[Record], list[str]]:
    """All stored runs of the plan of ``record``, oldest first, and a sentence for each file that cannot be read."""
    runs, damaged = _stored(record, folder, rootdir)
    return [run.record for run in by_age(runs, record)], [str(error) for error in damaged.values()]


def _latest(record: Record, folder: Path, rootdir: Path, to_store: str) -> StoredMatch:
    """The newest run that was no regression itself, so that a stored regression does not become the measure of later runs."""
    runs, damaged = _stored(record, folder, rootdir)
    found = _chosen([run for run in runs if not run.has_failed], runs, record, rootdir)
    meant = found.run if found is not None else None
    _refuse_damage({file: error for file, error in damaged.items() if _may_be_meant(file, meant, runs, record)})
    if found is not None:
        return found
    where = f"of {record.title} in {shown(folder, rootdir)}"
    if not runs:
        return StoredMatch(None, f"there is no stored run {where}; {to_store}")
    return StoredMatch(None, f"all stored runs {where} are regressions, or were never judged; {to_store} and without {OPTION}")


def _of_commit(what: str, record: Record, folder: Path, rootdir: Path, to_store: str) -> StoredMatch:
    """The run of the commit ``what``, else of a commit whose files differ from it in stored runs only.

    Any damaged file may hold that run, and so is an error.
    """
    repository = Repository.of(rootdir / record.plan, OPTION)
    commit = repository.commit(what)
    runs, damaged = _stored(record, folder, rootdir)
    _refuse_damage(damaged)
    # Exact matches first: the second test runs git once for each other commit.
    for is_it in (commit.sha.__eq__, same_files(repository, commit.sha, folder)):
        of_commit = [run for run in runs if run.record.commit is not None and is_it(run.record.commit)]
        if found := _chosen(of_commit, of_commit, record, rootdir):
            return found
    others = sorted({run.record.commit[:7] for run in runs if run.record.commit})
    there = f"stored are runs of {', '.join(others[-5:])}" if others else "none of any commit is stored"
    return StoredMatch(None, f"there is no stored run of {record.title} at {commit}, {there}; {to_store}")


def by_age(runs: Sequence[StoredRun], record: Record) -> list[StoredRun]:
    """The runs, oldest first: in a folder by the files' numbers, which ascend whatever clocks say; between folders by time.

    Within a folder a run counts as no older than the run before it. A time after ``record``'s own is not believed: the run then
    counts as being of the same time as the run before it, so that a wrong clock does not make it the newest for ever.
    """
    now = datetime.fromisoformat(record.time)
    aged: list[tuple[datetime, int, datetime, str, StoredRun]] = []
    for folder in {run.file.parent for run in runs}:
        # Within a folder ``since`` never falls, so that sorting all folders by it keeps the order of the numbers.
        since = datetime.min.replace(tzinfo=UTC)
        for run in sorted((run for run in runs if run.file.parent == folder), key=lambda run: (number_of(run.file), run.time)):
            since = max(since, run.time) if run.time <= now else since
            aged.append((since, number_of(run.file), run.time, str(run.file), run))
    return [each[-1] for each in sorted(aged, key=lambda each: each[:-1])]


def _chosen(candidates: Sequence[StoredRun], runs: Sequence[StoredRun], record: Record, rootdir: Path) -> StoredMatch | None:
    """The run of ``candidates`` to compare ``record`` with, and a note on newer ``runs`` that were passed over, with reasons.

    The order of preference is that of :func:`find`.
    """
    # Reversed, so that of equally good runs the newest is the first, which min keeps.
    best = min(reversed(by_age(candidates, record)), key=lambda run: _lacks(run, record), default=None)
    if best is None:
        return None
    ordered = by_age(runs, record)
    # From the newest backwards, down to the best run, which is left out.
    newer = [f"{shown(run.file, rootdir)} ({_why(run, best, record)})" for run in ordered[: ordered.index(best) : -1]]
    return StoredMatch(best, f"newer, but passed over: {some(newer)}" if newer else "")


def _lacks(run: StoredRun, record: Record) -> tuple[bool, bool, bool]:
    return bool(comparable(run.record, record)), run.record.pass_name != record.pass_name, run.record.dirty


def _why(run: StoredRun, chosen: StoredRun, record: Record) -> str:
    """The first reason to prefer ``chosen`` to ``run``, as a phrase."""
    reasons = (
        f"not comparable: {'; '.join(comparable(run.record, record))}",
        f"of pass {run.record.pass_name}",
        "of a dirty work tree",
    )
    pairs = zip(_lacks(run, record), _lacks(chosen, record), reasons, strict=True)
    return next((text for lacks, also, text in pairs if lacks > also), "a regression itself, or never judged")


def _may_be_meant(file: Path, chosen: StoredRun | None, runs: Sequence[StoredRun], record: Record) -> bool:
    """Whether a damaged file may hold a run that would be preferred to ``chosen``.

    It may if it may be newer, or if ``chosen`` lacks something that the run in it may have.
    """
    if chosen is None or any(_lacks(chosen, record)):
        return True
    ordered = by_age(runs, record)
    # Numbers ascend in one folder only. Where a folder has no run as old as ``chosen``, any number in it may be newer.
    no_newer = ordered[: ordered.index(chosen) + 1]
    return number_of(file) >= max((number_of(run.file) for run in no_newer if run.file.parent == file.parent), default=0)


def _refuse_damage(damaged: Mapping[Path, BenchmarkError]) -> None:
    if damaged:
        raise damaged[max(damaged, key=lambda file: (number_of(file), str(file)))]


def comparable(old: Record, new: Record) -> list[str]:
    """Why two measurements may not be compared, a phrase for each reason; empty if they are of one plan, workload and machine.

    The commit, the pass, ``[bucket]`` and ``[overlap]`` may differ, being what is compared. So may torch and Python.
    """
    reasons = [] if old.title == new.title else [f"another plan: {old.title}, not {new.title}"]
    differences = list(_differences(old.machine, new.machine))
    if differences:
        reasons.append(f"another machine: {', '.join(differences)}")
    reasons += [*_differences(old.backend, new.backend, "backend"), *_differences(old.ranks, new.ranks, "ranks")]
    if old.has_priority != new.has_priority:
        change = "then and do not now" if old.has_priority else "not then, and do now"
        reasons.append(f"ranks ran at real-time priority {change}")
    return [*reasons, *workload_changes(old.workload, new.workload)]


def workload_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What differs in two workloads of a plan, a phrase for each table."""
    for table in sorted({*old, *new}):
        differences = list(_differences(old.get(table), new.get(table), f"[{table}]"))
        if differences:
            yield some(differences)


def _differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """``[model] args.layers was 2 and is 4``, for each value that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        between = "" if not where else " " if where.endswith("]") else "."
        for key in sorted({*old, *new}):
            yield from _differences(old.get(key), new.get(key), f"{where}{between}{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(*pair, f"{where}[{at}]" if len(old) > 1 else where)
    else:
        then, now = (json.dumps(value, sort_keys=True) for value in (old, new))  # where true is not 1, and NaN is itself
        if then != now:
            is_told = _in_words(old) != _in_words(new)
            yield f"{where} was {_in_words(old) if is_told else then} and is {_in_words(new) if is_told else now}"


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a table of {len(value)}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) if value else "none"
    return "not there" if value is None else str(value)


def _stored(record: Record, folder: Path, rootdir: Path) -> tuple[list[StoredRun], dict[Path, BenchmarkError]]:
    """All runs of the plan, and by file the error of each that may hold one and cannot be read."""
    runs: list[StoredRun] = []
    damaged = {}
    for file in run_files(folder):
        try:
            runs += runs_in(file, record, rootdir)
        except BenchmarkError as error:
            damaged[file] = error
    return runs, damaged


def run_files(folder: Path) -> list[Path]:
    """Stored runs: ``NNNN_*.json`` in the storage folder and in its folders of kinds of machines, sorted.

    A path of such a name that is no file, such as a link to nothing, is among them, since there was a run once.
    """
    files = [*folder.glob("*.json"), *folder.glob("*/*.json")]
    return sorted(file for file in files if number_of(file))


def number_of(file: Path) -> int:
    """The number that pytest-benchmark gave the run; 0 for a file of another name."""
    found = _RUN.fullmatch(file.name)
    return int(found[1]) if found else 0


def runs_in(file: Path, of: Record, rootdir: Path) -> list[StoredRun]:
    """The measurements of ``of``'s plan in a file of pytest-benchmark's. Raises BenchmarkError, naming the file, for damage."""
    from pytest_fxbucket.bench.record import Record  # msgspec is needed where a run is read, and not for the option

    where = shown(file, rootdir)
    runs = []
    for entry in _entries(file, where):
        info = entry.get("extra_info", {}) if isinstance(entry, dict) else None
        if not isinstance(info, dict):
            raise BenchmarkError(f"{where} is damaged, as an entry of it is no table{_MEND}")
        if "fxbucket" in info and _may_be(info["fxbucket"], of):
            compared = info.get(COMPARED)
            has_failed = isinstance(compared, dict) and compared.get("outcome") in NO_MEASURE
            runs.append(StoredRun(Record.from_dict(info["fxbucket"], where), file, has_failed))
    return runs


def _entries(file: Path, where: str) -> list[Any]:
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise BenchmarkError(f"{where} cannot be read, as it is no file{_MEND}")
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError as error:  # text that is no UTF-8, too
        problem = f"{error.msg} at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BenchmarkError(f"{where} is damaged, as it is no JSON ({problem}){_MEND}") from None
    except RecursionError:
        raise BenchmarkError(f"{where} is damaged, as its JSON is nested too deeply{_MEND}") from None
    entries = data.get("benchmarks") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise BenchmarkError(f'{where} is no file of pytest-benchmark, as it has no list "benchmarks"{_MEND}')
    return entries


def _may_be(raw: object, of: Record) -> bool:
    """Whether ``raw`` is the measurement of ``of``'s plan, or is damaged and may be that.

    Measurements of other variants, and of tests, are not.
    """
    if not isinstance(raw, dict):
        return True
    if "variant" in raw or "test" in raw:
        return False
    # A key that is missing or of another type is damage, behind which the plan that is asked for may be.
    plan, row = raw.get("plan", of.plan), raw.get("row", of.row)
    is_plan = plan == of.plan or not isinstance(plan, str)
    return is_plan and (row == of.row or not isinstance(row, str | None))


def shown(path: Path, rootdir: Path) -> str:
    """The path as people write it: relative to ``rootdir`` if it lies below."""
    return Path(os.path.relpath(path, rootdir)).as_posix() if path.is_relative_to(rootdir) else str(path)


def same_files(repository: Repository, sha: str, folder: Path) -> Callable[[str], bool]:
    """A function: whether a commit differs from ``sha`` only in stored runs below ``folder``; False for an unknown commit.

    A stored run is committed after the commit that it measured, which is why such commits count as equal. Other files in the
    folder, such as code, do count as differences.
    """
    but = []
    if folder.resolve().is_relative_to(repository.top):
        parts = folder.resolve().relative_to(repository.top).parts
        # A git pathspec: characters that mean something in a glob are escaped in the folder's own name.
        literally = "".join(re.sub(r"([*?\[\\])", r"\\\1", part) + "/" for part in parts)
        but = [f":(top,exclude,glob){literally}**/[0-9][0-9][0-9][0-9]*_*.json"]

    @cache
    def are_same(other: str) -> bool:
        try:
            return not repository.git("diff", "--name-only", "--no-renames", "--end-of-options", other, sha, "--", ":/", *but)
        except FxbucketError:  # a clone that is shallow, or a commit that was never pushed
            return False

    return are_same
