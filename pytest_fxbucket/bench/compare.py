"""Step time then and now: by the ratio bucketed/unbucketed of each run, which outlives a change of the machine's speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pytest_fxbucket.bench.comparable import comparable
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.stats import Estimate, ratio_between, ratio_of
from pytest_fxbucket.bench.stored import OPTION, find
from pytest_fxbucket.bench.stored_files import COMPARED
from pytest_fxbucket.checks.verdict import Verdict, failed, passed, skipped

CHECK = "benchmark"
_MOST_BUCKETS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two comparable measurements of one plan, and what they say."""

    old: Record
    new: Record
    threshold: float
    """Of the step: 0.03 is three per cent."""
    then: Estimate
    """Bucketed by unbucketed of the old run."""
    now: Estimate
    change: Estimate
    """Of that ratio, from then to now."""

    @property
    def outcome(self) -> Literal["slower", "faster", "same"]:
        """Slower or faster only if by more than the threshold and outside the noise."""
        if self.change.is_slower(self.threshold):
            return "slower"
        return "faster" if self.change.is_faster(self.threshold) else "same"

    @property
    def summary(self) -> str:
        """One line: what happened, by how much, how sure, since when."""
        since = f"against {_commit(self.old)} of {self.old.time[:10]}"
        if self.outcome != "same":
            return f"{self.outcome} than before, outside the noise: {self.change} {since}"
        if self.change.low <= 0 <= self.change.high:
            return f"no difference beyond the noise: {self.change} {since}{self._too_noisy()}"
        return f"within the threshold of {self.threshold:.1%} of the step: {self.change} {since}"

    def _too_noisy(self) -> str:
        """Say that a loss as large as the threshold would not have been seen."""
        if self.change.half_width <= math.log1p(self.threshold):
            return ""
        return f"; too noisy for a threshold of {self.threshold:.1%}: raise budget_s, or use a quieter machine"

    def lines(self) -> list[str]:
        """The numbers, for people."""
        rows = [("", "then", "now"), *_rows(self.old, self.new, self.then, self.now)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        change = f"change of the ratio: {self.change}, threshold {self.threshold:+.1%}"
        return [*table, change, *_said(self.old, self.new), *_grown(self.old, self.new)]


def judge(old: Record, new: Record, threshold: float) -> Comparison:
    """Compare two measurements that are `comparable`; fixed seed, so that the same two give the same answer."""
    runs = [(record.samples["bucketed"], record.samples["unbucketed"]) for record in (old, new)]
    then, now = (ratio_of(*run) for run in runs)
    return Comparison(old, new, threshold, then, now, ratio_between(*runs))


def verdict_of(what: str, record: Record, threshold: float, storage_folder: Path, rootdir: Path) -> Verdict:
    """What the item `benchmark` says of `record` beside the stored run that `what` names, as `find` takes it.

    Failed: slower by more than `threshold` and than noise, with the numbers. Skipped, with what to do: nothing is stored to
    compare with, or nothing comparable. Raises BenchmarkError for stored runs that are damaged, UsageError for a commit that is
    unknown.
    """
    found = find(what, record, storage_folder, rootdir)
    if found.run is None:
        return skipped(CHECK, found.note)
    reasons = comparable(found.run.record, record)
    if reasons:
        where = found.run.shown(rootdir)
        return skipped(CHECK, f"not comparable with {where}: {'; '.join(reasons)}; store a run of this kind to compare with")
    comparison = judge(found.run.record, record, threshold)
    notes = [f"stored run: {found.run.shown(rootdir)}", *([found.note] if found.note else [])]
    if comparison.outcome != "slower":
        note = f" ({found.note})" if found.note else ""
        return passed(CHECK, f"{comparison.summary}{note}")
    advice = _advice(found.run.record)
    return failed(CHECK, comparison.summary, [*comparison.lines(), *notes, *advice])


def _advice(old: Record) -> list[str]:
    lines = []
    if old.commit and not old.dirty:
        lines.append(f"to run both commits side by side on this machine: fxbucket compare {old.commit[:7]}")
    return [
        *lines,
        f"if it is meant, store a run with --benchmark-autosave and without {OPTION}, for later ones to be measured by",
    ]


def kept(what: str, verdict: Verdict) -> dict[str, Any]:
    """What is put beside the measurement in the extra info, so that "latest" passes over a run that was a regression."""
    return {COMPARED: {"with": what, "outcome": verdict.outcome, "summary": verdict.summary}}


def _rows(old: Record, new: Record, then: Estimate, now: Estimate) -> list[tuple[str, str, str]]:
    sides = (old, new)
    rows = [_row("commit", *map(_commit, sides)), _row("bucketed/unbucketed", f"{then.ratio:.4f}", f"{now.ratio:.4f}")]
    for variant in ("bucketed", "unbucketed"):
        rows.append(_row(f"{variant}, median", *(_ms(_median(side, variant)) for side in sides)))
    rows.append(_row("rounds", *(" + ".join(str(len(rounds)) for rounds in side.samples["bucketed"]) for side in sides)))
    for name, values in (("pass", [side.pass_name for side in sides]), ("torch", [side.torch for side in sides])):
        rows.append(_row(name, *values))
    return [*rows, _row("Python", old.python, new.python), _row("launches", *(_launches(side) for side in sides))]


def _row(name: str, then: str, now: str) -> tuple[str, str, str]:
    return name, then, now


def _said(old: Record, new: Record) -> list[str]:
    """What else a reader has to know to trust the numbers."""
    said = [
        f"{what} differs: {then} then, {now} now"
        for what, then, now in (
            ("pass", old.pass_name, new.pass_name),
            ("torch", old.torch, new.torch),
            ("Python", old.python, new.python),
        )
        if then != now
    ]
    for which, record in (("then", old), ("now", new)):
        if record.dirty:
            said.append(f"{which} the work tree was dirty: files differ from commit {(record.commit or '')[:7]}")
        if not record.is_stable:
            said.append(f"{which} step time had not settled when sampling began")
    if _median(new, "bucketed") <= _median(old, "bucketed") and ratio_of_unbucketed_fell(old, new):
        said.append("the bucketed step itself is no slower: the unbucketed one became faster")
    return said


def ratio_of_unbucketed_fell(old: Record, new: Record) -> bool:
    """Whether the unbucketed step is the one that became faster."""
    return _median(new, "unbucketed") < _median(old, "unbucketed")


def _grown(old: Record, new: Record) -> list[str]:
    """The buckets whose wait blocks longer than before, those that grew most first."""
    before = _exposed(old)
    grown = sorted(
        ((now - before.get(key, 0.0), key, now) for key, now in _exposed(new).items() if now > before.get(key, 0.0)),
        key=lambda each: (-each[0], each[1]),
    )
    told = []
    for _, key, now in grown[:_MOST_BUCKETS]:
        then = _ms(before[key]) if key in before else "no such bucket"
        told.append(f"  {key[0]} ({key[1]}{f', {key[2] + 1}' if key[2] else ''}): {then} then, {_ms(now)} now")
    return ["exposed time that grew most:", *told] if told else []


def _exposed(record: Record) -> dict[tuple[str, str, int], float]:
    """By label, direction and how many of that name came before: seconds that the bucket's wait blocks."""
    found: dict[tuple[str, str, int], float] = {}
    buckets: Sequence[Mapping[str, Any]] = record.graphs.get("bucketed", {}).get("buckets", ())
    for bucket in buckets:
        name = (bucket["label"], bucket["direction"])
        count = sum(key[:2] == name for key in found)
        if bucket["exposed_s"] is not None:
            found[*name, count] = bucket["exposed_s"]
    return found


def _launches(record: Record) -> str:
    return str(record.graphs.get("bucketed", {}).get("launches", "?"))


def _median(record: Record, variant: str) -> float:
    return median(sample for rounds in record.samples[variant] for sample in rounds)


def _commit(record: Record) -> str:
    if record.commit is None:
        return "no commit"
    return f"{record.commit[:7]}{' with changes' * record.dirty}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f} ms"
