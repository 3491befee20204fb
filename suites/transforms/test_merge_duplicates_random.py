"""Random graphs that launch values again and again: merging changes no bit, no input, and not which outputs share memory."""

from __future__ import annotations

from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.transforms.merge_duplicates import merge_duplicates
from suites.passes.on_ranks import compare, copied
from suites.transforms.drawn_duplicates import drawn_duplicates
from suites.transforms.duplicates import Changed, launches, step_of

IN_ONE_PROCESS, ON_RANKS = 40, 12


def test_random_graphs_give_the_same_bits_on_all_ranks_of_one_process() -> None:
    merged = left = 0
    for number in range(IN_ONE_PROCESS):
        drawing = drawn_duplicates(number, 2, functional=True)
        found = Changed(drawing.finish(), again=True, seed=number)
        merged += len(found.told.done)
        left += len(found.told.left)
        again = merge_duplicates(step_of(found.after), {}, again=True).told[-1]
        assert again.done == (), (number, again.done)
    assert merged > IN_ONE_PROCESS // 2
    assert left > IN_ONE_PROCESS // 10


def test_random_graphs_of_any_launch_give_the_same_bits_on_three_ranks(pools: Pools) -> None:
    fewer = 0
    for number in range(1000, 1000 + ON_RANKS):
        drawing = drawn_duplicates(number, 3, functional=False)
        before = drawing.finish()
        after = copied(before)
        merge_duplicates(step_of(after), {}, again=True)
        after.graph.lint()
        assert compare(pools, before, after, 3, number, drawing.program.groups) == [], number
        fewer += len(launches(after)) < len(launches(before))
    assert fewer > ON_RANKS // 4
