"""The check ``overlap``: green within its limits, red above them with the buckets that are exposed most and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.checks.overlap import problems
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.cluster import Cluster, ExposureLimit, Link, OverlapLimits
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_checks import Checks
from pytest_fxbucket.plan.schema_model import Graph
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.simulate.of_plan import NamedFlight, SimulatedRank
from pytest_fxbucket.simulate.timeline import Flight, Timeline
from pytest_fxbucket.step.roles import Direction
from suites.simulate.allocations import PLANS, small

PLAN = small("llama")
FAST = Cluster(preset="h100-sxm", launch_us=50.0)
"""Kernels are so small that calls are what takes time, and hide everything."""
SLOW = Cluster(preset="h100-sxm", launch_us=0.0, within=Link(bandwidth=0.001))
ALL = OverlapLimits(exposed_max_ms=0.0)

Check = Callable[..., Verdict]


@pytest.fixture
def check(pools: Pools, tmp_path: Path, last_step: LastStep) -> Check:
    def run(cluster: Cluster, limits: OverlapLimits, plan: Plan = PLAN, **change: object) -> Verdict:
        plan = replace(plan, cluster=cluster, checks=replace(Checks(), overlap=limits), **change)
        settings = RunSettings(PLANS.parents[1], tmp_path / "golden", tmp_path / "artifacts")
        return PlanRun(plan, settings, pools, last_step=last_step).check("overlap")

    return run


def test_it_is_an_item_where_a_plan_has_limits() -> None:
    assert not [name for name in item_names(PLAN) if name.startswith("overlap")]
    limited = replace(PLAN, cluster=FAST, checks=replace(Checks(), overlap=ALL))
    assert "overlap" in item_names(limited)


def test_what_is_within_its_limits_is_green_and_says_on_which_cluster(check: Check) -> None:
    verdict = check(FAST, OverlapLimits(exposed_max_ms=1.0, hidden_min=0.9))
    assert verdict, verdict
    assert re.fullmatch(
        r"0\.0\d\d of \d+\.\d\d\d ms exposed, 15 of 16 launches hidden, on h100-sxm with figures of its own; 2 ranks",
        verdict.summary,
    )


def test_a_limit_of_a_direction_without_launches_is_red(check: Check) -> None:
    """It could not be broken."""
    verdict = check(FAST, OverlapLimits(forward=ExposureLimit(hidden_min=0.1), optimizer=ExposureLimit(exposed_max_ms=1.0)))
    assert (verdict.outcome, verdict.lines[0]) == (
        "failed",
        "no rank launches anything in optimizer, so checks.overlap.optimizer holds nothing; leave it out",
    )


def test_what_is_above_its_limits_is_red_and_names_what_is_exposed_most_by_its_entry(check: Check) -> None:
    verdict = check(SLOW, OverlapLimits(exposed_max_ms=1.5, hidden_min=0.9))
    assert verdict.outcome == "failed"
    first, second, *rest = verdict.lines
    assert re.fullmatch(r"[\d.]+ ms exposed, at most 1\.5 by checks\.overlap\.exposed_max_ms", first)
    assert second == "0 of 16 launches hidden, at least 90 % by checks.overlap.hidden_min"
    told = [re.fullmatch(r"  (.+): ([\d.]+) ms exposed, ([\d.]+) ms in flight: (.+)", line) for line in rest[:5]]
    assert all(told)
    exposed = [float(one[2]) for one in told if one]
    assert exposed == sorted(exposed, reverse=True)
    assert sum(exposed) < float(first.partition(" ")[0]) < 16 / 5 * sum(exposed)
    names = {one[1] for one in told if one}
    assert any(re.fullmatch(r"(forward|backward) (all_gather|reduce_scatter) layers\.\d", name) for name in names)
    assert {one[4] for one in told if one} & {f"{name} is in flight before it" for name in names} or any(
        "too little compute" in line for line in rest
    )
    assert rest[-1].startswith("what exposes most is ")


def test_ranks_that_differ_name_themselves_and_what_they_do_for_each_microbatch(check: Check) -> None:
    plan = load_plans(PLANS / "pipeline_mesh.toml")[0]
    verdict = check(SLOW, ALL, plan, optimizer=(), step=replace(plan.step, clip_norm=0.0))
    heads = [line for line in verdict.lines if not line.startswith("  ")]
    assert [line.partition(":")[0] for line in heads[:2]] == ["rank 0, 1, 2, 3", "rank 4, 5, 6, 7"]
    assert [line for line in verdict.lines if line.startswith("  backward reduce_scatter layers.0 in stage 0 reduce: ")]
    often = {
        re.search(r" in stage \d (\w+): ", line)[1]: ", 2 times: " in line for line in verdict.lines if "ms in flight" in line
    }
    assert often == {"reduce": False, "unshard": False, "forward": True}


def rank_with(*directions: Direction, times: int = 1) -> SimulatedRank:
    """A rank with an all-reduce in each of these directions, exposed for a millisecond."""
    flights = [
        Flight("node", "joint", 0, "all_reduce", "tp", one, 8, 0.0, 0.0, 1e-3, 0.0, 1e-3, "too little compute", times=times)
        for one in directions
    ]
    named = tuple(NamedFlight(flight, f"{flight.direction} it", flight.direction, "") for flight in flights)
    return SimulatedRank((0,), Timeline(1.0, 1.0, tuple(flights), 0, "", "", ()), named)


@pytest.mark.parametrize(
    ("most", "said"), [(3.9, ["4.000 ms exposed, at most 3.9 by checks.overlap.exposed_max_ms"]), (4.1, [])]
)
def test_what_a_stage_exposes_counts_for_each_microbatch(most: float, said: list[str]) -> None:
    assert list(problems(rank_with("forward", times=4), OverlapLimits(exposed_max_ms=most).limits()))[:1] == said


def test_only_a_direction_with_a_limit_is_held_to_it() -> None:
    both = rank_with("forward", "backward")
    assert list(problems(both, OverlapLimits(backward=ExposureLimit(exposed_max_ms=0.5)).limits())) == [
        "backward: 1.000 ms exposed, at most 0.5 by checks.overlap.backward.exposed_max_ms",
        "  backward it: 1.000 ms exposed, 1.000 ms in flight: too little compute runs beside it",
    ]
    within = OverlapLimits(forward=ExposureLimit(exposed_max_ms=1.1), backward=ExposureLimit(hidden_min=0.0))
    assert list(problems(both, within.limits())) == []


def test_a_step_that_crosses_iterations_is_held_to_its_limits_in_its_steady_graph(check: Check) -> None:
    verdict = check(SLOW, ALL, small("iterations"))
    assert verdict.outcome == "failed"
    assert " of 10 launches hidden" in verdict.summary, "not those of all its graphs"


def test_buckets_of_a_graph_without_roles_are_named_by_what_they_are(check: Check) -> None:
    plan = replace(load_plans(PLANS / "traced.toml")[0], graph=Graph("fixtures.models.traced:bare"))
    verdict = check(SLOW, ALL, plan)
    assert verdict.outcome == "failed"
    named = [line.partition(":")[0] for line in verdict.lines if line.startswith("  ")]
    assert len(set(named)) == len(named) == 5
    by_module = r"  \w+ (all_gather|reduce_scatter) (of layers\.\d \()?\1(_into)?_tensor\w*\)?"
    assert [name for name in named if not re.fullmatch(by_module, name)] == []


def test_a_cost_of_ones_own_is_asked_and_what_it_does_not_know_estimated(check: Check) -> None:
    slow = check(replace(FAST, cost="suites.simulate.own_costs:slow_gathers"), ALL)
    assert [line for line in slow.lines if re.match(r"  \w+ all_gather .* 1000\.000 ms in flight", line)]


def test_a_cost_that_is_not_there_is_told_in_one_sentence(check: Check) -> None:
    said = r"\[cluster\] cost: module \"suites\.simulate\.own_costs\" has no \"nothing\""
    with pytest.raises(FxbucketError, match=said) as caught:
        check(replace(FAST, cost="suites.simulate.own_costs:nothing"), ALL)
    assert "\n" not in str(caught.value)
