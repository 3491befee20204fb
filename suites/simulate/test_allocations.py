"""Peaks of memory beside what ranks really allocate; the soak does it for all plans (suites/soak/allocations.py)."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.pools import Pools
from suites.simulate.allocations import peaks, small

SOME = {
    "adamw": "ready",  # a fused update, which gives lists of lists
    "buckets": "deps",  # launches behind views that keep an order
    "checkpoint": None,  # what is computed again
    "iterations": "sgd",  # set-up, steady, clean-up
    "moe": None,
    "averaged": "stages",  # pipeline stages
    "traced": None,
}
"""A plan of each way to hold memory, and its row."""


@pytest.mark.parametrize("name", SOME)
def test_the_peak_of_each_graph_is_that_of_ranks(name: str, pools: Pools) -> None:
    found = list(peaks(pools, small(name, SOME[name])))
    assert len(found) > 1
    assert [one for one in found if one.parts] == []
