"""Peaks of memory beside what ranks really allocate; the soak does it for all plans (suites/soak/allocations.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.pools import Pools
from suites.simulate.allocations import peaks

PLANS = Path(__file__).parents[2] / "fixtures" / "plans"
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
    plan = next(one for one in load_plans(PLANS / f"{name}.toml") if one.matrix_id == SOME[name])
    found = list(peaks(pools, plan))
    assert len(found) > 1
    assert [one for one in found if one.parts] == []
