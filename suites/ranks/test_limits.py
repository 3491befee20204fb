"""How many ranks fit, that pools which wait make room for new ones, and how long a job may take."""

from __future__ import annotations

import math

import pytest

from pytest_fxbucket.ranks import pools as pools_module
from pytest_fxbucket.ranks.launch import available_memory, most_processes, threads_per_rank

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


def test_the_pool_that_waited_longest_makes_room_and_comes_back(monkeypatch, pools, watched):
    monkeypatch.setattr(pools_module, "most_processes", lambda environ: 5)
    first, second, third = pools.get(1), pools.get(2), pools.get(3)
    third.close()  # other tests may have used it
    for one in (first, second):
        one.run(ECHO, [None] * one.world, timeout_s=60)
    first.run(ECHO, [None], timeout_s=60)
    gone = watched(second.pids)
    third.run(ECHO, [None] * 3, timeout_s=60)
    assert first.pids  # started first, but used after second
    assert second.pids == ()
    assert gone() == []
    assert second.run(ECHO, [2] * 2, timeout_s=60) == [2] * 2


@pytest.mark.parametrize("backend", ["gloo", "local"])
@pytest.mark.parametrize("timeout_s", [10**7, 1e300, math.inf, 10**400], ids=["1e7", "1e300", "inf", "10**400"])
def test_a_limit_of_any_length_is_a_limit(pools, backend, timeout_s):
    assert pools.get(2, backend).run("suites.ranks.jobs:echo", [1] * 2, timeout_s=timeout_s) == [1] * 2


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_the_time_that_a_result_takes_to_be_read_here_is_not_the_ranks(pools, backend):
    pool = pools.get(2, backend)
    job = "suites.ranks.odd_jobs:slow_to_read"
    pool.run(job, [0.0] * 2, timeout_s=60)  # which imports it
    # The first result keeps this process from the second one for longer than ranks may take.
    assert pool.run(job, [1.5, 0.0], timeout_s=1) == ["read"] * 2
