"""Each operator breaks a real graph at its place alone, at every rank alike or at one, and a check of the plan finds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_fxbucket.mutate.mutant import CannotMakeError, Mutant, Spoiling, last_of_stage
from pytest_fxbucket.passes.registry import Bucketed
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.ranks.pools import Pools
from suites.mutate.broken_plans import ROOT, BrokenPlan, digests, targets
from suites.mutate.small_plans import COUNTING, TEXTS


class Found(NamedTuple):
    """Where an operator has places, and who finds that the graph is broken there."""

    plan: str
    check: str
    says: str = ""


DIFFERS = "first differs at"
FOUND = {
    "branch_on_the_rank": Found("hybrid", "same", DIFFERS),
    "buffer_not_written": Found("counting", "same"),
    "carried_stale": Found("handed_on", "audit"),
    "carried_swapped": Found("handed_on", "audit"),
    "cast_early": Found("mode", "audit"),
    "cast_late": Found("adamw", "audit"),
    "clip_unreduced": Found("in_stages", "same"),
    "compute_displaced": Found("adamw", "audit"),
    "compute_doubled": Found("adamw", "same"),
    "compute_dropped": Found("adamw", "same"),
    "constant_changed": Found("adamw", "same"),
    "crossing_stale": Found("in_stages", "same"),
    "crossing_swapped": Found("split", "same"),
    "crossing_zeroed": Found("in_stages", "same"),
    "deferral_lost": Found("hybrid", "audit", "it is not deferred"),
    "divisor_changed": Found("hybrid", "same", DIFFERS),
    "gather_forgotten_on_a_rank": Found("split", "collectives", "never does"),
    "gather_kept": Found("uneven", "audit", "backward all_gather"),
    "gather_stale": Found("updated_first", "same", DIFFERS),
    "gradient_scaled": Found("adamw", "same"),
    "gradient_swapped": Found("in_stages", "same"),
    "gradient_unreduced": Found("adamw", "audit"),
    "group_other": Found("hybrid", "audit", "another process group"),
    "group_twin": Found("uneven", "audit", "another process group"),
    "inplace_made_copy": Found("counting", "same"),
    "launch_advanced": Found("uneven", "audit", "earlier than prefetch"),
    "launch_delayed": Found("hybrid", "audit", "it is not deferred"),
    "launch_doubled": Found("uneven", "audit", "launch"),
    "launch_dropped": Found("split", "same", DIFFERS),
    "launches_swapped": Found("hybrid", "audit", "launched"),
    "members_swapped": Found("hybrid", "audit", "layout"),
    "offset_shifted": Found("placed", "same", DIFFERS),
    "op_other": Found("uneven", "same", "which gives"),
    "operand_swapped": Found("moe", "same"),
    "order_dependency_lost": Found("buckets::deps", "audit", "as insert_overlap_deps promises"),
    "order_on_a_rank": Found("hybrid", "collectives", "differs"),
    "output_stale": Found("adamw", "same"),
    "padding_leaks": Found("uneven", "same", DIFFERS),
    "partial_not_reduced": Found("placed", "audit"),
    "prefetch_lost": Found("uneven", "audit", "prefetch = 1 is not reached"),
    "read_before_wait": Found("uneven", "collectives", "without waiting"),
    "state_not_updated": Found("adamw", "audit"),
    "state_swapped": Found("adamw", "same"),
    "tokens_misrouted": Found("moe", "same"),
    "update_doubled": Found("adamw", "audit"),
    "update_skipped": Found("adamw", "audit"),
    "update_wrong_gradient": Found("adamw", "same"),
    "view_changed": Found("uneven", "same", DIFFERS),
    "wait_advanced": Found("uneven", "audit", "prefetch = 1 is not reached"),
    "wait_delayed": Found("uneven", "golden", "what changed"),
    "wait_doubled": Found("uneven", "collectives", "2 times, expected once"),
    "wire_dtype": Found("placed", "audit", "launched in bfloat16"),
    "write_in_flight": Found("uneven", "collectives", "is read by aten.mul_.Scalar"),
}
PLANS = sorted({found.plan for found in FOUND.values()})
Plans = Callable[[str], BrokenPlan]


@pytest.fixture(scope="module")
def plans(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Each plan once. The checks of ``FOUND`` ask no ranks: none are started."""
    folder = tmp_path_factory.mktemp("plans")
    for name, text in TEXTS.items():
        (folder / f"{name}.toml").write_text(text)

    @cache
    def plan(name: str) -> BrokenPlan:
        file, colons, row = name.partition("::")
        where = folder if name in TEXTS else ROOT / "fixtures" / "plans"
        return BrokenPlan(f"{where / file}.toml{colons}{row}", pools, folder / "artifacts")

    return plan


@pytest.mark.parametrize("operator", FOUND)
def test_it_breaks_the_place_that_it_names_alone_and_a_check_says_so(plans: Plans, operator: str) -> None:
    found = FOUND[operator]
    plan = plans(found.plan)
    mutants = plan.mutants(operator)
    assert mutants, f"{operator} has no place in {found.plan}"
    mutant, before = mutants[0], plan.world
    after, again = plan.broken(mutant), plan.broken(mutant)
    rank = _rank_of(before, mutant)
    other = next(one for one in range(before.size) if one != rank and before.mesh.at(one, "pp") == mutant.stage)
    assert digests(after, rank) != digests(before, rank), "it changes nothing"
    assert digests(after, rank) == digests(again, rank), "it is another one each time"
    of_other = digests(after, rank) if not mutant.site.on_last_rank else digests(before, other)
    assert digests(after, other) == of_other, "it is not on the ranks that it names"
    old, new = targets(before, rank), targets(after, rank)
    assert {name: old[name] for name in new if name in old} == {name: new[name] for name in new if name in old}
    verdict = plan.said_of(found.check, after)
    assert verdict.outcome == "failed"
    assert any(found.says in line for line in verdict.lines), verdict


def _rank_of(world: PlanOnMesh, mutant: Mutant) -> int:
    """A rank whose graph is broken."""
    if mutant.site.on_last_rank:
        return last_of_stage(world.mesh, mutant.stage)
    return world.mesh.ranks(0, "pp")[mutant.stage]


def _graph(world: PlanOnMesh, mutant: Mutant, rank: int) -> Bucketed:
    return (world.passed if mutant.form == "passed" else world.final)(rank)[mutant.phase].bucketed


@pytest.mark.parametrize(("plan", "check"), sorted({(found.plan, found.check) for found in FOUND.values()}))
def test_the_graph_as_it_is_passes(plans: Plans, plan: str, check: str) -> None:
    assert plans(plan).said(check)


@pytest.mark.parametrize("plan", PLANS)
def test_operators_can_break_any_plan(plans: Plans, plan: str) -> None:
    """Graphs are linted as they are broken."""
    world = plans(plan).world
    for operator in FOUND:
        for mutant in plans(plan).mutants(operator)[:1]:
            rank = _rank_of(world, mutant)
            spoiling = Spoiling(world, mutant)
            spoiling(rank, mutant.phase, _graph(world, mutant, rank))
            assert spoiling.changed, mutant.name


def test_ranks_that_share_a_graph_share_the_broken_one_so_none_can_be_broken_by_its_number(plans: Plans) -> None:
    as_it_is = plans("adamw")
    mutant = as_it_is.mutants("suites.mutate.own_operators:by_rank")[0]
    with pytest.raises(CannotMakeError, match="has no attribute 'rank'"):
        Spoiling(as_it_is.world, mutant)(1, mutant.phase, _graph(as_it_is.world, mutant, 0))


def test_what_the_last_rank_alone_does_is_on_the_last_of_the_real_mesh_too(pools: Pools, tmp_path: Path) -> None:
    """That is looked at, which the last of those that run need not be."""
    path = tmp_path / "plan.toml"
    path.write_text(COUNTING.replace("dp_shard = 2", "dp_shard = 20") + "\n[run]\nworld = { dp_shard = 4 }\n")
    plan = BrokenPlan(str(path), pools, tmp_path / "artifacts")
    mutant = plan.mutants("gather_forgotten_on_a_rank")[0]
    worlds = (plan.run._run_world, plan.run._mesh_world)
    broken = [(Spoiling(world, mutant).world(world), world) for world in worlds]
    changed = [[rank for rank in a.ranks() if digests(a, rank) != digests(b, rank)] for a, b in broken]
    assert changed == [[3], [19]]


def test_mutants_come_in_the_same_order_each_time(plans: Plans) -> None:
    first, second = (plans("uneven").mutants("launch_dropped") for _ in range(2))
    assert [one.name for one in first] == [one.name for one in second]
    assert len({(one.name, one.site.how) for one in first}) == len(first)
