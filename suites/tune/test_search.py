"""The search: what is kept, in which order it is tried, limits of memory and of time, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.tune.moves import PlanMove
from pytest_fxbucket.tune.search import search
from suites.tune.small_plans import STARS, Told, plan_of

START = plan_of(STARS)


def ahead(plan: Plan, prefetch: int) -> Plan:
    return replace(plan, overlap=replace(plan.overlap, prefetch=prefetch))


def further(plan: Plan) -> Sequence[PlanMove]:
    """One step of prefetch at a time."""
    return [PlanMove(ahead(plan, plan.overlap.prefetch + 1), f"prefetch = {plan.overlap.prefetch + 1}")]


def any_of(*moves: PlanMove) -> Told:
    return Told(lambda plan: 1.0 / (1 + plan.overlap.prefetch), lambda plan: moves)


def by_prefetch(seconds: Sequence[float], peaks: Sequence[int] = (0,) * 9) -> Told:
    return Told(lambda plan: seconds[plan.overlap.prefetch], further, lambda plan: peaks[plan.overlap.prefetch])


def test_it_climbs_as_long_as_it_gets_better_and_says_what_each_change_gained() -> None:
    found = search(START, by_prefetch([9, 5.0, 3.0, 2.0, 2.5]), inf)
    assert (found.plan, found.ended, found.tried) == (ahead(START, 3), "", 3)
    assert [(one.says, one.gain) for one in found.changes] == [("prefetch = 2", 2.0), ("prefetch = 3", 1.0)]
    assert (found.first.seconds, found.score.seconds) == (5.0, 2.0)


def test_a_gain_that_no_simulator_tells_is_none() -> None:
    found = search(START, by_prefetch([9, 5.0, 4.996]), inf)
    assert (found.plan, found.changes) == (START, [])


def test_plans_above_the_limit_are_not_taken() -> None:
    found = search(START, by_prefetch([9, 5.0, 3.0], [0, 10, 21]), 20)
    assert (found.plan, found.changes) == (START, [])


def test_from_above_the_limit_it_goes_down_first() -> None:
    found = search(START, by_prefetch([9, 5.0, 6.0, 5.0, 5.5], [0, 40, 30, 35, 0]), 20)
    assert (found.plan, found.score.peak_bytes) == (ahead(START, 2), 30)


def test_what_may_take_away_most_of_what_is_exposed_is_tried_first() -> None:
    moves = [PlanMove(ahead(START, n), str(n), frozenset({why})) for n, why in ((2, "memory"), (3, "late"), (4, "early"))]
    told = any_of(*moves)
    told.reasons = {"late": 1.0, "early": 2.0}
    search(START, told, inf)
    assert [plan.overlap.prefetch for plan in told.scored] == [1, 4, 3, 2]


def test_what_takes_little_effort_is_tried_before_what_promises_little_more() -> None:
    moves = [PlanMove(ahead(START, n), str(n), frozenset({why})) for n, why in ((2, "late"), (3, "early"), (4, ""), (5, ""))]
    told = any_of(*moves)
    told.reasons = {"late": 3.0, "early": 2.0}
    told.efforts = lambda plan: 2.0 if plan.overlap.prefetch in (2, 4) else 1.0
    search(START, told, inf)
    assert [plan.overlap.prefetch for plan in told.scored] == [1, 3, 2, 5, 4]


def test_each_kind_has_its_turn() -> None:
    moves = [PlanMove(ahead(START, n), f"[t] {key}", frozenset({why})) for n, key, why in _TURNS]
    told = any_of(*moves)
    told.reasons = {"late": 3.0, "early": 2.0}
    search(START, told, inf)
    assert [plan.overlap.prefetch for plan in told.scored] == [1, 2, 4, 3, 5]


_TURNS = ((2, "a = 1", "late"), (3, "a = 2", "late"), (4, "b = 1", "early"), (5, "b = 2", "early"))


def test_a_change_that_gains_nothing_any_more_is_taken_back() -> None:
    later = replace(ahead(START, 2), overlap=replace(START.overlap, prefetch=2, defer_reduce=False))
    back = replace(later, overlap=replace(later.overlap, prefetch=1))
    seconds = {repr(START): 5.0, repr(ahead(START, 2)): 4.0, repr(later): 3.0, repr(back): 3.0}
    offered = {
        repr(START): [PlanMove(ahead(START, 2), "ahead")],
        repr(ahead(START, 2)): [PlanMove(later, "later")],
        repr(later): [PlanMove(back, "back", takes_back=True)],
        repr(back): [PlanMove(later, "again", takes_back=True)],
    }
    found = search(START, Told(lambda plan: seconds[repr(plan)], lambda plan: offered[repr(plan)]), inf)
    assert (found.plan, [one.says for one in found.changes]) == (back, ["ahead", "later", "back"])


def test_it_ends_where_there_is_no_time_for_another_plan() -> None:
    clock = iter([30.0, 20.0, 9.0, 0.0])
    told = by_prefetch([9, 5.0, 4.0, 3.0, 2.0])
    told.costs = lambda plan: 10.0
    found = search(START, told, inf, lambda: next(clock))
    assert (found.ended, found.plan, found.tried) == ("time", ahead(START, 3), 2)


def test_what_there_is_time_for_is_tried_all_the_same() -> None:
    told = any_of(PlanMove(ahead(START, 3), "long"), PlanMove(ahead(START, 2), "short"))
    told.costs = lambda plan: 100.0 if plan.overlap.prefetch == 3 else 1.0
    found = search(START, told, inf, lambda: 10.0)
    assert (found.ended, found.plan) == ("time", ahead(START, 2))


def test_a_plan_that_is_refused_is_passed_over() -> None:
    def seconds(plan: Plan) -> float:
        if plan.overlap.prefetch == 2:
            raise PassError("no")
        return 5.0 - plan.overlap.prefetch

    told = Told(seconds, lambda plan: [PlanMove(ahead(START, n), "") for n in (2, 3)])
    found = search(START, told, inf)
    assert (found.plan, found.tried, found.refused) == (ahead(START, 3), 1, 1)


def test_the_plan_as_it_is_must_be_simulated() -> None:
    def seconds(plan: Plan) -> float:
        raise PassError("no")

    with pytest.raises(PassError, match="no"):
        search(START, Told(seconds, further), inf)


def test_ctrl_c_gives_the_best_so_far() -> None:
    def seconds(plan: Plan) -> float:
        if plan.overlap.prefetch == 4:
            raise KeyboardInterrupt
        return 5.0 - plan.overlap.prefetch

    found = search(START, Told(seconds, further), inf)
    assert (found.ended, found.plan, len(found.changes)) == ("stopped", ahead(START, 3), 2)


def test_ctrl_c_before_anything_is_known_goes_through() -> None:
    def seconds(plan: Plan) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(START, Told(seconds, further), inf)


def test_each_plan_is_told_before_it_is_simulated() -> None:
    said: list[str] = []
    search(START, by_prefetch([9, 5.0, 3.0, 4.0]), inf, say=said.append)
    assert said == [
        "simulating the plan as it is",
        "plan 2: prefetch = 2; the best so far takes 5,000.000 ms, the plan as it is 5,000.000 ms",
        "plan 3: prefetch = 3; the best so far takes 3,000.000 ms, the plan as it is 5,000.000 ms",
    ]
