"""What ``[cluster]`` and the checks that simulate a step on it must have. Pure; imports no torch."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster import PRESETS, MemoryLimits, lacking
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.words import one_or_other, show


def agree_on_cluster(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for figures or limits that are not there."""
    cluster, overlap, memory = plan.cluster, plan.checks.overlap, plan.checks.memory
    if cluster is not None and cluster.preset is None and (missing := lacking(cluster)):
        raise PlanError(
            f"{where}: [cluster] has neither {missing} nor a preset that has it; give preset, "
            f"{one_or_other([show(one) for one in PRESETS])}, or all figures"
        )
    for name, is_on, has_limits, example in (
        ("overlap", bool(overlap), bool(overlap and overlap.limits()), "{ exposed_max_ms = 1.5, hidden_min = 0.9 }"),
        ("memory", bool(memory), memory not in (False, MemoryLimits()), "{ peak_max_gb = 70, increase_max = 0.1 }"),
    ):
        if is_on and cluster is None:
            raise PlanError(
                f"{where}: [checks] {name} simulates the step on [cluster], and there is none; give one, such as preset = "
                f"{show(PRESETS[0])}"
            )
        if is_on and not has_limits:
            raise PlanError(f"{where}: [checks] {name} has no limit; give it one, as in {example}")
