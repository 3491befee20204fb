"""The check ``memory``: green within its limits, red above them with what lives at the peak and the bucket that holds most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.cluster import Cluster, MemoryLimits
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_checks import Checks
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings
from suites.simulate.allocations import PLANS, small

PLAN = small("llama")
CLUSTER = Cluster(preset="h100-sxm")
MIB = 2**-10
"""In GB."""

Check = Callable[..., Verdict]


@pytest.fixture
def check(pools: Pools, tmp_path: Path, last_step: LastStep) -> Check:
    def run(limits: MemoryLimits, plan: Plan = PLAN) -> Verdict:
        plan = replace(plan, cluster=CLUSTER, checks=replace(Checks(), memory=limits))
        settings = RunSettings(PLANS.parents[1], tmp_path / "golden", tmp_path / "artifacts")
        return PlanRun(plan, settings, pools, last_step=last_step).check("memory")

    return run


def test_it_is_an_item_where_a_plan_has_limits() -> None:
    assert "memory" not in item_names(PLAN)
    assert "memory" in item_names(replace(PLAN, cluster=CLUSTER, checks=replace(Checks(), memory=MemoryLimits(1.0))))


def test_what_is_within_its_limits_is_green_and_says_on_which_cluster(check: Check) -> None:
    verdict = check(MemoryLimits(peak_max_gb=2 * MIB, increase_max=2.0))
    assert verdict, verdict
    assert "unbucketed" in verdict.summary
    assert "on h100-sxm; 2 ranks" in verdict.summary


def test_a_peak_above_its_limit_says_what_lives_there_and_which_bucket_holds_most(check: Check) -> None:
    verdict = check(MemoryLimits(peak_max_gb=MIB / 2))
    assert verdict.outcome == "failed"
    first, *rest = verdict.lines
    assert first.startswith("peak 0.00")
    assert first.endswith("at most 0.000488281 by checks.memory.peak_max_gb")
    assert any(line.startswith("  gathered") for line in rest)
    buckets = [line for line in rest if line.startswith("  bucket ")]
    assert rest[-len(buckets) :] == buckets
    for lines, of in ((rest[: -len(buckets)], " GB"), (buckets, " GB of what it sends and brings")):
        sizes = [float(line.removesuffix(of).split()[-1]) for line in lines]
        assert sizes == sorted(sizes, reverse=True)
    assert buckets[0].startswith("  bucket backward ")
    assert "layers." in buckets[0]
