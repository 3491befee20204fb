"""Only what must move moves: wishes and dependence; what stands in a circle, and what is drawn together."""

from __future__ import annotations

import random

import pytest

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.fuzz.program import Program
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.arrange import arranged, drawn, drawn_together, is_acyclic
from pytest_fxbucket.passes.targets import by_module


@pytest.mark.parametrize(
    ("edges", "wishes", "order"),
    [
        pytest.param({0: set(), 1: {0}, 2: set(), 3: {1, 2}}, [0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3], id="nothing moves unasked"),
        pytest.param(
            {0: set(), 1: {3}, 2: set(), 3: set(), 4: set()},
            [0.0, 1.0, 2.0, 3.0, 4.0],
            [0, 2, 3, 1, 4],
            id="right behind the last that it depends on",
        ),
        pytest.param(
            {0: set(), 1: set(), 2: set(), 3: {1}}, [0.0, 1.0, 2.0, 0.0], [0, 1, 3, 2], id="no further up than what it needs"
        ),
    ],
)
def test_an_item_stands_where_it_wishes_as_far_as_it_can(
    edges: dict[int, set[int]], wishes: list[float], order: list[int]
) -> None:
    assert arranged(edges, wishes) == order


def test_a_circle_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(PassError, match="in a circle"):
        arranged({0: {2}, 1: {0}, 2: {1}, 3: {0}}, [0.0, 1.0, 2.0, 3.0])


def test_the_order_keeps_every_dependence_and_does_not_hang_on_how_edges_were_made() -> None:
    seeded = random.Random(1)
    for _ in range(300):
        count = seeded.randrange(1, 15)
        names = list(range(count))
        seeded.shuffle(names)
        edges = {names[i]: {names[j] for j in range(i) if seeded.random() < 0.3} for i in range(count)}
        wishes = [float(seeded.randrange(count)) for _ in range(count)]
        order = arranged(edges, wishes)
        place = {item: i for i, item in enumerate(order)}
        assert all(place[source] < place[item] for item, sources in edges.items() for source in sources)
        assert order == arranged(dict(sorted(edges.items())), wishes)


def test_what_has_a_circle_is_told_from_what_has_an_order() -> None:
    """Against the definition, on random graphs."""
    seeded = random.Random(0)
    for _ in range(200):
        count = seeded.randrange(1, 9)
        edges = {i: {j for j in range(count) if j != i and seeded.random() < 0.25} for i in range(count)}
        assert is_acyclic(edges) == all(i not in _reached(edges, i) for i in edges)


def _reached(edges: dict[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    queue = [start]
    for item in queue:
        fresh = edges[item] - found
        found |= fresh
        queue += sorted(fresh)
    return found


def test_launches_and_waits_of_a_bucket_are_drawn_together_and_nothing_else() -> None:
    made = Program(4)
    waits = [made.reduce(x) for x in made.fulls("xy")]
    launches = [wait.all_input_nodes[0] for wait in waits]
    graph = made.returns(*waits).graph
    order = order_of(graph)
    item_of = drawn(order, [by_module(graph, [("a", ["a"])], None).planned])
    heads = {order.nodes[index]: order.nodes[head] for index, head in item_of.items()}
    assert heads == {**dict.fromkeys(launches, launches[0]), **dict.fromkeys(waits, waits[0])}
    assert is_acyclic(drawn_together(order.before, item_of))
