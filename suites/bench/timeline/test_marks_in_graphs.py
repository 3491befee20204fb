"""Marks name launches and waits by entry, compute by module, what packs and unpacks by its entry."""

from __future__ import annotations

from itertools import pairwise

from pytest_fxbucket.bench.timeline.marks import ELSEWHERE, ActivityMark, marks_in, marks_of
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.plan_on_mesh import PlanOnMesh


def test_launches_and_waits_are_those_of_the_reading(world: PlanOnMesh) -> None:
    for variant, reading in (("unbucketed", world.reading(0)["joint"]), ("bucketed", world.passed(0)["joint"].reading)):
        marks = marks_of(world, 0, "joint", variant)
        launched = [mark for mark in marks if mark.kind == "launch"]
        assert [(mark.node, mark.bucket) for mark in launched] == [(b.node, i) for i, b in enumerate(reading.buckets)]
        waits = sorted((where, i) for i, b in enumerate(reading.buckets) for where in b.waits)
        assert [mark.bucket for mark in marks if mark.kind == "wait"] == [i for _, i in waits]


def test_bucketed_launches_have_the_entrys_name_and_the_others_the_parameters(world: PlanOnMesh) -> None:
    labels = {m.label for m in marks_of(world, 0, "joint", "bucketed") if m.kind == "launch" and m.direction == "forward"}
    assert labels == {
        "all_gather tok_embeddings", "all_gather layers.0", "all_gather layers.1", "all_gather norm+output",
    }  # fmt: skip
    unbucketed = {m.label for m in marks_of(world, 0, "joint", "unbucketed") if m.kind == "launch"}
    assert "all_gather layers.0.attention.wq.weight" in unbucketed
    assert "reduce_scatter output.weight" in unbucketed


def test_compute_has_its_modules_name_in_the_direction_in_which_it_runs(world: PlanOnMesh) -> None:
    marks = marks_of(world, 0, "joint", "bucketed")
    for direction in ("forward", "backward"):
        labels = [mark.label for mark in marks if mark.kind == "compute" and mark.direction == direction]
        assert {"layers.0.attention.wq", "layers.1.feed_forward.w2", "output", "tok_embeddings"} <= set(labels)
    directions = [mark.direction for mark in marks if mark.kind == "compute"]
    assert sum(before != after for before, after in pairwise(directions)) == 1


def test_what_packs_stands_before_the_launch_and_what_unpacks_behind_the_wait(world: PlanOnMesh) -> None:
    marks = marks_of(world, 0, "joint", "bucketed")
    before = [(mark.label, after.label) for mark, after in pairwise(marks) if mark.label.startswith("copy-in")]
    assert before
    assert all(launch.split(" ", 1)[1] == label.removeprefix("copy-in ") for label, launch in before)
    behind = [(mark.label, before.kind) for before, mark in pairwise(marks) if mark.label.startswith("copy-out")]
    assert behind
    assert {kind for _, kind in behind} == {"wait"}


def test_no_two_marks_in_a_row_say_the_same(world: PlanOnMesh) -> None:
    for variant in ("unbucketed", "bucketed"):
        marks = marks_of(world, 0, "joint", variant)
        assert all(before[1:] != after[1:] for before, after in pairwise(map(_told, marks)))


def test_a_wait_for_what_another_graph_launched_is_a_wait() -> None:
    import torch

    graph = torch.fx.Graph()
    given = graph.placeholder("launched")
    given.meta["val"] = torch.empty(4, device="meta")
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (given,))
    graph.output((wait,))
    reading = GraphAnalysis((), (), (), 2, order=order_of(graph))
    assert marks_in(reading, {}) == (ActivityMark(wait.name, "wait", ELSEWHERE, "forward"),)


def _told(mark: ActivityMark) -> tuple[object, ...]:
    return mark.node, mark.kind, mark.label, mark.direction, mark.bucket
