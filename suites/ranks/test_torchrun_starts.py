"""Under torchrun, which of several ranks that could not start, or failed, is the cause."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.torchrun.pool import MemberOutcome, not_started

REFUSED = "Connect timeout [127.0.0.1]:40000: connection refused"
SENTENCE = f"rank 0 of 2 raised RuntimeError: {REFUSED} (starting 2 ranks over gloo)"


def refused(rank: int) -> MemberOutcome:
    """A rank that no peer let in."""
    state = RankState(rank, "raised", 1.0, REFUSED, "RuntimeError")
    assert state.is_effect
    return MemberOutcome(state, None, True, SENTENCE)


def found(*done: MemberOutcome) -> tuple[int, str] | None:
    states = [one.state or RankState(rank, "gone") for rank, one in enumerate(done)]
    return not_started(dict(enumerate(done)), states)


def test_a_network_that_lets_nobody_in_is_said_as_a_start_that_failed() -> None:
    assert found(refused(0), refused(1)) == (0, SENTENCE)


@pytest.mark.parametrize("outcome", ["died", "raised", "gone"])
def test_a_peer_that_had_begun_the_job_and_failed_is_the_cause(outcome: str) -> None:
    assert found(refused(0), MemberOutcome(RankState(1, outcome, 0.5, "of its own"), None, True)) is None


@pytest.mark.parametrize("peer", [RankState(1, "returned"), RankState(1, "running"), refused(1).state])
def test_a_peer_that_did_not_fail_of_itself_is_none(peer: RankState) -> None:
    assert found(refused(0), MemberOutcome(peer, None, True)) == (0, SENTENCE)


def test_a_start_that_failed_of_itself_goes_before_one_that_lost_its_peer() -> None:
    own = MemberOutcome(None, None, True, "the rank server could not start")
    assert found(refused(0), own) == (1, own.problem)


def test_where_all_could_start_nothing_is_said() -> None:
    assert found(MemberOutcome(RankState(0, "returned"), 1, True), MemberOutcome(RankState(1, "returned"), 2, True)) is None
