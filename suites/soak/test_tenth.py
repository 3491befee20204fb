"""A tenth of the soak: 100 items in a row on one pool, 20 runs of a plan, each fault twice, 5 kills of runs that accept."""

from __future__ import annotations

from suites.soak.run import soak


def test_a_tenth_of_the_soak_is_well():
    problems = soak(0.1, seed=1)
    # How late a failure is told depends on the machine: the whole soak looks at that.
    assert [problem for problem in problems if " s late, " not in problem] == []


def test_a_tenth_of_the_kills_lose_no_golden():
    assert soak(0.1, seed=1, names=["kills"]) == []
