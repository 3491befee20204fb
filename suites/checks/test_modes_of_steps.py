"""Steps of every parallel mode through the pass and the audit: green as they come, red when a collective is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from torch import fx

from pytest_fxbucket.fuzz.program import aten
from pytest_fxbucket.graph import collectives
from suites.checks.traced_modes import (
    DDP,
    FULLY,
    REPLICATE,
    REPLICATE_FIRST,
    SCATTER_FIRST,
    SHARD,
    WORLD,
    Step,
    Traced,
    Way,
    traced,
)

step_of = cache(traced)
SHARDED = Way(SHARD, (("reduce_scatter", "avg", SHARD),))
HALF = Way("", (("all_reduce", "avg", SHARD),))
TWICE = Way("", (("all_reduce", "sum", REPLICATE), ("all_reduce", "avg", SHARD)))
REPLICATED = Step(way=DDP, reshard=False)
HYBRIDS = {"scatter first": Step(way=SCATTER_FIRST, world=4), "replicate first": Step(way=REPLICATE_FIRST, world=4)}
EXPERT = Step(world=4, ways=(("layers.1.w", SHARDED),))
FROZEN = frozenset({"layers.0.w", "layers.1.w", "layers.1.b"})


def biases(way: Way) -> tuple[tuple[str, Way], ...]:
    return tuple((f"layers.{i}.b", way) for i in range(3))


GATHERS = {("forward", "all_gather"): 3, ("backward", "all_gather"): 2}
STEPS: dict[str, tuple[Step, dict[tuple[str, str], int]]] = {
    "replicated": (REPLICATED, {("backward", "all_reduce"): 3}),
    "replicated, frozen": (Step(way=DDP, reshard=False, frozen=FROZEN), {("backward", "all_reduce"): 2}),
    "replicated, recomputed": (Step(way=DDP, reshard=False, recompute=True), {("backward", "all_reduce"): 3}),
    **{
        name: (step, {**GATHERS, ("backward", "reduce_scatter"): 3, ("backward", "all_reduce"): 3})
        for name, step in HYBRIDS.items()
    },
    "frozen": (
        Step(frozen=FROZEN),
        {("forward", "all_gather"): 3, ("backward", "all_gather"): 2, ("backward", "reduce_scatter"): 2},
    ),
    "recomputed": (
        Step(recompute=True),
        {("forward", "all_gather"): 3, ("backward", "all_gather"): 3, ("backward", "reduce_scatter"): 3},
    ),
    "tensor parallel": (
        Step(way=SHARDED, world=4, activations=REPLICATE),
        {**GATHERS, ("backward", "reduce_scatter"): 3, ("forward", "all_reduce"): 3},
    ),
    "replicated, tensor parallel": (
        Step(way=HALF, world=4, reshard=False, activations=REPLICATE),
        {("backward", "all_reduce"): 3, ("forward", "all_reduce"): 3},
    ),
    "experts": (EXPERT, {("forward", "all_gather"): 4, ("backward", "all_gather"): 2, ("backward", "reduce_scatter"): 4}),
    **{
        f"{name}, scaled": (
            replace(step, scaled=True),
            {**GATHERS, ("backward", "reduce_scatter"): 3, ("backward", "all_reduce"): 3},
        )
        for name, step in HYBRIDS.items()
    },
    "tensor parallel, biases reduced over it too": (
        Step(way=SHARDED, world=4, activations=REPLICATE, ways=biases(REPLICATE_FIRST)),
        {**GATHERS, ("forward", "all_reduce"): 3, ("backward", "all_reduce"): 3, ("backward", "reduce_scatter"): 3},
    ),
    "replicated, tensor parallel, biases reduced over it too": (
        Step(way=HALF, world=4, reshard=False, activations=REPLICATE, ways=biases(TWICE)),
        {("forward", "all_reduce"): 3, ("backward", "all_reduce"): 6},
    ),
    "several ways in an entry": (
        Step(way=SCATTER_FIRST, world=4, ways=(("layers.0.w", SHARDED), ("layers.2.b", FULLY))),
        {
            ("forward", "all_gather"): 4,
            ("backward", "all_gather"): 2,
            ("backward", "reduce_scatter"): 5,
            ("backward", "all_reduce"): 3,
        },
    ),
    "everything": (
        Step(way=SCATTER_FIRST, world=4, activations=REPLICATE, microbatches=2, recompute=True),
        {
            ("forward", "all_gather"): 6,
            ("backward", "all_gather"): 6,
            ("forward", "all_reduce"): 6,
            ("backward", "all_reduce"): 9,
            ("backward", "reduce_scatter"): 3,
        },
    ),
}


def compute_of(made: Traced, after: fx.GraphModule, direction: str) -> list[str]:
    """Entries whose compute stands in ``direction``, in order, each run of them once."""
    found = [fqn.rpartition(".")[0] for _, of, fqn in made.read(after.graph).computes if of == direction]
    return [entry for i, entry in enumerate(found) if not i or found[i - 1] != entry]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("options", [{}, {"prefetch": 0, "defer_reduce": False}, {"prefetch": 2}], ids=str)
def test_every_mode_is_bucketed_and_green(name: str, options: dict[str, int]) -> None:
    step, launches = STEPS[name]
    made = step_of(step)
    after = made.passed(**options).after
    assert made.problems(after, **options) == []
    assert Counter((b.direction, b.kind) for b in made.read(after.graph).buckets) == launches


@pytest.mark.parametrize("name", [name for name in STEPS if "frozen" not in name])
def test_every_layer_computes_in_both_directions(name: str) -> None:
    made = step_of(STEPS[name][0])
    after = made.passed().after
    rounds = made.step.microbatches
    assert compute_of(made, after, "forward") == [f"layers.{i}" for i in range(3)] * rounds
    assert list(dict.fromkeys(compute_of(made, after, "backward"))) == [f"layers.{i}" for i in (2, 1, 0)]


def test_compute_that_reads_another_replicated_parameter_is_red() -> None:
    made = step_of(REPLICATED)
    after = made.passed().after
    products = [node for node in after.graph.nodes if node.target is aten.mm.default]
    products[1].update_arg(1, products[0].args[1])
    assert "forward compute uses layers.0.w 2 times, once before the pass" in made.problems(after)


def launches(graph: fx.Graph, kind: str, group: str = "") -> list[fx.Node]:
    found = [node for node in graph.nodes if collectives.launch_kind(node) == kind]
    return [node for node in found if not group or collectives.argument(node, "group_name") == group]


def dropped(graph: fx.Graph, kind: str) -> None:
    """The first further reduction is left out: its input is taken for its result."""
    launch = launches(graph, kind)[0]
    (wait,) = collectives.waits_of(launch)
    wait.replace_all_uses_with(launch.all_input_nodes[0])
    graph.eliminate_dead_code()
    if launch in graph.nodes:
        graph.erase_node(wait)
        graph.erase_node(launch)


def on_group(graph: fx.Graph, kind: str, group: str) -> None:
    launch = launches(graph, kind)[0]
    launch.args = (*launch.args[:-1], group)


def reduced_twice(graph: fx.Graph, kind: str) -> None:
    launch = launches(graph, kind)[0]
    (wait,) = collectives.waits_of(launch)
    with graph.inserting_after(wait):
        again = graph.node_copy(launch)
    with graph.inserting_after(again):
        last = graph.node_copy(wait)
    wait.replace_all_uses_with(last)
    again.update_arg(0, wait)
    last.update_arg(0, again)


BREAKS: dict[str, tuple[Callable[[fx.Graph], None], str]] = {
    "the second reduction is dropped": (lambda g: dropped(g, "all_reduce"), "are not all-reduced in backward"),
    "the second runs on the first's group": (lambda g: on_group(g, "all_reduce", SHARD), "runs on another process group"),
    "the second runs on all ranks": (lambda g: on_group(g, "all_reduce", WORLD), "runs on another process group"),
    "the second is done twice": (lambda g: reduced_twice(g, "all_reduce"), "are all-reduced more than once in backward"),
}


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_hybrid_reduction_that_is_wrong_is_red(name: str, broken: str) -> None:
    made = step_of(HYBRIDS[name])
    after = made.passed().after
    change, says = BREAKS[broken]
    change(after.graph)
    after.graph.lint()
    found = made.problems(after)
    assert any(says in problem for problem in found), found


@pytest.mark.parametrize("name", HYBRIDS)
def test_reductions_in_the_other_order_are_red(name: str) -> None:
    other = step_of(next(step for key, step in HYBRIDS.items() if key != name))
    made = step_of(HYBRIDS[name])
    found = made.problems(other.passed().after)
    assert any("reduces by" in problem or "bytes" in problem for problem in found), found


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_of_two_reductions_is_deferred_behind_its_own_next_one(name: str) -> None:
    step = HYBRIDS[name]
    made = step_of(step)
    passed = made.passed()
    first, second = (kind for kind, _, _ in step.way.reductions)
    events = [
        line.strip() for line in made.text(passed.after.graph) if "reduce" in line and line.startswith(("  launch", "  wait"))
    ]
    assert [" ".join(event.split()) for event in events] == [
        f"launch {first} layers.2",
        f"launch {first} layers.1",
        f"wait {first} layers.2",
        f"launch {second} layers.2",
        f"launch {first} layers.0",
        f"wait {first} layers.1",
        f"launch {second} layers.1",
        f"wait {second} layers.2",
        f"wait {first} layers.0",
        f"launch {second} layers.0",
        f"wait {second} layers.1",
        f"wait {second} layers.0",
    ]
    assert passed.report.left_alone == ()


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_reductions_that_are_not_deferred_are_red_and_so_are_those_that_are_and_should_not(name: str) -> None:
    made = step_of(HYBRIDS[name])
    first, second = (kind for kind, _, _ in made.step.way.reductions)
    waited = made.problems(made.passed(defer_reduce=False).after)
    for kind in (first, second):
        assert (
            f"entry layers.2, backward {kind} is waited for before layers.1 launches its reduction: it is not deferred"
            in waited
        )
    late = made.problems(made.passed().after, defer_reduce=False)
    assert any(f"backward {first} is waited for after layers.1 launches its reduction" in problem for problem in late)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_wait_by_hand_is_that_for_the_last_of_two_reductions(name: str) -> None:
    made = step_of(HYBRIDS[name])
    before = {"backward": {"layers.2": "layers.0"}}
    assert made.problems(made.passed(wait_before=before).after, wait_before=before) == []
    assert any("reduction is not waited for" in problem for problem in made.problems(made.passed().after, wait_before=before))


def test_a_wait_by_hand_in_a_replicated_step_stands_before_whatever_reads_or_makes() -> None:
    made = step_of(REPLICATED)
    before = {"backward": {"layers.2": "layers.1"}}
    assert made.problems(made.passed(wait_before=before).after, wait_before=before) == []


def test_an_expert_is_reduced_on_its_own_group_and_one_that_is_not_is_red() -> None:
    made = step_of(EXPERT)
    after = made.passed().after
    (launch,) = launches(after.graph, "reduce_scatter", SHARD)
    launch.args = (*launch.args[:-1], WORLD)
    assert "backward reduce_scatter of layers.1.w runs on another process group than before the pass" in made.problems(after)


def test_what_is_recomputed_is_gathered_ahead_of_its_recompute() -> None:
    made = step_of(Step(recompute=True))
    after = made.passed().after
    uses = {b.fqns: b for b in made.read(after.graph).buckets if (b.direction, b.kind) == ("backward", "all_gather")}
    assert [fqns[0] for fqns in sorted(uses, key=lambda fqns: uses[fqns].first_use or 0)] == [
        f"layers.{i}.w" for i in (2, 1, 0)
    ]
    nodes = list(after.graph.nodes)
    for bucket in uses.values():
        assert bucket.first_use is not None
        assert nodes[bucket.first_use].target is aten.mm.default
    found = made.problems(made.passed(prefetch=0).after)
    assert "entry layers.1, backward all_gather is launched after the wait for layers.2: prefetch = 1 is not reached" in found
