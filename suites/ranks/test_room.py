"""How many ranks fit, and that pools which wait make room for new ones."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks import pools as pools_module
from pytest_fxbucket.ranks.launch import available_memory, most_processes, threads_per_rank
from pytest_fxbucket.ranks.pools import Pools

ECHO = "suites.ranks.jobs:echo"
GIB = 1 << 30


@pytest.mark.parametrize(("workers", "expected"), [("1", 4), ("2", 2), ("8", 1), ("", 4), ("0", 4)])
def test_xdist_workers_share_the_cores(workers, expected):
    assert threads_per_rank(4, {"PYTEST_XDIST_WORKER_COUNT": workers}, cores=16) == expected


@pytest.mark.parametrize(
    ("cores", "gib", "workers", "expected"),
    [(2, 100, "1", 16), (16, 100, "1", 128), (16, 8, "1", 16), (16, 8, "4", 4), (16, 0, "1", 4), (2, 100, "2", 8)],
)
def test_processes_follow_cores_memory_and_workers(cores, gib, workers, expected):
    assert most_processes({"PYTEST_XDIST_WORKER_COUNT": workers}, cores, gib * GIB) == expected


def test_this_machine_has_some_memory():
    assert 64 << 20 < available_memory() < 1 << 62


def test_pools_of_several_sizes_live_side_by_side(pools):
    small, large = pools.get(2), pools.get(3)
    assert small.run(ECHO, [1] * 2, timeout_s=60) == [1] * 2
    before = small.pids
    assert large.run(ECHO, [1] * 3, timeout_s=60) == [1] * 3
    assert small.run(ECHO, [1] * 2, timeout_s=60) == [1] * 2
    assert small.pids == before


def test_the_pool_that_waited_longest_makes_room_and_comes_back(monkeypatch, watched):
    monkeypatch.setattr(pools_module, "most_processes", lambda environ: 5)
    pools = Pools()
    try:
        first, second, third = pools.get(1), pools.get(2), pools.get(3)
        for one in (first, second):
            one.run(ECHO, [None] * one.world, timeout_s=60)
        first.run(ECHO, [None], timeout_s=60)
        gone = watched(second.pids)
        third.run(ECHO, [None] * 3, timeout_s=60)
        assert first.pids  # started first, but used after second
        assert second.pids == ()
        assert gone() == []
        assert second.run(ECHO, [2] * 2, timeout_s=60) == [2] * 2
    finally:
        pools.close()
