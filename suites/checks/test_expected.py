"""Which launches a plan promises: keys, caps, neighbours by size, members that need each other, and what stays alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.checks.promises.launches import Expected, expected, launch_problems
from pytest_fxbucket.graph.buckets import GraphAnalysis, Member
from pytest_fxbucket.graph.order import Order, order_of
from suites.checks.launches_by_hand import BF16, ENTRIES, ENTRY_OF, F32, gather, promise

KB = 1 / 1024
aten = torch.ops.aten


def graph(order: Sequence[str] = tuple(ENTRY_OF), **change: Mapping[str, Any]) -> GraphAnalysis:
    """A gather of each of ``order``; ``change`` by FQN, dots left out."""
    buckets = [gather(fqn, place, **change.get(fqn.replace(".", ""), {})) for place, fqn in enumerate(order)]
    return GraphAnalysis(tuple(buckets), (), (), 100)


def needing(sources: Mapping[str, set[str]]) -> Order:
    """Order of a graph of launches, each named as it is and reading its ``sources``."""
    made, nodes = fx.Graph(), dict[str, fx.Node]()
    for name in TopologicalSorter({fqn: sorted(sources.get(fqn, ())) for fqn in ENTRY_OF}).static_order():
        nodes[name] = made.call_function(aten.add.Tensor, tuple(nodes[source] for source in sorted(sources.get(name, ()))))
        nodes[name].name = name
    return order_of(made)


def told(found: Sequence[Expected]) -> list[tuple[str, ...]]:
    return [one.fqns for one in found]


def test_an_entry_is_one_launch_in_order_of_registration_or_of_execution() -> None:
    turned = graph(("a.w", "a.u", "b.v", "a.v", "b.u"))
    assert told(expected(promise(), turned, None)) == list(ENTRIES.values())
    assert told(expected(promise(layout="execution"), turned, None)) == [("a.w", "a.u", "a.v"), ("b.v", "b.u")]
    assert told(expected(promise(enabled=False), turned, None)) == [("a.w",), ("a.u",), ("b.v",), ("a.v",), ("b.u",)]


@pytest.mark.parametrize(
    "change",
    [{"dtype": BF16}, {"group": "1"}, {"direction": "backward"}, {"kind": "all_reduce", "op": "sum"}, {"parts": 4}],
)
def test_members_of_one_launch_agree_in_all_that_a_launch_says(change: dict[str, Any]) -> None:
    found = expected(promise(), graph(av=change), None)
    assert sorted(told(found)) == [("a.u", "a.w"), ("a.v",), ("b.u", "b.v")]


def test_only_gathers_carry_several_dtypes_and_only_if_asked_to() -> None:
    whole = graph(av={"dtype": BF16})
    assert told(expected(promise(dtypes="mixed"), whole, None)) == list(ENTRIES.values())
    sums = {fqn.replace(".", ""): {"kind": "all_reduce", "op": "sum"} for fqn in ENTRY_OF}
    sums["av"]["dtype"] = BF16
    assert len(expected(promise(dtypes="mixed"), graph(**sums), None)) == 3


def test_a_launch_closes_before_it_grows_above_its_cap_and_one_member_may_be_larger() -> None:
    assert told(expected(promise(cap_mb=(0.5 * KB,)), graph(), None)) == [("a.u", "a.v"), ("a.w",), ("b.u", "b.v")]
    large = graph(av={"size": 4096})
    assert told(expected(promise(cap_mb=(0.5 * KB,)), large, None)) == [("a.u",), ("a.v",), ("a.w",), ("b.u", "b.v")]


def test_caps_are_of_entries_in_the_plans_order_and_the_last_is_for_the_rest() -> None:
    of_a = [("a.u",), ("a.v",), ("a.w",)]
    assert told(expected(promise(cap_mb=(0.25 * KB, 0.0)), graph(), None)) == [*of_a, ENTRIES["b"]]
    turned = promise(cap_mb=(0.25 * KB, 0.0), entries=("b", "a"))
    assert told(expected(turned, graph(), None)) == [ENTRIES["a"], ("b.u",), ("b.v",)]
    assert told(expected(promise(cap_mb=(0.0,)), graph(), None)) == list(ENTRIES.values())


def test_by_size_neighbours_fill_launches_whatever_their_entry() -> None:
    size = promise({}, by="size", registration=tuple(ENTRY_OF), cap_mb=(0.5 * KB,))
    turned = graph(("a.w", "a.u", "b.v", "a.v", "b.u"))
    assert told(expected(size, turned, None)) == [("a.u", "a.w"), ("a.v", "b.v"), ("b.u",)]
    assert {one.label for one in expected(size, turned, None)} == {
        f"by size, forward all_gather, part {n} of 3" for n in (1, 2, 3)
    }


def test_members_that_need_each_other_are_parted_into_as_few_launches_as_the_longest_chain() -> None:
    chain = needing({"a.v": {"a.u"}, "a.w": {"a.u"}})
    assert told(expected(promise(), graph(), chain)) == [("a.u",), ("a.v", "a.w"), ENTRIES["b"]]
    longer = needing({"a.v": {"a.u"}, "a.w": {"a.u", "a.v"}})
    assert told(expected(promise(), graph(), longer)) == [("a.u",), ("a.v",), ("a.w",), ENTRIES["b"]]


def test_buckets_that_would_wait_for_each_other_in_a_circle_may_be_parted_and_no_others() -> None:
    circle = needing({"b.u": {"a.u"}, "a.v": {"b.v"}})
    assert [one.loose for one in expected(promise(), graph(), circle)] == [True, True]
    line = needing({"b.u": {"a.u"}, "b.v": {"a.v"}})
    assert [one.loose for one in expected(promise(), graph(), line)] == [False, False]


def test_what_no_pass_may_merge_stays_alone() -> None:
    alone = {"unmergeable": "its buffer is used elsewhere"}
    assert told(expected(promise(), graph(av=alone), None)) == [("a.u", "a.w"), ("a.v",), ENTRIES["b"]]
    single = promise(ranks_of={"0": (0, 1), "1": (0,)})
    assert told(expected(single, graph(au={"group": "1"}, av={"group": "1"}), None)) == [
        ("a.u",),
        ("a.v",),
        ("a.w",),
        ENTRIES["b"],
    ]


def test_launches_of_no_parameter_and_of_several_entries_are_in_no_bucket() -> None:
    nothing = {"members": (Member("", 0, 32, 23, F32),)}
    assert told(expected(promise(), graph(av=nothing), None)) == [("a.u", "a.w"), ENTRIES["b"]]
    both = {"members": (Member("a.v", 0, 16, 23, F32), Member("b.v", 64, 16, 23, F32))}
    assert told(expected(promise(), graph(("a.u", "a.v", "a.w", "b.u"), av=both), None)) == [
        ("a.u", "a.w"),
        ("a.v", "b.v"),
        ("b.u",),
    ]


def test_a_parameter_that_is_gathered_over_two_groups_is_missed_on_each_of_them() -> None:
    """Sharded over both; gathered twice over one of them it is not whole."""
    both = GraphAnalysis((gather("a.u", 0), gather("a.u", 1, group="1", node="outer")), (), (), 100)
    same = GraphAnalysis((gather("a.u", 0), gather("a.u", 1, node="outer")), (), (), 100)
    assert list(launch_problems(promise(), both, both)) == []
    found = list(launch_problems(promise(), both, same))
    assert "entry a, forward all_gather float32: a.u is not gathered in forward" in found
    assert "entry a, forward all_gather float32: a.u is gathered more than once in forward" in found
