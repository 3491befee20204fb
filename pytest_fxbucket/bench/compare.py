"""Step time then and now: by the ratio bucketed/unbucketed of each run, which outlives a change of the machine's speed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_fxbucket.bench.comparable import comparable
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.stats import Estimate, ratio_between, ratio_of
from pytest_fxbucket.bench.stored import OPTION, find
from pytest_fxbucket.bench.stored_files import COMPARED
from pytest_fxbucket.bench.then_and_now import (
    commit,
    grown,
    is_unbucketed_another,
    is_unbucketed_faster_alone,
    median_s,
    ms,
    said,
    table,
)
from pytest_fxbucket.checks.verdict import Verdict, failed, passed, skipped

CHECK = "benchmark"
_UNTOLD = "cannot be told: "


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
    def outcome(self) -> Literal["slower", "faster", "same", "gains less", "untold"]:
        """Slower or faster only if by more than the threshold and outside the noise.

        "gains less" instead of slower: by the medians the bucketed step is no slower than then, and the unbucketed one, which
        is another step now, became faster. While that is the same step only the machine can have become faster, and with it
        the bucketed step should have. "untold": larger than the threshold, but within noise that is larger than it too.
        """
        if self.change.is_slower(self.threshold):
            is_explained = is_unbucketed_faster_alone(self.old, self.new) and is_unbucketed_another(self.old, self.new)
            return "gains less" if is_explained else "slower"
        if self.change.is_faster(self.threshold):
            return "faster"
        return "untold" if self._is_noisy and self.change.log_ratio > math.log1p(self.threshold) else "same"

    @property
    def summary(self) -> str:
        """One line: what happened, by how much, how sure, since when."""
        since = f"against {commit(self.old)} of {self.old.time[:10]}"
        told = f"{self.change} {since}"
        match self.outcome:
            case "slower" | "faster" as outcome:
                return f"{outcome} against unbucketed than before, outside the noise: {told}"
            case "gains less":
                return f"bucketing gains less: {self._medians()}; the ratio changed by {told}"
            case "untold":
                return f"{_UNTOLD}{told} is more than the threshold of {self.threshold:.1%}, and may be noise{_MEASURE_LONGER}"
        if self.change.low <= 0 <= self.change.high:
            noisy = f"; too noisy for a threshold of {self.threshold:.1%}{_MEASURE_LONGER}" if self._is_noisy else ""
            return f"no difference beyond the noise: {told}{noisy}"
        return f"within the threshold of {self.threshold:.1%} of the step: {told}"

    @property
    def _is_noisy(self) -> bool:
        """A loss as large as the threshold would not have been seen."""
        return self.change.half_width > math.log1p(self.threshold)

    def _medians(self) -> str:
        return ", ".join(
            f"{name} {ms(median_s(self.old, name))} then and {ms(median_s(self.new, name))} now"
            for name in ("bucketed", "unbucketed")
        )

    def lines(self) -> list[str]:
        """The numbers, for people."""
        change = f"change of the ratio: {self.change}, threshold {self.threshold:+.1%}"
        told = said(self.old, self.new)
        if is_unbucketed_faster_alone(self.old, self.new) and self.outcome == "slower":
            told.append(
                "the bucketed step itself is no slower, but the unbucketed one became faster, and its graph, torch and Python "
                "are the same: so the machine became faster, and the bucketed step should have"
            )
        return [*table(self.old, self.new, self.then, self.now), change, *told, *grown(self.old, self.new)]


_MEASURE_LONGER = ": measure longer (budget_s), or use a quieter machine"


def judge(old: Record, new: Record, threshold: float) -> Comparison:
    """Compare two measurements that are `comparable`; fixed seed, so that the same two give the same answer."""
    runs = [(record.samples["bucketed"], record.samples["unbucketed"]) for record in (old, new)]
    then, now = (ratio_of(*run) for run in runs)
    return Comparison(old, new, threshold, then, now, ratio_between(*runs))


def verdict_of(what: str, record: Record, threshold: float, storage_folder: Path, rootdir: Path) -> Verdict:
    """What the item `benchmark` says of `record` beside the stored run that `what` names, as `find` takes it.

    Failed: slower by more than `threshold` and than noise, with the numbers. Skipped, with what to do: nothing is stored to
    compare with, nothing comparable, or a loss that may be noise. Raises BenchmarkError for stored runs that are damaged,
    UsageError for a commit that is unknown.
    """
    found = find(what, record, storage_folder, rootdir)
    if found.run is None:
        return skipped(CHECK, found.note)
    where = found.run.shown(rootdir)
    reasons = comparable(found.run.record, record)
    if reasons:
        return skipped(CHECK, f"not comparable with {where}: {'; '.join(reasons)}; store a run of this kind to compare with")
    comparison = judge(found.run.record, record, threshold)
    notes = [f"stored run: {where}", *([found.note] if found.note else [])]
    if comparison.outcome == "slower":
        return failed(CHECK, comparison.summary, [*comparison.lines(), *notes, *_advice(found.run.record)])
    summary = "; ".join([comparison.summary, *notes, *said(found.run.record, record)])
    return skipped(CHECK, summary) if comparison.outcome == "untold" else passed(CHECK, summary)


def _advice(old: Record) -> list[str]:
    lines = []
    if old.commit and not old.dirty:
        lines.append(f"to run both commits side by side on this machine: fxbucket compare {old.commit[:7]}")
    return [
        *lines,
        f"if it is meant, store a run with --benchmark-autosave and without {OPTION}, for later ones to be measured by",
    ]


def kept(what: str, verdict: Verdict) -> dict[str, Any]:
    """What is put beside the measurement in the extra info, so that "latest" passes over a run that was a regression.

    The outcome is the verdict's, or "untold" where it was skipped because a loss may hide in the noise.
    """
    is_untold = verdict.outcome == "skipped" and verdict.summary.startswith(_UNTOLD)
    return _mark(what, "untold" if is_untold else verdict.outcome, verdict.summary)


def pending(what: str) -> dict[str, Any]:
    """The same while nothing is judged yet; it stays if judging ends in an error."""
    return _mark(what, "error", "it was not judged")


def _mark(what: str, outcome: str, summary: str) -> dict[str, Any]:
    return {COMPARED: {"with": what, "outcome": outcome, "summary": summary}}
