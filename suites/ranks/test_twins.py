"""A job that forks, or writes to its rank's connection, cannot answer for the rank, nor for the next job."""

from __future__ import annotations

import struct

import pytest

from pytest_fxbucket.ranks.pool import RankFailure

JOBS = "suites.ranks.odd_jobs:"
ECHO = "suites.ranks.jobs:echo"
WORLD = 2


@pytest.fixture(params=["gloo", "local"])
def pool(pools, request):
    return pools.get(WORLD, request.param)


def answers_for_itself(pool):
    """Whether each of several jobs has its own answer."""
    asked = [[f"{turn} of {rank}" for rank in range(WORLD)] for turn in range(3)]
    return [pool.run(ECHO, payloads, timeout_s=30) for payloads in asked] == asked


@pytest.mark.parametrize(
    ("how", "status"), [("return", 0), ("return, forked in C", 0), ("raise", 1), ("exit", 7)], ids=lambda value: str(value)
)
def test_a_process_that_comes_out_of_a_body_beside_the_rank_ends_and_is_nobodys_answer(pool, how, status):
    printed = {}
    assert pool.run(JOBS + "fork_and", [how] * WORLD, timeout_s=30, on_output=printed.__setitem__) == [status] * WORLD
    assert answers_for_itself(pool)
    if how == "raise":
        assert "ValueError: on the twin alone" in printed[0]
        assert "which the job forked, came out of it beside rank 0" in printed[0]


def test_a_process_that_a_body_leaves_behind_ends_with_its_rank(pools, watched):
    pool = pools.get(WORLD)
    gone = watched(pool.run(JOBS + "fork_and", ["stay"] * WORLD, timeout_s=30))
    assert answers_for_itself(pool)
    pool.close()
    assert gone() == []


def test_a_child_of_a_child_lives_on_when_its_parent_ends(pools):
    assert pools.get(WORLD).run(JOBS + "child_of_a_child", [None] * WORLD, timeout_s=30) == [b"well"] * WORLD


def test_an_answer_from_another_process_or_to_another_job_is_dropped(pools):
    pool = pools.get(WORLD)
    pool.start()
    assert pool.run(JOBS + "forge", [(1, 1)] * WORLD, timeout_s=30) == ["honest"] * WORLD
    assert pool.run(JOBS + "forge", [(0, pid) for pid in pool.pids], timeout_s=30) == ["honest"] * WORLD
    assert answers_for_itself(pool)


GARBAGE = {
    "text": b"hello, this is a line of a log that went astray\n" * 9,
    "a frame without end": b"fxb1" + struct.pack("<IQ", 1, 1 << 62),
    "a frame of too many parts": b"fxb1" + struct.pack("<I", 0xFFFFFFFF),
    "a frame of what is no answer": b"fxb1" + struct.pack("<IQ", 1, 3) + b"\x80\x05.",
    "a frame of nothing": b"fxb1" + struct.pack("<I", 0),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_a_ranks_connection_is_one_failure_that_says_so(pools, name):
    pool = pools.get(WORLD)
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "garble", [(1, GARBAGE[name])] * WORLD, timeout_s=30)
    assert (caught.value.kind, caught.value.rank) == ("garbled", 1)
    assert "rank 1 of 2 sent what is no answer: something else wrote to its connection with pytest" in str(caught.value)
    assert any(line.startswith("try: ") and "descriptors" in line for line in caught.value.lines())
    assert answers_for_itself(pool)
