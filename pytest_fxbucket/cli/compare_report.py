"""What was seen of two sides, in words and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pytest_fxbucket.bench.side_by_side import NEW, OLD
from pytest_fxbucket.bench.stats import ratio_of

if TYPE_CHECKING:
    from pytest_fxbucket.bench.stats import Estimate, Series

SideFacts = Mapping[str, Any]


def new_by_old(series: Series, confidence: float) -> Estimate:
    """The logarithm of new to old in ``series`` of both sides."""
    return ratio_of(series.samples[NEW], series.samples[OLD], confidence=confidence)


@dataclass(frozen=True, slots=True)
class SidesCompared:
    """Of one plan both sides, their samples, and how the second's step time is to the first's."""

    plan: str
    labels: tuple[str, str]
    facts: tuple[SideFacts, SideFacts]
    series: Series
    """Of the variants ``old`` and ``new``."""
    estimate: Estimate
    """Of the logarithm of new to old."""
    threshold: float
    """Fraction of the step; smaller differences are none."""

    @property
    def verdict(self) -> Literal["slower", "faster", "same"]:
        """Slower or faster only if by more than the threshold and beyond the noise."""
        if self.estimate.is_slower(self.threshold):
            return "slower"
        if self.estimate.is_faster(self.threshold):
            return "faster"
        return "same"

    def lines(self) -> Iterator[str]:
        """What people read: the verdict first."""
        (old, new), one = self.labels, self.estimate
        interval = f"{100 * one.confidence:g} % interval {_percent(one.low)} to {_percent(one.high)}"
        change = f"{_percent(one.log_ratio)}; {interval}; threshold {100 * self.threshold:g} %"
        if self.verdict == "same":
            yield f"{self.plan}: no difference beyond the noise between {new} and {old} ({change})"
        else:
            yield f"{self.plan}: {new} is {self.verdict} than {old} ({change})"
        for name, label, facts in zip((OLD, NEW), self.labels, self.facts, strict=True):
            step_ms = 1e3 * median(self.series.all_of(name))
            backend = facts["backend"].removesuffix(":plain")
            yield f"  {label}: {step_ms:.2f} ms a step, {facts['ranks']} ranks over {backend}, torch {facts['torch']}"
        sets = self.series.samples[OLD]
        yield f"  {sum(map(len, sets))} steps of each side in {len(sets)} sets of processes, in turns"
        yield from (f"  {note}" for note in self._notes())

    def plain(self) -> dict[str, Any]:
        """The same and every sample, for JSON; seconds, and logarithms of new to old."""
        one = self.estimate
        return {
            "plan": self.plan,
            "verdict": self.verdict,
            "log_ratio": one.log_ratio,
            "low": one.low,
            "high": one.high,
            "confidence": one.confidence,
            "threshold": self.threshold,
            "sides": [
                {
                    "label": label,
                    **facts,
                    "samples_s": self.series.samples[name],
                    "peak_bytes": self.series.peak_bytes[name],
                }
                for name, label, facts in zip((OLD, NEW), self.labels, self.facts, strict=True)
            ],
            "warmup_rounds": self.series.warmup_rounds,
            "has_priority": self.series.has_priority,
            "is_stable": self.series.is_stable,
        }

    def _notes(self) -> Iterator[str]:
        old, new = self.facts
        if old["digest"] == new["digest"]:
            yield "both sides run the same graph"
        for what in ("ranks", "backend", "torch", "python"):
            if old[what] != new[what]:
                yield f"{what} differ: {old[what]} and {new[what]}"
        if not self.series.has_priority:
            yield "the ranks had no real-time priority, which ulimit -r 2 would allow: there is more noise than need be"
        if not self.series.is_stable:
            yield "step time had not settled when sampling began"
        if self.verdict == "same" and self.estimate.high > math.log1p(self.threshold):
            yield (
                f"the noise here is such that a loss of {_percent(self.estimate.high)} cannot be ruled out; "
                "a larger --budget-s narrows it"
            )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):+.1f} %"
