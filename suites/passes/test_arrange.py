"""Only what must move moves: wishes, dependence, and what goes up with a launch."""

from __future__ import annotations

import random

import pytest

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes.arrange import arranged


def test_without_wishes_nothing_moves() -> None:
    edges = {0: set(), 1: {0}, 2: set(), 3: {1, 2}}
    assert arranged(edges, [0.0, 1.0, 2.0, 3.0]) == [0, 1, 2, 3]


def test_an_item_stands_right_behind_the_last_one_that_it_depends_on() -> None:
    edges = {0: set(), 1: {3}, 2: set(), 3: set(), 4: set()}
    assert arranged(edges, [0.0, 1.0, 2.0, 3.0, 4.0]) == [0, 2, 3, 1, 4]


def test_an_item_that_wishes_to_stand_early_goes_no_further_than_what_it_needs() -> None:
    edges = {0: set(), 1: set(), 2: set(), 3: {1}}
    assert arranged(edges, [0.0, 1.0, 2.0, 0.0]) == [0, 1, 3, 2]


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
