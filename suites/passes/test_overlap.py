"""Where launches and waits stand: prefetch, deferral, and places chosen by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import fx

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_parameter
from suites.passes.bucketing import passed
from suites.passes.programs import chain

MODULES = ("a", "b", "c", "d")


def scheduled(*, backward: bool = False, modules: tuple[str, ...] = MODULES, **options: Any) -> tuple[list[str], PassReport]:
    """Events in order, as ``launch a``, ``wait a``, ``use a`` (its first compute), ``reduce a``, ``reduced a``."""
    gm = chain(modules, backward=backward)
    uses = {node.name: f"use {node.meta['nn_module_stack'].popitem()[0]}" for node in gm.graph.nodes if _is_compute(node)}
    report = run_pass(gm.graph, modules, **options)
    events: list[str] = []
    for node in gm.graph.nodes:
        launch = node.all_input_nodes[0] if collectives.is_wait(node) else node
        if collectives.launch_kind(launch) is not None:
            words = ("launch", "wait") if collectives.is_all_gather(launch) else ("reduce", "reduced")
            events.append(f"{words[launch is not node]} {launch.meta['fxbucket_entry']}")
        elif node.name in uses and uses[node.name] not in events:
            events.append(uses[node.name])
    return events, report


def _is_compute(node: fx.Node) -> bool:
    return "mul" in node.name or "neg" in node.name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prefetch": 0}, "launch a, wait a, use a, launch b, wait b, use b, launch c, wait c, use c, launch d, wait d, use d"),
        ({"prefetch": 1}, "launch a, launch b, wait a, use a, launch c, wait b, use b, launch d, wait c, use c, wait d, use d"),
        ({"prefetch": 2}, "launch a, launch b, launch c, wait a, use a, launch d, wait b, use b, wait c, use c, wait d, use d"),
        ({"prefetch": 9}, "launch a, launch b, launch c, launch d, wait a, use a, wait b, use b, wait c, use c, wait d, use d"),
        (
            {"launch_at": {"forward": {"d": "a"}}},
            "launch a, launch b, wait a, launch d, use a, launch c, wait b, use b, wait c, use c, wait d, use d",
        ),
        (
            {"prefetch": 2, "launch_at": {"forward": {"d": "c"}}},
            "launch a, launch b, launch c, wait a, use a, wait b, use b, wait c, launch d, use c, wait d, use d",
        ),
    ],
)
def test_gathers_are_launched_as_many_entries_ahead_as_asked_or_where_the_user_says(
    options: dict[str, Any], expected: str
) -> None:
    events, report = scheduled(**options)
    assert ", ".join(events) == expected
    assert report.left_alone == ()
    assert report.displaced == 0


def test_a_reduction_is_waited_for_behind_the_launch_of_the_next() -> None:
    events, _ = scheduled(backward=True, prefetch=0)
    assert [e for e in events if e.startswith("reduc")] == [
        *("reduce d", "reduce c", "reduced d", "reduce b", "reduced c", "reduce a", "reduced b", "reduced a"),
    ]


def captured(case: str, **options: Any) -> list[str]:
    """Events of the backward of a captured step: ``use``, ``reduce`` and ``reduced`` by entry, in order."""
    before = passed(case)
    graph = copy.deepcopy(before.step.graphs["joint"].graph)
    entry_of = {fqn: bucket.entry for bucket in before.report.buckets for fqn in bucket.members}
    targets = by_parameter(graph, before.before, before.step.inputs["joint"], entry_of)
    ManualPass.of(**options).run(graph, targets)
    reading = read_graph(graph, before.step.inputs["joint"], before.step.outputs["joint"])
    events = [(where, f"use {entry_of[fqn]}") for where, direction, fqn in reading.computes if direction == "backward"]
    for bucket in reading.buckets:
        if bucket.kind == "reduce_scatter":
            assert bucket.wait is not None
            events += [
                (at, f"{what} {entry_of[bucket.fqns[0]]}") for at, what in ((bucket.launch, "reduce"), (bucket.wait, "reduced"))
            ]
    return list(dict.fromkeys(event for _, event in sorted(events)))


def test_a_reduction_is_waited_for_right_before_the_compute_that_the_user_says() -> None:
    events = captured("linears", wait_before={"backward": {"layers.3": "layers.0"}})
    assert events[events.index("reduced layers.3") + 1] == "use layers.0"
    deferred = captured("linears")
    assert deferred.index("reduced layers.3") < deferred.index("use layers.1"), "what the test would not see without a choice"


Hand = dict[str, dict[str, str]]
BAD: dict[str, tuple[Hand, Hand, str]] = {
    "an unknown key": ({"forward": {"x": "a"}}, {}, "launch_at.forward: 'x' at 'a' names no bucket: entry 'x'"),
    "an unknown value": ({"forward": {"d": "x"}}, {}, "launch_at.forward: 'd' at 'x' names no bucket: entry 'x'"),
    "its own compute": ({"forward": {"b": "b"}}, {}, "is impossible: when the compute of 'b' starts, 'b' is used first"),
    "after its own compute": ({"forward": {"a": "c"}}, {}, "when the compute of 'c' starts, 'a' is used first"),
    "a circle": ({"forward": {"c": "a", "a": "c"}}, {}, "when the compute of 'c' starts, 'a' is used first"),
    "no such direction": ({"backward": {"a": "b"}}, {}, "has no all-gather there; entries that have one: none"),
    "no reduction": ({}, {"backward": {"a": "b"}}, "entry 'a' has no reduction there; entries that have one: none"),
    "before its launch": ({}, {"forward": {"a": "c"}}, "the compute of 'c' starts before the reduction is launched"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_place_that_cannot_be_had_is_an_error_that_names_it(case: str) -> None:
    launch_at, wait_before, message = BAD[case]
    with pytest.raises(PlanError) as error:
        scheduled(backward=True, launch_at=launch_at, wait_before=wait_before)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def gathered_in_turn(uses: str, **options: Any) -> list[str]:
    """Events of a graph that gathers anew for each use; a use in upper case is backward's."""
    made = Program(4)
    shards = {letter: made.given(letter, 2, COLUMNS) for letter in sorted(set(uses.lower()))}
    x = made.given("x", 8, COLUMNS)
    for use in uses:
        made.module, made.backward = use.lower(), use.isupper()
        x = made.call(aten.mul.Tensor, x, made.gather(shards[made.module]))
    graph_module = made.returns(x)
    run_pass(graph_module.graph, sorted(shards), **options)
    events = []
    for node in graph_module.graph.nodes:
        launch = node.all_input_nodes[0] if collectives.is_wait(node) else node
        if collectives.is_all_gather(launch):
            shard = launch.all_input_nodes[0].name
            name = shard.upper() if launch.meta.get("autograd_backward") else shard
            events.append(name if launch is node else f"wait {name}")
    return events


@pytest.mark.parametrize(
    ("uses", "prefetch", "expected"),
    [
        ("abac", 1, "a, b, wait a, wait b, a, c, wait a, wait c"),
        ("abac", 2, "a, b, wait a, c, wait b, a, wait a, wait c"),
        ("aabABaab", 1, "a, wait a, a, b, wait a, wait b, A, B, wait A, wait B, a, wait a, a, b, wait a, wait b"),
        ("abbAabb", 1, "a, b, wait a, wait b, b, wait b, A, wait A, a, wait a, b, wait b, b, wait b"),
    ],
)
def test_rounds_that_are_used_in_turn_are_launched_no_further_ahead_than_asked(uses: str, prefetch: int, expected: str) -> None:
    assert gathered_in_turn(uses, prefetch=prefetch) == expected.split(", ")
