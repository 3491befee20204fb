"""Launches that cannot share a bucket safely, or are none of the plan's: left as they were, and the reason said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten, c10d
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.targets import by_parameter
from suites.passes.bucketing import passed
from suites.passes.programs import chain, launches

RANKS = 4


def left_alone(graph_module: fx.GraphModule, *entries: str, **options: Any) -> list[tuple[str, str]]:
    """What was left alone, and why."""
    return [(left.what, left.reason) for left in run_pass(graph_module.graph, entries, **options).left_alone]


def read_early(made: Program) -> fx.Node:
    launch = made.launch_gather(*made.shards("p"))
    return made.add(made.neg(launch), made.wait(launch))


def part_read_early(made: Program) -> fx.Node:
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, made.shards("pq"), RANKS, "0")
    parts = [made.part(launch, i) for i in range(2)]
    return made.add(made.add(*map(made.wait, parts)), parts[1])


def never_waited_for(made: Program) -> fx.Node:
    (shard,) = made.shards("p")
    made.launch_gather(shard)
    return shard


def part_never_waited_for(made: Program) -> fx.Node:
    launch = made.call(c10d.all_gather_into_tensor_coalesced.default, made.shards("pq"), RANKS, "0")
    return made.wait(made.part(launch, 0))


def nothing_sent(made: Program) -> fx.Node:
    return made.call(c10d.all_gather_into_tensor_coalesced.default, [], RANKS, "0")


def size_of_no_number(made: Program) -> fx.Node:
    return made.wait(made.call(c10d.all_gather_into_tensor.default, *made.shards("p"), constant(made, RANKS), "0"))


def group_of_no_name(made: Program) -> fx.Node:
    return made.wait(made.call(c10d.all_gather_into_tensor.default, *made.shards("p"), RANKS, constant(made, "0")))


def constant(made: Program, value: Any) -> fx.Node:
    """An input that is no tensor."""
    return made.shown("n", value)


def buffer_read_elsewhere(made: Program) -> fx.Node:
    (shard,) = made.shards("p")
    out = made.buffer_for(shard)
    return made.add(made.gather_into(shard, out), made.neg(out))


def buffer_of_the_caller(made: Program) -> fx.Node:
    return made.gather_into(*made.shards("p"), *made.fulls(["out"]))


def in_place(made: Program) -> fx.Node:
    return made.all_reduce_in_place(*made.fulls("p"))


def broadcast(made: Program) -> fx.Node:
    return made.wait(made.call(c10d.broadcast.default, *made.fulls("p"), 0, "0"))


def exchanged(made: Program) -> fx.Node:
    split = [2] * RANKS
    return made.wait(made.call(c10d.all_to_all_single.default, *made.fulls("p"), split, split, "0"))


def on_one_rank(made: Program) -> fx.Node:
    return made.wait(made.call(c10d.all_gather_into_tensor.default, *made.fulls("p"), 1, "0"))


def written_in_flight(made: Program) -> fx.Node:
    """What arrives is anybody's guess: the program's own fault, which the pass must not spread."""
    (shard,) = made.shards("p")
    launch = made.launch_gather(shard)
    made.call(aten.add_.Tensor, made.call(aten.view.default, shard, [-1]), 1.0)
    return made.wait(launch)


def activation_gathered(made: Program) -> fx.Node:
    return made.gather(made.neg(*made.shards("p")))


def activation_reduced(made: Program) -> fx.Node:
    """Row-parallel: the partial products are summed, and the next weight is applied."""
    wait = made.all_reduce(*made.shards("p"))
    return made.call(aten.mm.default, made.neg(wait), made.given("w", COLUMNS, 2))


def activation_scattered(made: Program) -> fx.Node:
    """The same, under sequence parallelism."""
    return made.call(aten.mm.default, made.reduce(*made.fulls("p")), made.given("w", COLUMNS, 2))


ODD: dict[Callable[[Program], fx.Node], str] = {
    read_early: "neg_default reads it before its wait",
    part_read_early: "add_tensor_1 reads it before its wait",
    never_waited_for: "nobody waits for it",
    part_never_waited_for: "nobody waits for a part of it",
    nothing_sent: "it sends nothing",
    size_of_no_number: "its group size n is no number",
    group_of_no_name: "its process group is no constant",
    buffer_read_elsewhere: "its buffer empty_memory_format is read elsewhere, by neg_default",
    buffer_of_the_caller: "its buffer out is no new one",
    in_place: "_c10d_functional.all_reduce_.default is not bucketed",
    broadcast: "_c10d_functional.broadcast.default is not bucketed",
    exchanged: "_c10d_functional.all_to_all_single.default is not bucketed",
    on_one_rank: "its process group has one rank",
    written_in_flight: "add__tensor writes what it sends before its wait",
    activation_gathered: "it gathers what neg_default computes, no parameter",
    activation_reduced: "its result goes into a product with a weight: it carries an activation",
    activation_scattered: "its result goes into a product with a weight: it carries an activation",
}


@pytest.mark.parametrize("make", ODD)
def test_an_odd_launch_is_left_alone_and_said_and_the_others_still_merge(make: Callable[[Program], fx.Node]) -> None:
    """Beside two plain gathers and two plain reductions."""
    made = Program(RANKS)
    odd = make(made)
    others = [*map(made.gather, made.shards("rs")), *map(made.reduce, made.fulls("gh"))]
    gm = made.returns(*others) if make is nothing_sent else made.returns(odd, *others)
    report = run_pass(gm.graph, ["a"])
    assert [left.reason for left in report.left_alone] == [ODD[make]]
    assert sorted((b.kind, len(b.members)) for b in report.buckets) == [("all_gather", 2), ("reduce_scatter", 2)]
    assert len(launches(gm.graph)) == report.launches_after == 3
    assert report.launches_before == 5


def test_shards_with_padded_rows_share_a_bucket_with_the_others() -> None:
    """DTensor pads on the ranks that have too few rows: left alone there, launches would be others than on other ranks."""
    made = Program(RANKS)
    padded = made.call(aten.constant_pad_nd.default, made.given("p", 1, COLUMNS), [0, 0, 0, 1])
    report = run_pass(made.returns(made.gather(padded), made.gather(*made.shards("q"))).graph, ["a"])
    assert report.left_alone == ()
    assert [bucket.members for bucket in report.buckets] == [("p", "q")]


def test_an_all_reduce_on_a_group_of_one_rank_is_left_alone() -> None:
    """Its node does not say how many ranks there are; the group does."""
    made = Program(RANKS)
    gm = made.returns(*map(made.all_reduce, made.fulls("pq")))
    with fake_world(0, 1):
        assert [why for _, why in left_alone(gm, "a")] == ["its process group has one rank"] * 2


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("p", None, "p carries no fake value"),
        ("x", None, "x carries no fake value"),
        ("p", torch.zeros(2, COLUMNS), r"p carries a Tensor, and merging needs a fake tensor in its meta\['val'\]"),
    ],
)
def test_values_that_are_missing_or_not_fake_are_refused_by_the_node_s_name(name: str, value: Any, says: str) -> None:
    made = Program(RANKS)
    gm = made.returns(*map(made.gather, made.shards("pq")), *map(made.reduce, made.fulls("x")))
    node = next(node for node in gm.graph.nodes if node.name == name)
    node.meta = node.meta | {"val": value} if value is not None else {}
    before = gm.code
    with pytest.raises(PassError, match=says):
        manual_overlap_bucketing(gm, ["a"])
    assert gm.code == before


def test_a_launch_of_a_module_without_an_entry_is_told_with_what_it_carries() -> None:
    first, second = run_pass(chain(("a", "b")).graph, ["a"]).left_alone
    assert (first.what, first.reason) == ("all_gather of b_weight (forward)", "no entry names its module")
    assert (second.direction, second.kind, second.fqns) == ("forward", "all_gather", ("b_scale",))


def by_entry(entry_of: Mapping[str, str], nameless: bool = False) -> tuple[str, str]:
    """What is first left alone of a graph that was bucketed before, its launches sorted anew."""
    outcome = passed("linears")
    reading = outcome.after
    if nameless:
        first, *others = reading.buckets
        members = tuple(replace(member, fqn="") for member in first.members)
        reading = replace(reading, buckets=(replace(first, members=members), *others))
    left = by_parameter(outcome.graph, reading, outcome.step.inputs["joint"], entry_of).left_alone[0]
    return left.what, left.reason


def test_a_launch_that_carries_parameters_of_several_entries_or_none() -> None:
    names = [parameter.fqn for parameter in passed("linears").step.parameters]
    several = "it carries parameters of several entries: layers.0.bias, layers.0.weight"
    assert by_entry({fqn: fqn for fqn in names}) == ("all_gather of layers.0.weight, layers.0.bias (forward)", several)
    what, reason = by_entry(dict.fromkeys(names, "all"), nameless=True)
    assert what.startswith("all_gather of all_gather_into_tensor")
    assert reason == "it carries no parameter and no parameter's gradient"


def test_a_launch_that_cannot_go_ahead_and_a_wait_that_cannot_go_back() -> None:
    made = Program(RANKS)
    inner, first = made.gather(*made.shards("p")), made.reduce(made.given("x", 64, COLUMNS), "avg")
    made.module = "b"
    outer, last = made.gather(inner), made.reduce(made.neg(first), "avg")
    launch = outer.all_input_nodes[0]
    ahead, back = left_alone(made.returns(made.neg(outer), first, last), "a", "b")
    assert ahead == (
        "launch of b (forward)",
        f"{launch.name} cannot be launched before {inner.name}: it depends on {inner.name}",
    )
    assert back[0] == "wait of a's reduction"
    assert back[1].startswith(f"{first.name} cannot wait until reduce_scatter_tensor_default_1 is launched")


def test_an_order_that_no_input_can_carry() -> None:
    made = Program(RANKS)
    p, q = made.shards("pq")
    waits = [made.gather(p)]
    made.module = "b"
    waits.append(made.gather(q))
    first = made.call(aten.neg_.default, waits[0])
    gm = made.returns(made.add(first, waits[1]))
    launch = waits[1].all_input_nodes[0].name
    options = {"insert_overlap_deps": True, "launch_at": {"forward": {"b": "a"}}}
    assert (f"order of {launch} and {first.name}", "no input of the later one can carry it") in left_alone(
        gm, "a", "b", **options
    )
