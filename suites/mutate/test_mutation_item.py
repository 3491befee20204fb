"""The check mutation of a plan: green where the other checks find what is broken, red where they are switched off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.cluster import Cluster, MemoryLimits
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_checks import Checks, Mutation
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings
from suites.plans.llama import LLAMA, plan_of

PLAN = plan_of(LLAMA, "mutated.toml")
ON = Checks(golden=False, eager=False, mutation=Mutation(min_score=0.9, at_most=4))
OFF = replace(ON, audit=False, collectives=False, same=False, bitwise=False)


def verdict(checks: Checks, pools: Pools, tmp_path: Path, plan: Plan = PLAN) -> Verdict:
    settings = RunSettings(PLAN.path.parent, tmp_path, tmp_path / "artifacts")
    return PlanRun(replace(plan, checks=checks), settings, pools).check("mutation")


def test_a_plan_whose_checks_find_what_is_broken_is_green(pools: Pools, tmp_path: Path) -> None:
    said = verdict(ON, pools, tmp_path)
    assert said, said
    assert said.summary.startswith("found ")
    assert "; audit, collectives and bitwise alone find " in said.summary


def test_a_plan_whose_checks_are_off_is_red_and_names_what_survived(pools: Pools, tmp_path: Path) -> None:
    said = verdict(replace(OFF, mutation=Mutation(at_most=4)), pools, tmp_path)
    assert said.outcome == "failed"
    assert said.summary.startswith("found 0 of ")
    assert said.summary.endswith("; at least 98 % by checks.mutation.min_score")
    assert any(" survives: " in line for line in said.lines)
    assert said.lines[-1].startswith("fxbucket mutate ")


def test_time_that_is_over_ends_it_behind_the_first_mutant(pools: Pools, tmp_path: Path) -> None:
    said = verdict(replace(OFF, mutation=Mutation(min_score=0.0, budget_s=1e-3)), pools, tmp_path)
    assert said
    assert " of 1 mutant (" in said.summary


def test_a_plan_that_is_red_itself_has_no_score(pools: Pools, tmp_path: Path) -> None:
    on_cluster = replace(PLAN, cluster=Cluster(preset="h100-sxm"))
    with pytest.raises(FxbucketError, match=r"memory fails on the graph as it is: .* a plan's score says something where"):
        verdict(replace(OFF, memory=MemoryLimits(peak_max_gb=1e-6)), pools, tmp_path, on_cluster)


def test_its_item_is_one_on_ranks() -> None:
    assert "mutation" in item_names(replace(PLAN, checks=ON))
    assert "mutation" not in item_names(PLAN)
