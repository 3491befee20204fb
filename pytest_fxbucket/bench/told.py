"""What is said of a plan's step time in one line."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from pytest_fxbucket.bench.measure import BUCKETED

if TYPE_CHECKING:
    from pytest_fxbucket.bench.of_plan import StepTime


def told(step_time: StepTime, variant: str = BUCKETED) -> str:
    """Step time of ``variant``, against what, and how well that is known; of the bucketed step against all others."""
    series, record = step_time.measured.series, step_time.record
    others = [name for name in series.samples if name != BUCKETED] if variant == BUCKETED else []
    times = ", ".join(f"{name} {median(series.all_of(name)) * 1e3:.3g} ms" for name in (variant, *others))
    ratios = "".join(f"; against {other} {step_time.ratio(BUCKETED, other)}" for other in others)
    rounds, sets = len(series.all_of(variant)), len(series.warmup_rounds)
    first = " at real-time priority" if series.has_priority else ""
    unstable = "" if series.is_stable else "; warm-up did not settle"
    return f"{times}{ratios}; {rounds} rounds in {sets} sets of {record.ranks} processes over {record.backend}{first}{unstable}"
