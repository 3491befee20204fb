"""Each operator on values breaks a real graph, each time alike, and a check finds it."""

from __future__ import annotations

import pytest

from pytest_fxbucket.mutate.mutant import CannotMakeError, Mutant, Spoiling
from pytest_fxbucket.passes.result import Passed
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import ROOT, BrokenPlan

FOUND_BY = {
    "buffer_not_written": {"gpt": "same"},
    "carried_stale": {"iterations": "audit"},
    "carried_swapped": {"iterations": "audit"},
    "cast_early": {"mode": "audit"},
    "cast_late": {"adamw": "audit", "moe": "same"},
    "clip_unreduced": {"adamw": "audit", "pipeline_mesh.toml::replicate": "same"},
    "compute_displaced": {"adamw": "audit"},
    "compute_doubled": {"adamw": "same"},
    "compute_dropped": {"adamw": "same"},
    "constant_changed": {"adamw": "same"},
    "crossing_stale": {"pipeline_mesh.toml::replicate": "same"},
    "crossing_swapped": {"pipeline_mesh.toml::replicate": "same", "split": "same"},
    "crossing_zeroed": {"pipeline_mesh.toml::replicate": "same", "split": "same"},
    "gradient_scaled": {"adamw": "same", "moe": "same"},
    "gradient_swapped": {"adamw": "audit", "pipeline_mesh.toml::replicate": "same"},
    "gradient_unreduced": {"adamw": "audit", "moe": "same", "placed": "audit", "split": "audit"},
    "inplace_made_copy": {"gpt": "same"},
    "operand_swapped": {"adamw": "same", "moe": "same"},
    "output_stale": {"adamw": "same", "pipeline_mesh.toml::replicate": "same"},
    "partial_not_reduced": {"placed": "audit"},
    "state_not_updated": {"adamw": "audit", "adamw.toml::ready": "same"},
    "state_swapped": {"adamw": "audit", "adamw.toml::ready": "same"},
    "tokens_misrouted": {"moe": "same"},
    "update_doubled": {"adamw": "audit", "adamw.toml::ready": "same"},
    "update_skipped": {"adamw": "audit", "adamw.toml::ready": "same"},
    "update_wrong_gradient": {"adamw": "same", "adamw.toml::ready": "same"},
}
"""By operator: plans that have places for it, with a check that finds the first of them."""
ROWS = [(operator, plan, check) for operator, found in FOUND_BY.items() for plan, check in found.items()]
PLANS = sorted({plan for _, plan, _ in ROWS})


@pytest.fixture(scope="module", name="plans")
def _plans(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> dict[str, BrokenPlan]:
    """Each captured when it is asked for. The checks of ``FOUND_BY`` ask no ranks: none are started."""
    folder = tmp_path_factory.mktemp("mutants")
    files = {name: name if "::" in name else f"{name}.toml" for name in PLANS}
    return {name: BrokenPlan(f"{ROOT}/fixtures/plans/{file}", pools, folder) for name, file in files.items()}


def graph(world: PlanOnMesh, mutant: Mutant) -> Passed:
    rank = world.mesh.ranks(0, "pp")[mutant.stage]
    return (world.passed if mutant.form == "passed" else world.final)(rank)[mutant.phase]


@pytest.mark.parametrize(("operator", "plan", "check"), ROWS)
def test_a_graph_is_broken_alike_each_time_and_a_check_says_so(
    plans: dict[str, BrokenPlan], operator: str, plan: str, check: str
) -> None:
    as_it_is = plans[plan]
    mutant = as_it_is.mutants(operator)[0]
    worlds = [as_it_is.broken(mutant) for _ in range(2)]
    broken = {graph(world, mutant).digest for world in worlds}
    assert len(broken - {graph(as_it_is.world, mutant).digest}) == len(broken) == 1
    assert as_it_is.said_of(check, worlds[0]).outcome == "failed"


@pytest.mark.parametrize(("plan", "check"), sorted({(plan, check) for _, plan, check in ROWS}))
def test_the_graphs_as_they_are_pass(plans: dict[str, BrokenPlan], plan: str, check: str) -> None:
    assert plans[plan].said(check).outcome == "passed"


def test_ranks_that_share_a_graph_share_the_broken_one_so_none_can_be_broken_by_its_number(
    plans: dict[str, BrokenPlan],
) -> None:
    as_it_is = plans["adamw"]
    (mutant,) = as_it_is.mutants("suites.mutate.own_operators:by_rank")[:1]
    with pytest.raises(CannotMakeError, match="has no attribute 'rank'"):
        Spoiling(as_it_is.world, mutant)(1, mutant.phase, graph(as_it_is.world, mutant).bucketed)


@pytest.mark.parametrize("plan", PLANS)
def test_every_place_can_be_broken(plans: dict[str, BrokenPlan], plan: str) -> None:
    """Graphs are linted as they are broken, the first in the test above."""
    world = plans[plan].world
    for operator in (operator for operator, found in FOUND_BY.items() if plan in found):
        for mutant in plans[plan].mutants(operator)[1:4]:
            rank = world.mesh.ranks(0, "pp")[mutant.stage]
            spoiling = Spoiling(world, mutant)
            spoiling(rank, mutant.phase, graph(world, mutant).bucketed)
            assert spoiling.changed, mutant.name
