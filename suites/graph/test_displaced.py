"""Nodes that moved are counted as the fewest that explain the new order."""

from __future__ import annotations

import itertools
import random

import pytest

from pytest_fxbucket.graph.order import displaced


@pytest.mark.parametrize(
    ("after", "moved"),
    [("abcdef", 0), ("bcdefa", 1), ("fabcde", 1), ("badcfe", 3), ("fedcba", 5), ("defabc", 3)],
)
def test_one_node_that_jumps_over_many_counts_once(after: str, moved: int) -> None:
    assert displaced("abcdef", after) == (moved, 6)


def test_nodes_that_are_new_or_gone_are_not_counted() -> None:
    assert displaced("abcdef", "xabyezd") == (1, 4)
    assert displaced("abc", "xyz") == (0, 0)
    assert displaced("", "") == (0, 0)


def test_the_count_is_the_least_that_taking_nodes_out_can_do() -> None:
    draw = random.Random(0)
    for _ in range(30):
        after = draw.sample("abcdefg", 7)
        longest = max(
            len(kept) for count in range(8) for kept in itertools.combinations(after, count) if list(kept) == sorted(kept)
        )
        assert displaced("abcdefg", after) == (7 - longest, 7)
