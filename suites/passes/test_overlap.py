"""Where launches and waits stand: prefetch, deferral, and places chosen by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from bucketing import passed
from hand_made import chain
from torch import fx

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_module, by_parameter

MODULES = ("a", "b", "c", "d")


def scheduled(*, backward: bool = False, modules: tuple[str, ...] = MODULES, **options: Any) -> tuple[list[str], PassReport]:
    """Events in order, as ``launch a``, ``wait a``, ``use a`` (its first compute), ``reduce a``, ``reduced a``."""
    gm = chain(modules, backward=backward)
    uses = {node.name: f"use {node.meta['nn_module_stack'].popitem()[0]}" for node in gm.graph.nodes if _is_compute(node)}
    targets = by_module(gm.graph, [(name, [name]) for name in modules], None)
    report = ManualPass.of(**options).run(gm.graph, targets)
    events: list[str] = []
    for node in gm.graph.nodes:
        kind = collectives.launch_kind(node)
        if kind is not None:
            events.append(f"{'launch' if kind == 'all_gather' else 'reduce'} {_entry(node)}")
        elif collectives.is_wait(node):
            launch = node.all_input_nodes[0]
            events.append(f"{'wait' if collectives.is_all_gather(launch) else 'reduced'} {_entry(launch)}")
        elif node.name in uses and uses[node.name] not in events:
            events.append(uses[node.name])
    return events, report


def _is_compute(node: fx.Node) -> bool:
    return "mul" in node.name or "neg" in node.name


def _entry(launch: fx.Node) -> str:
    return str(launch.meta["fxbucket_entry"])


def test_without_reordering_buckets_stand_where_their_first_member_stood() -> None:
    events, _ = scheduled(prefetch=0, defer_reduce=False)
    assert events == [f"{what} {m}" for m in MODULES for what in ("launch", "wait", "use")]


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, "launch a, launch b, wait a, use a, launch c, wait b, use b, launch d, wait c, use c, wait d, use d"),
        (2, "launch a, launch b, launch c, wait a, use a, launch d, wait b, use b, wait c, use c, wait d, use d"),
        (9, "launch a, launch b, launch c, launch d, wait a, use a, wait b, use b, wait c, use c, wait d, use d"),
    ],
)
def test_gathers_are_launched_as_many_entries_ahead_as_asked(depth: int, expected: str) -> None:
    events, report = scheduled(prefetch=depth)
    assert ", ".join(events) == expected
    assert report.left_alone == ()
    assert report.displaced == 0


def test_a_reduction_is_waited_for_behind_the_launch_of_the_next() -> None:
    events, _ = scheduled(backward=True, prefetch=0)
    assert [e for e in events if e.startswith("reduc")] == [
        *("reduce d", "reduce c", "reduced d", "reduce b", "reduced c", "reduce a", "reduced b", "reduced a"),
    ]


def test_a_gather_is_launched_where_the_user_says_and_the_others_are_prefetched() -> None:
    events, _ = scheduled(launch_at={"forward": {"d": "a"}})
    assert ", ".join(events) == (
        "launch a, launch b, wait a, launch d, use a, launch c, wait b, use b, wait c, use c, wait d, use d"
    )


def test_a_gather_can_be_launched_later_than_prefetch_would() -> None:
    events, _ = scheduled(prefetch=2, launch_at={"forward": {"d": "c"}})
    assert events.index("launch d") == events.index("use c") - 1


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


def test_a_reduction_cannot_be_waited_for_before_it_is_launched() -> None:
    with pytest.raises(PlanError, match=r"the compute of 'layers\.2' starts before the reduction is launched"):
        captured("linears", wait_before={"backward": {"layers.1": "layers.2"}})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"launch_at": {"forward": {"x": "a"}}}, "launch_at.forward: 'x' at 'a' names no bucket: entry 'x'"),
    "an unknown value": ({"launch_at": {"forward": {"d": "x"}}}, "launch_at.forward: 'd' at 'x' names no bucket: entry 'x'"),
    "its own compute": (
        {"launch_at": {"forward": {"b": "b"}}},
        "is impossible: when the compute of 'b' starts, 'b' is used first",
    ),
    "after its own compute": ({"launch_at": {"forward": {"a": "c"}}}, "when the compute of 'c' starts, 'a' is used first"),
    "no such direction": ({"launch_at": {"backward": {"a": "b"}}}, "has no all-gather there; entries that have one: none"),
    "no reduction": (
        {"wait_before": {"backward": {"a": "b"}}},
        "entry 'a' has no reduction there; entries that have one: none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_place_that_cannot_be_had_is_an_error_that_names_it(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(PlanError) as error:
        scheduled(**options)
    assert message in str(error.value)
