"""What audit says of a schedule that was found by itself, when the graph does not keep what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import fx

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.promises.automatic import automatic_problems
from pytest_fxbucket.checks.promises.expectations import promise_of
from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.graph.collectives import is_wait, launch_kind, waits_of
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.walks import readers_of
from pytest_fxbucket.passes.arrange import arranged, pull_up, relink
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Overlap
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

(PLAN, *_) = load_plans(Path(__file__).resolve().parents[2] / "fixtures/plans/scheduled.toml")
TRACED = LastStep()
Change = Callable[[fx.Graph], None]


def problems(change: Change | None = None, limits: Overlap = PLAN.overlap) -> list[str]:
    """Of the plan's graph on rank 0, changed behind the pass; ``limits`` are those that it is held to then."""
    world = PlanOnMesh(CapturedPlan(PLAN, mesh_of(PLAN), last=TRACED), "manual")
    graph = world.passed(0)["joint"].graph
    if change is not None:
        change(graph)
        graph.lint()
    held: Plan = replace(PLAN, overlap=limits)
    world.captured.plan = held
    return automatic_problems(world, 0)


def prefetched(graph: fx.Graph) -> fx.Node:
    """The second all-gather that is launched."""
    return [node for node in graph.nodes if launch_kind(node) == "all_gather"][1]


def launched_late(graph: fx.Graph) -> None:
    launch = prefetched(graph)
    waits_of(launch)[0].prepend(launch)


def waited_for_early(graph: fx.Graph) -> None:
    launch = next(node for node in graph.nodes if launch_kind(node) == "reduce_scatter")
    launch.append(waits_of(launch)[0])


def all_gathered_at_once(graph: fx.Graph) -> None:
    """Every gather as early as it can be."""
    order = order_of(graph)
    wishes = [float(index) for index in range(len(order.nodes))]
    gathers = [index for index, node in enumerate(order.nodes) if launch_kind(node) == "all_gather"]
    pull_up(order, wishes, gathers, gathers[0])
    relink(graph, [order.nodes[index] for index in arranged(dict(enumerate(order.before)), wishes)])


def test_what_the_pass_made_keeps_its_promises() -> None:
    assert problems() == []


@pytest.mark.parametrize("change", [launched_late, waited_for_early])
def test_an_order_that_is_lost(change: Change) -> None:
    found = problems(change)
    assert [line for line in found if "was to stand before" in line and "so that compute hides a collective" in line]
    assert [line for line in found if "ms are exposed, where the schedule came to" in line]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            Overlap(schedule="auto", max_prefetch=2, max_in_flight_gb=2e-5, max_memory_increase=0.0),
            (
                "3 all-gathers are in flight with all_gather_into_tensor",
                "GB are in flight with all_gather_into_tensor",
                "max_memory_increase allows 0 GB more",
            ),
        ),
        (Overlap(schedule="auto", max_memory_increase_gb=1e-6), ("max_memory_increase allows 1e-06 GB more",)),
    ],
    ids=["each", "in GB"],
)
def test_a_limit_that_is_broken(limits: Overlap, words: tuple[str, ...]) -> None:
    found = problems(all_gathered_at_once, limits)
    assert [one for one in words if not any(one in line for line in found)] == [], found


def test_a_model_that_measures_says_the_same_to_all_ranks_that_are_looked_at() -> None:
    assert PLAN.cluster is not None
    plan = replace(PLAN, cluster=replace(PLAN.cluster, cost="suites.simulate.own_costs:measured"))
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), last=TRACED), "manual")
    assert [ranks for ranks, _ in world.distinct()] == [[0, 1, 2, 3]]
    assert automatic_problems(world, 0) == []


def test_no_compute_between_a_launch_and_its_wait_in_the_whole_graph() -> None:
    def bare(graph: fx.Graph) -> None:
        for wait in [node for node in graph.nodes if is_wait(node)]:
            wait.all_input_nodes[0].append(wait)

    assert [line for line in problems(bare) if "ms are exposed, where the schedule came to" in line]


def test_products_that_changed_places_are_told() -> None:
    world = PlanOnMesh(CapturedPlan(PLAN, mesh_of(PLAN), last=TRACED), "manual")
    promise = promise_of(PLAN, world.step(0).parameters, world.resolution, world.members)
    graph = world.passed(0)["joint"].graph
    first, *others = [node for node in graph.nodes if multiplies(node)]
    independent = next(one for one in others if not reaches(first, one) and not reaches(one, first))
    needed = [independent]
    for node in needed:
        needed += [one for one in node.all_input_nodes if one.op == "call_function" and one > first and one not in needed]
    for node in needed:
        first.prepend(node)
        first = node
    found = audit(promise, world.reading(0)["joint"], world.passed(0)["joint"].reading)
    assert [line for line in found if "products of matrices stand in another order than before the pass" in line], found


def reaches(start: fx.Node, end: fx.Node) -> bool:
    return end in readers_of([start])
