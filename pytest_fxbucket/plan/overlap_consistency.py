"""What ``[overlap] schedule`` takes of the keys beside it. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.tables import Overlap
from pytest_fxbucket.words import show

_BY_HAND = ("prefetch", "defer_reduce", "updates", "launch_at", "wait_before")
_LIMITS = ("max_memory_increase", "max_memory_increase_gb", "max_in_flight_gb", "max_prefetch")


def agree_on_overlap(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that the plan's schedule does not know."""
    overlap, plain = plan.overlap, Overlap()
    inside = f"{where}: [overlap]"
    if plan.bucket.by == "overlap":
        _by_overlap(plan, where)
    if overlap.schedule == "manual":
        if limit := next((key for key in _LIMITS if getattr(overlap, key) is not None), None):
            raise PlanError(f'{inside} {limit} is a limit of schedule = "auto", and the schedule is "manual"; leave one out')
        return
    if key := next((key for key in _BY_HAND if getattr(overlap, key) != getattr(plain, key)), None):
        raise PlanError(
            f'{inside} {key} = {show(getattr(overlap, key))} says by hand what schedule = "auto" finds; leave one out'
        )
    if plan.cluster is None:
        raise PlanError(
            f'{inside} schedule = "auto" goes by seconds on [cluster], and there is none; give one, such as a preset'
        )


def _by_overlap(plan: Plan, where: str) -> None:
    bucket = plan.bucket
    if plan.overlap.schedule != "auto":
        raise PlanError(
            f'{where}: [bucket] by = "overlap" keeps hidden what [overlap] schedule = "auto" hides; set that, not "manual"'
        )
    if len(bucket.cap_mb) > 1:
        raise PlanError(f'{where}: [bucket] by = "overlap" takes one cap_mb for all buckets, not {len(bucket.cap_mb)}')
