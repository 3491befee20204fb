"""Compares step time then and now, by the ratio bucketed/unbucketed of each run: the machine's speed cancels out in it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_fxbucket.bench.stats import Estimate, ms, ratio_between, ratio_of
from pytest_fxbucket.bench.store import COMPARED, OPTION, comparable, find, shown
from pytest_fxbucket.checks.verdict import Verdict, failed, passed, skipped

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record

CHECK = "benchmark"
_UNTOLD = "cannot be told: "
_MEASURE_LONGER = ": measure longer (budget_s), or use a quieter machine"
_MOST_BUCKETS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two comparable measurements of one plan, and the change between them."""

    old: Record
    new: Record
    threshold: float
    """Share of the step: 0.03 is three per cent."""
    then: Estimate
    """Bucketed by unbucketed time in the old run."""
    now: Estimate
    """Bucketed by unbucketed time in the new run."""
    change: Estimate
    """The change of that ratio from then to now."""

    @property
    def outcome(self) -> Literal["slower", "faster", "same", "gains less", "untold"]:
        """Slower or faster only if by more than the threshold and outside the noise.

        "gains less" takes the place of slower if by the medians the bucketed step is no slower than then, and the unbucketed
        step has become faster by another graph, torch or Python. If the unbucketed step is the same, only the machine can have
        become faster, and the bucketed step should have become faster with it. "untold" is a loss above the threshold in noise
        that is also above the threshold.
        """
        if self.change.is_slower(self.threshold):
            return "gains less" if self._is_unbucketed_faster_alone and self._is_unbucketed_another else "slower"
        if self.change.is_faster(self.threshold):
            return "faster"
        return "untold" if self._is_noisy and self.change.log_ratio > math.log1p(self.threshold) else "same"

    @property
    def summary(self) -> str:
        """One line: what happened, by how much, how sure, since when."""
        what = f"{self.change} against {_commit(self.old)} of {self.old.time[:10]}"
        match self.outcome:
            case "slower" | "faster" as outcome:
                return f"{outcome} against unbucketed than before, outside the noise: {what}"
            case "gains less":
                medians = (
                    f"{name} {ms(self.old.median_s(name))} then and {ms(self.new.median_s(name))} now"
                    for name in ("bucketed", "unbucketed")
                )
                return f"bucketing gains less: {', '.join(medians)}; the ratio changed by {what}"
            case "untold":
                return f"{_UNTOLD}{what} is more than the threshold of {self.threshold:.1%}, and may be noise{_MEASURE_LONGER}"
        if self.change.low <= 0 <= self.change.high:
            noisy = f"; too noisy for a threshold of {self.threshold:.1%}{_MEASURE_LONGER}" if self._is_noisy else ""
            return f"no difference beyond the noise: {what}{noisy}"
        return f"within the threshold of {self.threshold:.1%} of the step: {what}"

    @property
    def _is_noisy(self) -> bool:
        """Whether a loss as large as the threshold would not have been seen."""
        return self.change.half_width > math.log1p(self.threshold)

    @property
    def _is_unbucketed_faster_alone(self) -> bool:
        """Whether by the medians the bucketed step is no slower than then, and the unbucketed one became faster."""
        bucketed, unbucketed = (self.new.median_s(name) - self.old.median_s(name) for name in ("bucketed", "unbucketed"))
        return bucketed <= 0 > unbucketed

    @property
    def _is_unbucketed_another(self) -> bool:
        """Whether the unbucketed step is another one now: by its graph, or by the torch or Python that runs it."""
        graphs = [side.graphs.get("unbucketed") for side in (self.old, self.new)]
        digests = [graph and graph["digest"] for graph in graphs]
        return digests[0] != digests[1] or (self.old.torch, self.old.python) != (self.new.torch, self.new.python)

    def lines(self) -> list[str]:
        """The numbers as lines of text."""
        lines = [*self._table(), f"change of the ratio: {self.change}, threshold {self.threshold:+.1%}", *self.notes()]
        if self._is_unbucketed_faster_alone and self.outcome == "slower":
            lines.append(
                "the bucketed step itself is no slower, but the unbucketed one became faster, and its graph, torch and Python "
                "are the same: so the machine became faster, and the bucketed step should have"
            )
        return [*lines, *_grown(self.old, self.new)]

    def _table(self) -> list[str]:
        """Commits, ratios, medians, rounds, versions and launches in aligned columns."""
        names = ["", "commit", "bucketed/unbucketed", "bucketed, median", "unbucketed, median", "rounds", "pass", "torch"]
        columns = [[*names, "Python", "launches"]]
        for title, side, ratio in (("then", self.old, self.then), ("now", self.new, self.now)):
            medians = (ms(side.median_s(name)) for name in ("bucketed", "unbucketed"))
            rounds = " + ".join(str(len(each)) for each in side.samples["bucketed"])
            graph = side.graphs.get("bucketed")
            launches = str(graph["launches"]) if graph else "?"
            versions = (side.pass_name, side.torch, side.python)
            columns.append([title, _commit(side), f"{ratio.ratio:.4f}", *medians, rounds, *versions, launches])
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def notes(self) -> list[str]:
        """Sentences on what limits trust in the numbers: versions that differ, dirty work trees, unsettled warm-up."""
        old, new = self.old, self.new
        pairs = (("pass", old.pass_name, new.pass_name), ("torch", old.torch, new.torch), ("Python", old.python, new.python))
        notes = [f"{what} differs: {then} then, {now} now" for what, then, now in pairs if then != now]
        for which, record in (("then", old), ("now", new)):
            if record.dirty:
                notes.append(f"{which} the work tree was dirty: files differ from commit {(record.commit or '')[:7]}")
            if not record.is_stable:
                notes.append(f"{which} step time had not settled when sampling began")
        return notes


def judge(old: Record, new: Record, threshold: float) -> Comparison:
    """Compare two measurements that are ``comparable``. The seed is fixed, so that the same two give the same answer."""
    runs = [(record.samples["bucketed"], record.samples["unbucketed"]) for record in (old, new)]
    then, now = (ratio_of(*run) for run in runs)
    return Comparison(old, new, threshold, then, now, ratio_between(*runs))


def verdict_of(what: str, record: Record, threshold: float, storage_folder: Path, rootdir: Path) -> Verdict:
    """The verdict of the item ``benchmark`` on ``record``, against the stored run that ``what`` names (see :func:`find`).

    Failed, with the numbers: slower by more than ``threshold`` and by more than noise. Skipped, with advice: no stored run, no
    comparable one, or a loss that may be noise. Raises BenchmarkError for stored runs that are damaged, UsageError for a commit
    that is unknown.
    """
    found = find(what, record, storage_folder, rootdir)
    if found.run is None:
        return skipped(CHECK, found.note)
    old, where = found.run.record, shown(found.run.file, rootdir)
    if reasons := comparable(old, record):
        return skipped(CHECK, f"not comparable with {where}: {'; '.join(reasons)}; store a run of this kind to compare with")
    comparison = judge(old, record, threshold)
    notes = [f"stored run: {where}", *([found.note] if found.note else [])]
    if comparison.outcome == "slower":
        side_by_side = f"to run both commits side by side on this machine: fxbucket compare {(old.commit or '')[:7]}"
        to_accept = (
            f"if it is meant, store a run with --benchmark-autosave and without {OPTION}, for later ones to be measured by"
        )
        # What a dirty tree measured is not what its commit holds, so that the commit cannot be run again for it.
        advice = [side_by_side, to_accept] if old.commit and not old.dirty else [to_accept]
        return failed(CHECK, comparison.summary, [*comparison.lines(), *notes, *advice])
    summary = "; ".join([comparison.summary, *notes, *comparison.notes()])
    return skipped(CHECK, summary) if comparison.outcome == "untold" else passed(CHECK, summary)


def verdict_entry(what: str, verdict: Verdict | None = None) -> dict[str, Any]:
    """The entry beside the measurement in the extra info, by which "latest" later passes over a run that was a regression.

    The outcome is the verdict's, or "untold" if that was skipped since a loss may hide in the noise. Without a verdict it is
    "error": that is written before judging, and stays if judging raises.
    """
    if verdict is None:
        return {COMPARED: {"with": what, "outcome": "error", "summary": "it was not judged"}}
    is_untold = verdict.outcome == "skipped" and verdict.summary.startswith(_UNTOLD)
    return {COMPARED: {"with": what, "outcome": "untold" if is_untold else verdict.outcome, "summary": verdict.summary}}


def _grown(old: Record, new: Record) -> list[str]:
    """Lines on the few buckets whose exposed time grew most, the largest growth first."""
    before, after = _exposed(old), _exposed(new)
    longer = [key for key, now in after.items() if now > before.get(key, 0.0)]
    lines = []
    for key in sorted(longer, key=lambda key: (before.get(key, 0.0) - after[key], key))[:_MOST_BUCKETS]:
        label, direction, number = key
        then = ms(before[key]) if key in before else "no such bucket"
        lines.append(f"  {label} ({direction}{f', {number + 1}' if number else ''}): {then} then, {ms(after[key])} now")
    return ["exposed time that grew most:", *lines] if lines else []


def _exposed(record: Record) -> dict[tuple[str, str, int], float]:
    """Seconds that each bucket's wait blocks, by (label, direction, number among buckets of that name)."""
    found: dict[tuple[str, str, int], float] = {}
    seen = Counter[tuple[str, str]]()
    for bucket in record.buckets("bucketed"):
        # Labels are unique in one graph; a step of several graphs, such as stages, may have one of them again.
        name = (bucket["label"], bucket["direction"])
        if bucket["exposed_s"] is not None:
            found[*name, seen[name]] = bucket["exposed_s"]
            seen[name] += 1
    return found


def _commit(record: Record) -> str:
    """The measured commit as people write it."""
    return f"{record.commit[:7]}{' with changes' * record.dirty}" if record.commit else "no commit"
