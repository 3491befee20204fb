"""Only what must move moves: on the 32-layer plan of fixtures/plans, counted on the graphs and not taken from the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import gathered_lives, peak_bytes
from pytest_fxbucket.graph.order import displaced
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

PLAN = Path(__file__).resolve().parents[2] / "fixtures/plans/llama32.toml"


@pytest.fixture(scope="module")
def world() -> PlanOnMesh:
    plan = load_plans(PLAN)[0]
    return PlanOnMesh(plan, mesh_of(plan, run=True), "manual", lambda _: None)


def test_at_most_one_node_in_twenty_that_is_no_collective_is_displaced(world: PlanOnMesh) -> None:
    before, after = world.step(0).graphs["joint"].graph, world.passed(0)["joint"].bucketed
    names = [[n.name for n in graph.nodes if not _communicates(n)] for graph in (before, after.graph)]
    moved, counted = displaced(*names)
    assert counted > 10_000
    assert moved <= counted / 20
    assert after.report is not None
    assert (after.report.displaced, after.report.compared) == (moved, counted)


def test_no_more_is_gathered_at_once_than_the_entry_in_use_and_the_one_ahead(world: PlanOnMesh) -> None:
    before, after = world.reading(0)["joint"], world.passed(0)["joint"].reading
    report = world.passed(0)["joint"].bucketed.report
    assert report is not None
    peaks = peak_bytes(gathered_lives(before)), peak_bytes(gathered_lives(after))
    assert peaks == (report.gathered_before, report.gathered_after)
    two = sorted((bucket.bytes for bucket in after.buckets if bucket.kind == "all_gather"), reverse=True)[:2]
    assert peaks[1] - peaks[0] <= sum(two)


def _communicates(node: object) -> bool:
    return collectives.is_wait(node) or collectives.launch_kind(node) is not None
