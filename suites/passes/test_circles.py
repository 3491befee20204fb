"""Buckets that wait for each other in a circle are parted; what lies on none stays whole."""

from __future__ import annotations

import random

from hand_made import COLUMNS, ROWS, HandMade, aten
from torch import fx

from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.arrange import drawn, drawn_together, is_acyclic
from pytest_fxbucket.passes.grouping import grouping_of
from pytest_fxbucket.passes.targets import by_module
from pytest_fxbucket.plan.tables import Bucket

SHAPE = (8 * ROWS, COLUMNS)


def groups(gm: fx.GraphModule, *entries: str) -> list[tuple[str, ...]]:
    """Names of the launches of each bucket."""
    targets = by_module(gm.graph, [(entry, [entry]) for entry in entries], None)
    found = grouping_of(order_of(gm.graph), targets.planned, Bucket(), targets.entries)
    return [tuple(target.launch.name.removeprefix("reduce_scatter_tensor_default") for target in group) for group, _ in found]


def test_two_buckets_that_need_each_other_are_parted_as_little_as_that_needs() -> None:
    """a1 before b1, b2 before a2: together they would wait for each other for ever."""
    made = HandMade()
    x, y = made.placeholder("x", 64, COLUMNS), made.placeholder("y", 64, COLUMNS)
    made.reduce(made.call(aten.neg.default, made.reduce(x, "a")), "b")
    made.reduce(made.call(aten.neg.default, made.reduce(y, "b")), "a")
    assert sorted(map(len, groups(made.returns(), "a", "b"))) == [1, 1, 2]


def test_a_bucket_beside_a_circle_stays_whole() -> None:
    made = HandMade()
    x, y = made.placeholder("x", 64, COLUMNS), made.placeholder("y", 64, COLUMNS)
    made.reduce(made.call(aten.neg.default, made.reduce(x, "a")), "b")
    made.reduce(made.call(aten.neg.default, made.reduce(y, "b")), "a")
    for _ in range(3):
        made.reduce(made.placeholder(f"z{len(made.results)}", *SHAPE), "c")
    assert sorted(map(len, groups(made.returns(), "a", "b", "c"))) == [1, 1, 2, 3]


def test_a_chain_of_reductions_ends_in_as_many_launches_as_it_is_long_and_no_more() -> None:
    made = HandMade()
    first = [made.reduce(made.placeholder(f"x{i}", 64, COLUMNS)) for i in range(3)]
    second = [made.reduce(made.call(aten.neg.default, value)) for value in first[:2]]
    made.reduce(made.call(aten.neg.default, second[0]))
    assert sorted(map(len, groups(made.returns(), "a"))) == [1, 2, 3]


def test_what_has_a_circle_is_told_from_what_has_an_order() -> None:
    """Against the definition, on random graphs."""
    seeded = random.Random(0)
    for _ in range(200):
        count = seeded.randrange(1, 9)
        edges = {i: {j for j in range(count) if j != i and seeded.random() < 0.25} for i in range(count)}
        assert is_acyclic(edges) == all(i not in _reached(edges, i) for i in edges)


def test_launches_and_waits_of_a_bucket_are_drawn_together_and_nothing_else() -> None:
    made = HandMade()
    for i in range(2):
        made.reduce(made.placeholder(f"x{i}", *SHAPE))
    gm = made.returns()
    order = order_of(gm.graph)
    targets = by_module(gm.graph, [("a", ["a"])], None)
    item_of = drawn(order, [targets.planned])
    names = {order.nodes[index].name: order.nodes[head].name for index, head in item_of.items()}
    launches, waits = (
        ("reduce_scatter_tensor_default", "reduce_scatter_tensor_default_1"),
        ("wait_tensor_default", "wait_tensor_default_1"),
    )
    assert names == {**dict.fromkeys(launches, launches[0]), **dict.fromkeys(waits, waits[0])}
    assert is_acyclic(drawn_together(order.before, item_of))


def _reached(edges: dict[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    queue = [start]
    for item in queue:
        fresh = edges[item] - found
        found |= fresh
        queue += sorted(fresh)
    return found
