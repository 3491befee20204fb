"""Gloo as it is, for timing: it goes around the launch of torch's that corrupts memory."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.pool import RankFailure
from pytest_fxbucket.ranks.pools import Pools


@pytest.fixture(scope="module")
def pools():
    found = Pools()
    yield found
    found.close()


def test_all_gathers_go_to_gloo_one_by_one_and_bring_what_they_should(pools):
    results = pools.get(2, "gloo:plain").run("suites.ranks.plain_jobs:gathers_in_flight", [5, 5], timeout_s=60)
    for arrived, called in results:
        assert arrived == [[float(number)] * 3 + [10.0 + number] * 3 for number in range(5)]
        assert "c10d::_allgather_base_" in called


def test_one_of_several_tensors_is_refused(pools):
    with pytest.raises(RankFailure, match="an all-gather of several tensors at once cannot be timed over gloo; use nccl"):
        pools.get(2, "gloo:plain").run("suites.ranks.plain_jobs:gather_of_several", [None] * 2, timeout_s=60)
