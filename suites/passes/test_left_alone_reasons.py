"""Of each collective that stays as it was the report says why: the sentences that no other suite shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

import pytest
from bucketing import passed
from hand_made import RANKS, HandMade, aten, c10d, chain
from torch import fx

from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import LeftAlone, by_module, by_parameter


def left_alone(gm: fx.GraphModule, *entries: str, **options: Any) -> list[LeftAlone]:
    targets = by_module(gm.graph, [(entry, [entry]) for entry in entries], None)
    return list(ManualPass.of(**options).run(gm.graph, targets).left_alone)


def said(gm: fx.GraphModule, *entries: str, **options: Any) -> list[tuple[str, str]]:
    return [(left.what, left.reason) for left in left_alone(gm, *entries, **options)]


def constant(made: HandMade, name: str, value: object) -> fx.Node:
    """An input that is no tensor."""
    node = made.graph.placeholder(name)
    node.meta["val"] = value
    return node


@pytest.mark.parametrize(("number", "reason"), [(1, "its group size n is no number"), (2, "its process group is no constant")])
def test_a_group_that_the_graph_does_not_name(number: int, reason: str) -> None:
    made = HandMade()
    arguments: list[Any] = [made.placeholder("p"), RANKS, "0"]
    arguments[number] = constant(made, "n", arguments[number])
    launch = made.call(c10d.all_gather_into_tensor.default, *arguments, module="a")
    gm = made.returns(made.call(c10d.wait_tensor.default, launch))
    assert [left.reason for left in left_alone(gm, "a")] == [reason]


def test_a_launch_of_nothing() -> None:
    made = HandMade()
    made.call(c10d.all_gather_into_tensor_coalesced.default, [], RANKS, "0", module="a")
    assert said(made.returns(), "a") == [
        ("all_gather of all_gather_into_tensor_coalesced_default (forward)", "it sends nothing")
    ]


def test_a_part_that_nobody_waits_for() -> None:
    made = HandMade()
    shards = [made.placeholder(name) for name in "pq"]
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, shards, RANKS, "0", module="a")
    wait = made.call(c10d.wait_tensor.default, made.call(getitem, launch, 0))
    assert said(made.returns(wait), "a") == [("all_gather of p, q (forward)", "nobody waits for a part of it")]


def test_a_launch_of_a_module_without_an_entry_is_told_with_what_it_carries() -> None:
    (first, second) = left_alone(chain(("a", "b")), "a")
    assert (first.what, first.reason) == ("all_gather of b_weight (forward)", "no entry names its module")
    assert (second.direction, second.kind, second.fqns) == ("forward", "all_gather", ("b_scale",))


def _by(entry_of: Mapping[str, str], nameless: bool = False) -> list[tuple[str, str]]:
    """What is left alone of a graph that was bucketed before, its launches sorted anew."""
    outcome = passed("linears")
    reading = outcome.after
    if nameless:
        first, *others = reading.buckets
        members = tuple(replace(member, fqn="") for member in first.members)
        reading = replace(reading, buckets=(replace(first, members=members), *others))
    targets = by_parameter(outcome.graph, reading, outcome.step.inputs["joint"], entry_of)
    return [(left.what, left.reason) for left in targets.left_alone][:1]


def test_a_launch_that_carries_parameters_of_several_entries() -> None:
    names = [parameter.fqn for parameter in passed("linears").step.parameters]
    assert _by({fqn: fqn for fqn in names}) == [
        (
            "all_gather of layers.0.weight, layers.0.bias (forward)",
            "it carries parameters of several entries: layers.0.bias, layers.0.weight",
        )
    ]


def test_a_launch_that_carries_no_parameter() -> None:
    names = [parameter.fqn for parameter in passed("linears").step.parameters]
    ((what, reason),) = _by(dict.fromkeys(names, "all"), nameless=True)
    assert what.startswith("all_gather of all_gather_into_tensor")
    assert reason == "it carries no parameter and no parameter's gradient"


def test_a_launch_that_cannot_go_ahead_and_a_wait_that_cannot_go_back() -> None:
    made = HandMade()
    inner = made.gather(made.placeholder("p"), "a")
    outer = made.gather(inner, "b")
    first = made.reduce(made.placeholder("x", 64, 3), "a")
    made.reduce(made.call(aten.neg.default, first), "b")
    launch, wait = outer.all_input_nodes[0], first
    (ahead, back) = left_alone(made.returns(made.call(aten.neg.default, outer)), "a", "b")
    assert (ahead.what, ahead.kind) == ("launch of b (forward)", "")
    assert ahead.reason == f"{launch.name} cannot be launched before {inner.name}: it depends on {inner.name}"
    assert back.what == "wait of a's reduction"
    assert back.reason.startswith(f"{wait.name} cannot wait until reduce_scatter_tensor_default_1 is launched")


def test_an_order_that_no_input_can_carry() -> None:
    made = HandMade()
    waits = [made.gather(made.placeholder(name), name) for name in "pq"]
    first = made.call(aten.neg_.default, waits[0])
    gm = made.returns(made.call(aten.add.Tensor, first, waits[1]))
    launch = waits[1].all_input_nodes[0].name
    options = {"insert_overlap_deps": True, "launch_at": {"forward": {"q": "p"}}}
    assert (f"order of {launch} and {first.name}", "no input of the later one can carry it") in said(gm, "p", "q", **options)
