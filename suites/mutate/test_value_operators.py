"""Each operator on values breaks a real graph, each time alike, and a check finds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.checks.context import Context
from pytest_fxbucket.explain.find import find_plan
from pytest_fxbucket.mutate.judge import Judge
from pytest_fxbucket.mutate.mutant import Mutant, Spoiling, mutants_of
from pytest_fxbucket.mutate.registry import operators_of
from pytest_fxbucket.passes.passed import Passed
from pytest_fxbucket.plan.schema import Checks
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

ROOT = Path(__file__).parents[2]
FOUND_BY = {
    "buffer_not_written": {"gpt": "same"},
    "carried_stale": {"iterations": "audit"},
    "carried_swapped": {"iterations": "audit"},
    "cast_early": {"mode": "audit"},
    "cast_late": {"adamw": "audit", "moe": "same"},
    "clip_unreduced": {"adamw": "audit", "pipeline_mesh": "same"},
    "compute_displaced": {"adamw": "audit"},
    "compute_doubled": {"adamw": "same"},
    "compute_dropped": {"adamw": "same"},
    "constant_changed": {"adamw": "same"},
    "crossing_stale": {"pipeline_mesh": "same"},
    "crossing_swapped": {"pipeline_mesh": "same", "split": "same"},
    "crossing_zeroed": {"pipeline_mesh": "same", "split": "same"},
    "gradient_scaled": {"adamw": "same", "moe": "same"},
    "gradient_swapped": {"adamw": "audit", "pipeline_mesh": "same"},
    "gradient_unreduced": {"adamw": "audit", "moe": "same", "placed": "audit", "split": "audit"},
    "inplace_made_copy": {"gpt": "same"},
    "operand_swapped": {"adamw": "same", "moe": "same"},
    "output_stale": {"adamw": "same", "pipeline_mesh": "same"},
    "partial_not_reduced": {"pipeline_mesh": "same", "placed": "audit"},
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
IN_PROCESS = Checks(golden=False, bitwise=False, eager=False)


@pytest.fixture(scope="module", name="judges")
def _judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Judge]]:
    """By plan, each built when it is asked for."""
    folder = tmp_path_factory.mktemp("mutants")
    settings = RunSettings(ROOT, folder / "golden", folder / "artifacts")
    pools = Pools()

    class Judges(dict[str, Judge]):
        def __missing__(self, name: str) -> Judge:
            plan, _ = find_plan(str(ROOT / "fixtures" / "plans" / (name if "::" in name else f"{name}.toml")))
            plan = replace(plan, checks=IN_PROCESS)
            world = PlanOnMesh(plan, mesh_of(plan, run=True), "manual", lambda _: None)
            times = PlanRun(plan, settings, pools)
            kept = Folder(settings.artifacts, times.name, "mutation")
            self[name] = Judge(Context(plan, name, settings, world, lambda: world, pools, kept, lambda _: None, times))
            return self[name]

    yield Judges()
    pools.close()


def mutants(judge: Judge, operator: str) -> list[Mutant]:
    return mutants_of(judge.context.run_world, operators_of([operator]), 0)


def graph(world: PlanOnMesh, mutant: Mutant) -> Passed:
    rank = world.mesh.ranks(0, "pp")[mutant.stage]
    return (world.passed if mutant.form == "passed" else world.final)(rank)[mutant.phase]


@pytest.mark.parametrize(("operator", "plan", "check"), ROWS)
def test_a_graph_is_broken_alike_each_time_and_a_check_says_so(
    judges: dict[str, Judge], operator: str, plan: str, check: str
) -> None:
    judge = judges[plan]
    mutant = mutants(judge, operator)[0]
    world = judge.context.run_world
    broken = {graph(Spoiling(world, mutant).world(world), mutant).digest for _ in range(2)}
    assert len(broken - {graph(world, mutant).digest}) == len(broken) == 1
    judged = judge.judged(mutant)
    assert judged.fate == "found"
    assert check in judged.found


@pytest.mark.parametrize("plan", PLANS)
def test_every_place_can_be_broken(judges: dict[str, Judge], plan: str) -> None:
    """Graphs are linted as they are broken."""
    world = judges[plan].context.run_world
    for operator in (operator for operator, found in FOUND_BY.items() if plan in found):
        for mutant in mutants(judges[plan], operator)[:4]:
            rank = world.mesh.ranks(0, "pp")[mutant.stage]
            spoiling = Spoiling(world, mutant)
            spoiling(rank, mutant.phase, graph(world, mutant).bucketed)
            assert spoiling.changed, mutant.name
