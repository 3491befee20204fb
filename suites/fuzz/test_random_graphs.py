"""Some of the random graphs of ``make soak``: our pass changes none of them, breaks none and refuses none."""

from __future__ import annotations

import traceback

import pytest
from hypothesis.strategies import SearchStrategy

from pytest_fxbucket.fuzz.strategies import automatic, by_hand
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.ranks.pools import Pools
from suites.fuzz.hunt import hunt

SEED = 1


@pytest.mark.parametrize(
    ("plans", "world", "count", "real"),
    [(by_hand, 4, 8, True), (automatic, 3, 25, False)],
    ids=["by_hand", "automatic"],
)
def test_random_graphs_come_out_equal_and_whole(
    pools: Pools, plans: SearchStrategy[PlanChoice], world: int, count: int, real: bool
) -> None:
    """With groups within the world at 4 ranks; a part on ``real`` processes of their own."""
    found = hunt(pools if real else None, world, count, SEED, plans)
    if found.trouble is not None:
        pytest.fail("".join(traceback.format_exception(found.trouble)), pytrace=False)
    assert found.equal >= count
    assert found.merged >= count // 8
