"""A tenth of the soak: 100 items in a row on one pool, 20 runs of a plan, each fault twice, 5 kills of runs that accept,
a tenth of the garbage, and a few comparisons of step time."""

from __future__ import annotations

from suites.soak.run import soak
from suites.soak.speeds import speeds


def test_a_tenth_of_the_soak_is_well():
    problems = soak(0.1, seed=1)
    # How late a failure is told depends on the machine: the whole soak looks at that.
    assert [problem for problem in problems if " s late, " not in problem] == []


def test_a_tenth_of_the_kills_lose_no_golden():
    assert soak(0.1, seed=1, names=["kills"]) == []


def test_a_tenth_of_the_garbage_is_refused_or_gives_what_the_unmutated_gives():
    assert soak(0.1, seed=1, names=["garbage"]) == []


def test_comparisons_come_to_a_verdict():
    """Of short runs, whose verdicts may be wrong: the whole soak looks at those."""
    problems = speeds(1, 1, seed=1, say=print, budget_s=0.5, units={5: 20, 10: 40})
    assert [problem for problem in problems if "no verdict" in problem] == []
