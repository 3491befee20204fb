"""Our pass on captured steps: what it merges, in which byte order, what it moves, and what it leaves where it was."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pytest_fxbucket.graph.buckets import Bucket, gathered_lives, peak_bytes
from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.order import displaced
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import by_parameter
from suites.passes.bucketing import CASES, Outcome, as_report, computes, entry_of, passed, plan_of, world_of

NOTHING_AHEAD: dict[str, Any] = {"prefetch": 0, "defer_reduce": False}
BY_EXECUTION: dict[str, Any] = {"layout": "execution", "prefetch": 2}
"""Beside what holds by default: most tests ask for these alone, so that each step is passed once."""


@pytest.mark.parametrize("case", CASES)
def test_each_entry_has_one_launch_for_each_direction_kind_and_dtype_and_the_report_says_so(case: str) -> None:
    outcome = passed(case)
    keys = Counter((entry_of(outcome, b), b.direction, b.kind, b.dtype) for b in outcome.after.buckets)
    assert set(keys.values()) == {1}
    before = Counter((b.kind, b.direction, b.dtype, fqn) for b in outcome.before.buckets for fqn in b.fqns)
    after = Counter((b.kind, b.direction, b.dtype, fqn) for b in outcome.after.buckets for fqn in b.fqns)
    assert after == before, "every parameter is still carried, once for each launch it had"
    assert len(outcome.after.buckets) < len(outcome.before.buckets)
    assert outcome.after.problems == ()
    derived = [as_report(outcome, bucket) for bucket in outcome.after.buckets]
    assert [replace(bucket, splits=()) for bucket in outcome.report.buckets] == derived
    assert outcome.report.left_alone == ()


@pytest.mark.parametrize("layout", ["registration", "execution"])
@pytest.mark.parametrize("case", CASES)
def test_members_lie_in_the_layout_that_was_asked_for(case: str, layout: str) -> None:
    outcome = passed(case, **({} if layout == "registration" else BY_EXECUTION))
    registered = [p.fqn for p in outcome.step.parameters]
    for bucket in outcome.after.buckets:
        if layout == "registration":
            assert list(bucket.fqns) == sorted(bucket.fqns, key=registered.index)
        else:
            same = [b for b in outcome.before.buckets if b.kind == bucket.kind and b.direction == bucket.direction]
            launched = {b.fqns[0]: b.launch for b in same}
            assert list(bucket.fqns) == sorted(bucket.fqns, key=launched.__getitem__)


def test_the_two_layouts_are_not_the_same() -> None:
    layouts = [[b.fqns for b in passed("late", **layout).after.buckets] for layout in ({}, BY_EXECUTION)]
    assert layouts[0] != layouts[1]


@pytest.mark.parametrize("options", [NOTHING_AHEAD, {}, BY_EXECUTION, {"prefetch": 3}])
@pytest.mark.parametrize("case", ["llama", "linears"])
def test_gathers_are_launched_as_far_ahead_as_asked(case: str, options: dict[str, Any]) -> None:
    outcome, depth = passed(case, **options), options.get("prefetch", 1)
    for direction in ("forward", "backward"):
        stages = _stages(outcome, "all_gather", direction)
        assert len(stages) >= 3
        for i, stage in enumerate(stages):
            ahead = [j for j in range(i) if stage.launch < _wait(stages[j])]
            assert len(ahead) == min(depth, i), f"{direction} stage {i}"
    last = _stages(outcome, "all_gather", "forward")[-1]
    assert _stages(outcome, "all_gather", "backward")[0].launch > _wait(last), "parameters would be whole over the loss"


@pytest.mark.parametrize("case", ["llama", "linears"])
def test_a_reduction_is_waited_for_behind_the_next_launch(case: str) -> None:
    stages = _stages(passed(case), "reduce_scatter", "backward")
    for one, following in pairwise(stages):
        assert _wait(one) > following.launch
        assert _wait(one) < _wait(following)
    for one, following in pairwise(_stages(passed(case, **NOTHING_AHEAD), "reduce_scatter", "backward")):
        assert _wait(one) < following.launch


def test_without_merging_launches_are_moved_one_by_one() -> None:
    outcome = passed("linears", enabled=False)
    assert [len(b.members) for b in outcome.after.buckets] == [1] * len(outcome.before.buckets)
    assert outcome.report.launches_before == outcome.report.launches_after == len(outcome.before.buckets)
    forward = [b for b in outcome.after.buckets if b.kind == "all_gather" and b.direction == "forward"]
    waited = min(_wait(b) for b in forward if b.fqns[0].startswith("layers.0."))
    assert all(b.launch < waited for b in forward if b.fqns[0].startswith("layers.1."))
    assert all(b.launch > waited for b in forward if b.fqns[0].startswith("layers.2."))


@pytest.mark.parametrize("options", [{}, BY_EXECUTION])
@pytest.mark.parametrize("case", CASES)
def test_only_what_must_move_moves(case: str, options: dict[str, Any]) -> None:
    outcome = passed(case, **options)
    before = computes(outcome.step.graphs["joint"].graph)
    kept = set(before)
    assert [n.name for n in outcome.graph.nodes if n.name in kept] == before
    assert len(before) > 10


def test_few_other_nodes_are_displaced_and_no_more_is_gathered_at_once_than_the_entry_in_use_and_the_one_ahead() -> None:
    outcome = passed("llama")
    graphs = (outcome.step.graphs["joint"].graph, outcome.graph)
    names = [[node.name for node in graph.nodes if not (is_wait(node) or launch_kind(node))] for graph in graphs]
    moved, counted = displaced(*names)
    assert (outcome.report.displaced, outcome.report.compared) == (moved, counted)
    assert moved <= counted / 20
    peaks = [peak_bytes(gathered_lives(reading)) for reading in (outcome.before, outcome.after)]
    two = sorted((bucket.bytes for bucket in outcome.after.buckets if bucket.kind == "all_gather"), reverse=True)[:2]
    assert peaks[1] - peaks[0] <= sum(two)


def test_nothing_to_merge_and_nothing_to_move_changes_nothing() -> None:
    outcome = passed("llama", enabled=False, prefetch=0, defer_reduce=False)
    assert str(outcome.graph) == str(outcome.step.graphs["joint"].graph)


def test_unplanned_parameters_are_left_alone_and_said() -> None:
    outcome = passed("linears", entries=["layers.[0-1]"], unplanned="allow")
    for fqn in ("layers.2.weight", "layers.3.bias"):
        alone = [b.fqns for b in outcome.after.buckets if fqn in b.fqns]
        assert alone
        assert set(alone) == {(fqn,)}
    said = [(left.what, left.reason) for left in outcome.report.left_alone]
    assert ("all_gather of layers.2.weight (forward)", "no entry names its parameter") in said
    assert len(said) == sum(b.fqns[0][:8] in ("layers.2", "layers.3") for b in outcome.before.buckets)


def test_unplanned_parameters_become_one_entry_named_root() -> None:
    outcome = passed("linears", entries=["layers.[0-1]"], unplanned="root")
    root = [b.members for b in outcome.report.buckets if b.entry == "root"]
    assert ("layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias") in root
    assert outcome.report.left_alone == ()


@pytest.mark.parametrize("case", ["llama", "uneven", "two_dtypes"])
def test_every_rank_gets_the_same_graph(case: str) -> None:
    assert [ranks for ranks, _ in world_of(case).distinct()] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("case", "options"),
    [*((case, options) for case in CASES for options in ({}, BY_EXECUTION)), ("linears", {"enabled": False})],
)
def test_on_its_own_output_it_changes_nothing(case: str, options: dict[str, Any]) -> None:
    outcome = passed(case, **options)
    graph = copy.deepcopy(outcome.graph)
    entries = {fqn: bucket.entry for bucket in outcome.report.buckets for fqn in bucket.members}
    targets = by_parameter(graph, outcome.after, outcome.step.inputs["joint"], entries)
    plan = plan_of(case, **options)
    manual = ManualPass(plan.bucket, plan.overlap)
    report = manual.run(graph, targets)
    assert report.left_alone == ()
    said = [[replace(bucket, splits=(), launches_before=1) for bucket in one.buckets] for one in (report, outcome.report)]
    assert said[0] == said[1]
    assert report.launches_before == report.launches_after == len(outcome.after.buckets)
    assert report.displaced == 0
    assert str(graph) == str(outcome.graph)


@pytest.mark.parametrize("case", ["llama", "twice"])
def test_the_captured_step_is_never_changed(case: str) -> None:
    outcome = passed(case)
    graph = outcome.step.graphs["joint"].graph
    text, metas = str(graph), [dict(node.meta) for node in graph.nodes]
    again = passed(case, **BY_EXECUTION)
    assert again.step is outcome.step
    assert str(graph) == text
    assert [node.meta.keys() for node in graph.nodes] == [meta.keys() for meta in metas]
    assert sum(launch_kind(node) is not None for node in graph.nodes) == len(outcome.before.buckets)


def _stages(outcome: Outcome, kind: str, direction: str) -> list[Bucket]:
    """Merged launches in order of their waits."""
    found = [b for b in outcome.after.buckets if b.kind == kind and b.direction == direction]
    return sorted(found, key=_wait)


def _wait(bucket: Bucket) -> int:
    assert bucket.wait is not None
    return bucket.wait
