"""Ranks without communication, one after the other in one process, are as many as one likes."""

from __future__ import annotations

import pytest

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.pool import RankFailure

ALONE = "suites.ranks.local_jobs:alone"


@pytest.fixture(scope="module")
def fake(pools):
    return pools.get(6, "fake")


def fail(pool, payload, timeout_s=60):
    with pytest.raises(RankFailure) as caught:
        pool.run(ALONE, [payload] * pool.world, timeout_s=timeout_s)
    assert len(pool.run(ALONE, [None] * pool.world, timeout_s=60)) == pool.world
    return caught.value


def test_each_rank_is_itself_and_begins_fresh(fake):
    results = fake.run(ALONE, [None] * 6, timeout_s=60)
    assert [result[:4] for result in results] == [(rank, 6, rank, 6) for rank in range(6)]
    assert len({fresh for *_, fresh in results}) == 1


def test_a_thousand_ranks(pools):
    pool = pools.get(1024, "fake")
    try:
        results = pool.run(ALONE, [None] * 1024, timeout_s=120)
    finally:
        pool.close()
    assert [result[:4] for result in results] == [(rank, 1024, rank, 1024) for rank in range(1024)]


def test_the_first_rank_that_raises_ends_the_job(fake):
    failure = fail(fake, (3, "raise"))
    assert (failure.kind, failure.rank, failure.error) == ("raised", 3, "no good")
    assert str(failure).startswith('rank 3 of 6 raised ValueError: no good, at "mark of 3"')
    assert [state.outcome for state in failure.states] == ["returned"] * 3 + ["raised"] + ["was not begun"] * 2


def test_a_process_that_dies_names_the_rank_whose_turn_it_was(fake):
    failure = fail(fake, (3, "exit"))
    assert (failure.kind, failure.rank) == ("died", 3)
    assert str(failure).startswith('rank 3 of 6 exited with status 3, at "mark of 3"')
    assert [state.outcome for state in failure.states] == ["returned"] * 3 + ["died"] + ["running"] * 2


def test_a_rank_that_goes_on_for_ever_is_named_with_its_stack(fake):
    failure = fail(fake, (3, "loop"), timeout_s=2)
    assert (failure.kind, failure.rank) == ("timeout", 3)
    assert 'rank 3: is still running, at "mark of 3"' in str(failure)
    assert "in alone" in failure.stacks[3]


@pytest.mark.parametrize(("world", "backend", "most"), [(65, "local", 64), (0, "local", 64), ((1 << 16) + 1, "fake", 1 << 16)])
def test_too_many_ranks_are_refused(pools, world, backend, most):
    with pytest.raises(RankError, match=f"a pool of {world} ranks over {backend}; expected 1 to {most}"):
        pools.get(world, backend)
