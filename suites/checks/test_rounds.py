"""Microbatches: each gathers anew, in rounds that no pass may mix; gradients are added up and reduced once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import fx

from pytest_fxbucket.fuzz.program import aten
from pytest_fxbucket.golden.mismatch import changes
from pytest_fxbucket.golden.read_back import read_back
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.targets import Targets
from suites.checks.traced_modes import DDP, SCATTER_FIRST, Step, Traced, traced

TWO = Step(microbatches=2)
CHECKPOINTED = Step(microbatches=2, recompute=True)
step_of = cache(traced)


def gathers(step: Traced, graph: fx.Graph, direction: str, number: int) -> list[fx.Node]:
    """Launches of one direction and round, in order."""
    names = [b.node for b in step.read(graph).buckets if (b.kind, b.direction, b.round) == ("all_gather", direction, number)]
    return [node for node in graph.nodes if node.name in names]


def hoisted(node: fx.Node, before: fx.Node) -> None:
    """Put ``node``, and what it needs, before ``before``."""
    order = {other: i for i, other in enumerate(node.graph.nodes)}
    queue = [node]
    for one in queue:
        queue += [source for source in one.all_input_nodes if order[source] > order[before] and source not in queue]
    for one in sorted(queue, key=order.__getitem__):
        before.prepend(one)


def first_backward(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.meta.get("autograd_backward"))


def one_round(targets: Targets) -> Targets:
    return replace(targets, planned=tuple(replace(target, round=0) for target in targets.planned))


def test_every_microbatch_is_a_round_of_its_own_in_each_direction() -> None:
    found = [
        (b.direction, b.round) for b in step_of(TWO).read().buckets if b.fqns == ("layers.1.w",) and b.kind == "all_gather"
    ]
    assert found == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    ("step", "backward"),
    [
        (TWO, ["layers.2", "layers.1"]),
        (Step(microbatches=3, reshard=False), []),
        (CHECKPOINTED, ["layers.2", "layers.1", "layers.0"]),
    ],
    ids=["resharded", "kept", "recomputed"],
)
def test_rounds_are_bucketed_apart_and_green(step: Step, backward: list[str], prefetch: int) -> None:
    made = step_of(step)
    passed = made.passed(prefetch=prefetch)
    assert made.problems(passed.after, prefetch=prefetch) == []
    found = [(b.direction, b.entry) for b in passed.report.buckets if b.kind == "all_gather"]
    forward = [f"layers.{i}" for i in range(3)]
    one = [("forward", entry) for entry in forward] + [("backward", entry) for entry in backward]
    assert found == one * step.microbatches


def test_gradients_of_all_microbatches_are_reduced_once_and_the_parts_are_compute_of_their_parameter() -> None:
    reading = step_of(TWO).read()
    assert [b.fqns for b in reading.buckets if b.kind == "reduce_scatter"] == [
        (f"layers.{i}.{name}",) for i in (2, 1, 0) for name in "bw"
    ]
    once = step_of(Step()).read()
    for fqn in TWO.shapes:
        makes = [[of for _, of, name in one.computes if name == fqn] for one in (once, reading)]
        assert makes[1] == makes[0] * 2


def test_the_report_says_that_rounds_parted_an_entry() -> None:
    report = step_of(TWO).passed().report
    bucket = next(b for b in report.buckets if b.entry == "layers.0" and b.direction == "forward")
    assert [(split.reason, split.mine, split.others) for split in bucket.splits] == [("round", "round 1", ("round 2",))]


def test_rounds_in_one_launch_are_red() -> None:
    made = step_of(TWO)
    found = made.problems(made.passed(one_round).after)
    assert "entry layers.0, forward all_gather: its launch carries layers.0.w, layers.0.b twice" in found
    assert "entry layers.1, backward all_gather, round 2: its launch carries layers.1.w twice" in found
    assert any("gathered bytes alive" in problem for problem in found)


@pytest.mark.parametrize("entry", [0, 1])
def test_a_round_that_begins_over_the_backward_before_it_is_red(entry: int) -> None:
    made = step_of(TWO)
    after = made.passed().after
    hoisted(gathers(made, after.graph, "forward", 1)[entry], first_backward(after.graph))
    after.graph.lint()
    start = f"entry layers.{entry}, forward all_gather, round 2 is launched in backward, before the compute of "
    assert any(problem.startswith(start) for problem in made.problems(after))


def test_a_round_of_backward_that_begins_in_its_forward_is_red() -> None:
    made = step_of(TWO)
    after = made.passed().after
    hoisted(gathers(made, after.graph, "backward", 1)[0], gathers(made, after.graph, "forward", 1)[0])
    found = made.problems(after)
    assert any("entry layers.2, backward all_gather, round 2 is launched in forward" in problem for problem in found), found


def test_a_round_that_is_not_gathered_ahead_is_red() -> None:
    made = step_of(TWO)
    after = made.passed(prefetch=0).after
    assert (
        "entry layers.1, forward all_gather, round 2 is launched after the wait for layers.0: prefetch = 1 is not reached"
        in made.problems(after)
    )


def test_a_microbatch_whose_gradient_is_lost_is_red() -> None:
    made = step_of(TWO)
    after = made.passed().after
    sums = [node for node in after.graph.nodes if node.target is aten.add.Tensor and node.meta.get("autograd_backward")]
    sums[0].replace_all_uses_with(sums[0].args[1])
    found = made.problems(after)
    assert any("backward compute uses layers.2." in problem for problem in found), found


def test_places_by_hand_hold_in_every_round() -> None:
    made = step_of(TWO)
    at = {"forward": {"layers.2": "layers.0"}}
    before = {"backward": {"layers.2": "layers.0"}}
    passed = made.passed(launch_at=at, wait_before=before)
    assert made.problems(passed.after, launch_at=at, wait_before=before) == []
    found = made.problems(made.passed().after, launch_at=at)
    assert any(
        "layers.2, forward all_gather, round 2 is not launched before the compute of layers.0" in problem for problem in found
    ), found


@pytest.mark.parametrize("step", [TWO, Step(microbatches=2, way=DDP, reshard=False)], ids=["sharded", "replicated"])
def test_each_microbatch_has_sections_of_its_own(step: Step) -> None:
    made = step_of(step)
    text = "\n".join(["graph joint", *made.text(made.passed().after.graph), ""])
    events = read_back(text).graphs["joint"].events
    assert list(events) == ["forward", "backward", "forward #2", "backward #2"]
    assert [event.removesuffix(" #2") for event in events["forward #2"]] == events["forward"]
    assert not any("reduce" in event for event in events["backward"])
    assert sum("launch" in event and "reduce" in event for event in events["backward #2"]) == 3


def test_the_diff_of_goldens_names_the_microbatch() -> None:
    made = step_of(TWO)
    texts = ["\n".join(["graph joint", *made.text(made.passed().after.graph), ""]) for _ in range(2)]
    lines = texts[1].split("\n")
    at = lines.index("  launch  all_gather layers.2 #2")
    lines[at], lines[at - 1] = lines[at - 1], lines[at]
    assert changes(texts[0], "\n".join(lines)) == [
        "forward #2: launch all_gather layers.2 #2 moved earlier past compute layers.0"
    ]


def test_hybrid_microbatches_reduce_in_the_last_one_alone() -> None:
    made = step_of(Step(microbatches=2, way=SCATTER_FIRST, world=4))
    passed = made.passed()
    assert made.problems(passed.after) == []
    nodes = list(passed.after.graph.nodes)
    last = max(nodes.index(node) for node in gathers(made, passed.after.graph, "forward", 1))
    reductions = [i for i, n in enumerate(nodes) if collectives.launch_kind(n) in ("reduce_scatter", "all_reduce")]
    assert len(reductions) == 6
    assert min(reductions) > last
