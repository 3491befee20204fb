"""A time limit may be of any length, and is for the ranks' work alone."""

from __future__ import annotations

import math

import pytest

WORLD = 2


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("timeout_s", [10**7, 1e300, math.inf, 10**400], ids=["1e7", "1e300", "inf", "10**400"])
def test_a_limit_of_any_length_is_a_limit(pools, backend, timeout_s):
    assert pools.get(WORLD, backend).run("suites.ranks.jobs:echo", [1] * WORLD, timeout_s=timeout_s) == [1] * WORLD


class SlowToRead:
    """Takes longer to be unpickled than its job may take."""

    def __reduce__(self):
        return _slowly, ()


def _slowly():
    import time

    time.sleep(1.5)
    return "read"


def slow_to_read(rank, world, payload):
    return SlowToRead()


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_the_time_that_a_result_takes_to_be_read_here_is_not_the_ranks(pools, backend):
    pool = pools.get(WORLD, backend)
    pool.start()
    assert pool.run(f"{__name__}:slow_to_read", [None] * WORLD, timeout_s=1) == ["read"] * WORLD
