"""What a green job takes away or leaves behind is no other job's business."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.pool import RankFailure

JOBS = "suites.ranks.odd_jobs:"
WORLD = 2
TAKEN = ("group", "another group", "output", "input", "standard", "reopened", "stdout", "detached", "limit")


@pytest.fixture
def pool(pools):
    return pools.get(WORLD)


@pytest.mark.parametrize("what", TAKEN)
def test_a_job_that_takes_away_what_others_need_is_green_and_the_next_has_fresh_ranks(pool, watched, what):
    pool.start()
    gone = watched(pool.pids)
    assert pool.run(JOBS + "take_away", [what] * WORLD, timeout_s=30) == ["well"] * WORLD
    printed = {}
    assert pool.run("suites.ranks.fault_jobs:healthy", [None] * WORLD, timeout_s=30) == [[2.0] * 3] * WORLD
    pool.run("suites.ranks.jobs:shout", [None] * WORLD, timeout_s=30, on_output=printed.__setitem__)
    assert sorted(printed[1].split("\n")) == ["", "err of 1", "out of 1", "raw"]
    assert gone() == []


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_what_a_job_leaves_changed_is_put_back_in_the_same_process(pools, backend):
    pool = pools.get(WORLD, backend)
    before = pool.run(JOBS + "found", [None] * WORLD, timeout_s=30)
    pids = pool.pids
    assert before[0]["stdout"]
    assert before[0]["timers"] == [0.0, 0.0]
    if backend == "gloo":
        assert pool.run(JOBS + "leave", [None] * WORLD, timeout_s=30) == ["well"] * WORLD
    else:  # handlers are for the main thread alone
        assert pool.run(JOBS + "leave_from_a_thread", [None] * WORLD, timeout_s=30) == ["well"] * WORLD
    printed = {}
    after = pool.run(JOBS + "found", [None] * WORLD, timeout_s=30, on_output=printed.__setitem__)
    assert after == before
    assert printed == ({0: "after\n" * WORLD} if backend == "fake" else dict.fromkeys(range(WORLD), "after\n"))
    assert pool.pids == pids


def test_an_alarm_that_a_job_left_does_not_end_the_next(pool):
    assert pool.run(JOBS + "alarm", [None] * WORLD, timeout_s=30) == ["well"] * WORLD
    assert pool.run(JOBS + "wait_for_alarm", [None] * WORLD, timeout_s=30) == [True] * WORLD


def test_stacks_of_a_rank_that_hangs_are_there_after_a_job_that_took_their_signal(pool):
    assert pool.run(JOBS + "leave", [None] * WORLD, timeout_s=30) == ["well"] * WORLD
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "stand_still", [None] * WORLD, timeout_s=0.5)
    assert all("in stand_still" in stack for stack in caught.value.stacks.values())
    assert len(caught.value.stacks) == WORLD
