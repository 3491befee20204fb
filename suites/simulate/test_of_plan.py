"""Plans on clusters: whose groups are where, orders that are written into graphs, what is simulated of which graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import Link, cluster_named
from pytest_fxbucket.plan.load import load_plans, parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.of_plan import bucketed, simulated_ranks, unbucketed
from suites.plans.llama import llama

ROOT = Path(__file__).parents[2]
HYBRID = {"mode": "hybrid_shard", "dp_replicate": 2}
H100 = cluster_named("h100-sxm", Path())
STRADDLED = replace(H100, devices_per_node=3, between=Link(1e6, 1.0))
"""Ranks 0 and 1 are on one node, 2 and 3 on two, far apart."""


def on_mesh(ranks: int, more: str = "", row: int = 0, **parallel: object) -> PlanOnMesh:
    plan = parse_plans(llama("layers = 1, dim = 16", ranks, **parallel) + more, ROOT / "p.toml")[row]
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


@pytest.fixture(scope="module")
def hybrid() -> PlanOnMesh:
    return on_mesh(2, **HYBRID)


@pytest.fixture(scope="module")
def plain() -> PlanOnMesh:
    return on_mesh(2)


def test_a_group_is_where_its_ranks_are(hybrid: PlanOnMesh) -> None:
    gathers = {
        rank: [one.seconds for one in unbucketed(hybrid, rank, STRADDLED).flights if one.kind == "all_gather"]
        for rank in (0, 2)
    }
    assert max(gathers[0]) < 1e-3
    assert min(gathers[2]) > 1.0, "each has a hop of a second"


def test_ranks_with_the_same_graphs_are_simulated_once(hybrid: PlanOnMesh) -> None:
    (only,) = simulated_ranks(hybrid, H100)
    assert only.ranks == (0, 1, 2, 3)
    assert {one.flight.group for one in only.flights} == {"mesh_dp_shard", "mesh_dp_replicate"}


@pytest.mark.parametrize("believed", [True, False])
def test_ranks_of_one_graph_whose_groups_lie_otherwise_are_simulated_each(hybrid: PlanOnMesh, believed: bool) -> None:
    found = simulated_ranks(hybrid, STRADDLED, believed=believed)
    assert {one.ranks: one.timeline.seconds for one in found} == {
        (rank,): bucketed(hybrid, rank, STRADDLED).seconds for rank in range(4)
    }
    nodes_of_four = replace(STRADDLED, devices_per_node=4)
    assert [one.ranks for one in simulated_ranks(hybrid, nodes_of_four, believed=believed)] == [(0, 1, 2, 3)]


def test_ranks_whose_graphs_differ_in_whom_they_send_to_are_told_once() -> None:
    plan = next(one for one in load_plans(ROOT / "fixtures/plans/cp.toml") if one.matrix_id == "ring")
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")
    (only,) = simulated_ranks(world, H100, believed=True)
    assert only.ranks == (0, 1, 2, 3)
    assert len(world.ranks_alike()) == 4


def test_ranks_of_one_stage_are_taken_for_alike_without_a_pass_for_each(plain: PlanOnMesh) -> None:
    world = plain.by_pass("manual")
    (only,) = simulated_ranks(world, H100, believed=True)
    assert [rank for rank in range(2) if world.is_passed(rank)] == [0]
    assert "reading" not in vars(world.final(0)["joint"]), "it takes as long as the pass and the simulation together"
    (proved,) = simulated_ranks(world, H100)
    assert (only.ranks, only.flights) == (proved.ranks, proved.flights)
    other = plain.by_pass("suites.passes.foreign_passes:same")
    assert other.ranks_alike()
    assert all(other.is_passed(rank) for rank in range(2)), "nobody knows what it does on which rank"


@pytest.mark.parametrize(
    "more", ["bucket.enabled = false", "bucket.cap_mb = 0.001\noverlap.gather_group = 'own'\nstep.microbatches = 2"]
)
def test_launches_have_the_names_that_a_reading_gives_them(more: str) -> None:
    """Several of a name, none merged, and all-reduces behind reductions."""
    clip = '[step]\nclip_norm = 0.1\n[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.1 }\n'
    world = on_mesh(2, f'{clip}[[matrix]]\nid = "x"\n{more}', row=1, **HYBRID)
    believed, proved = (simulated_ranks(world, H100, believed=one)[0].flights for one in (True, False))
    assert [one.name for one in believed] == [one.name for one in proved]


def test_one_rank_of_each_stage_is_looked_at() -> None:
    world = on_mesh(8, "[pipeline]\nstages = 8\n[step]\nmicrobatches = 8", pp=8)
    assert {world.mesh.at(rank, "pp") for rank in world.ranks()} == set(range(8))


def test_reductions_of_two_levels_are_named_by_their_entry_both(hybrid: PlanOnMesh) -> None:
    names = [one.name for one in simulated_ranks(hybrid, H100)[0].flights]
    assert len(set(names)) == len(names)
    assert {"forward all_gather layers.0", "backward reduce_scatter layers.0", "backward all_reduce layers.0"} <= {*names}


def test_an_order_that_is_written_into_the_graph_takes_no_time(plain: PlanOnMesh) -> None:
    kept = plain.under(replace(plain.plan, overlap=replace(plain.plan.overlap, insert_overlap_deps=True)))
    free, pinned = (simulated_ranks(world, H100)[0] for world in (plain, kept))
    assert [one.name for one in free.flights] == [one.name for one in pinned.flights]
    assert free.timeline.seconds == pinned.timeline.seconds
    reading = kept.final(0)["joint"].reading
    assert {one.node: one.place for one in pinned.timeline.flights} == {one.node: one.launch for one in reading.buckets}


def test_norms_that_clipping_sends_are_the_optimizers() -> None:
    found = simulated_ranks(
        on_mesh(2, '[step]\nclip_norm = 0.1\n[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.1 }'), H100
    )[0]
    assert [one.name for one in found.flights if one.direction == "optimizer"] == ["optimizer all_reduce norms"]


def test_a_queue_names_what_is_in_flight(hybrid: PlanOnMesh) -> None:
    slow = replace(H100, launch=0.0, within=Link(1e6, 0.0))
    flights = simulated_ranks(hybrid, slow)[0].flights
    waiting = [one for one in flights if one.flight.why == "behind another launch"]
    assert waiting
    for one in waiting:
        before = [other for other in flights if other.name == one.behind]
        assert [(other.flight.group, other.flight.end) for other in before] == [(one.flight.group, one.flight.start)]
        assert one.reason == f"{one.behind} is in flight before it"
