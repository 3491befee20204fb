"""How many gathered bytes are alive, and how many a plan allows: the entry in use and ``prefetch`` more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_fxbucket.checks.promises.gathered import memory_problems
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member, gathered_lives, live_bytes, peak_bytes
from suites.checks.launches_by_hand import F32, gather, promise

FQNS = ("a.u", "b.u", "c.u", "d.u")
SIZE = 256


def lives(fqn: str, launch: int, use: int, last: int | None = None, **change: Any) -> Bucket:
    member = Member(fqn, 0, 32, 23, F32, use if last is None else last)
    plain = {"launch": launch, "wait": use - 1, "first_use": use, "members": (member,)}
    return gather(fqn, 0, SIZE, **{**plain, **change})


def graph(launches: Mapping[str, int] | None = None, last: Mapping[str, int] | None = None) -> GraphAnalysis:
    """Each parameter is used at 10, 20, 30, 40 and launched right before, unless told otherwise."""
    uses = {fqn: 10 * (i + 1) for i, fqn in enumerate(FQNS)}
    buckets = [lives(fqn, (launches or {}).get(fqn, use - 2), use, (last or {}).get(fqn)) for fqn, use in uses.items()]
    computes: Sequence[Any] = [(use, "forward", fqn) for fqn, use in uses.items()]
    return GraphAnalysis(tuple(buckets), tuple(computes), (), 50)


def asked(prefetch: int, **change: Any) -> Any:
    return promise({fqn: fqn[0] for fqn in FQNS}, prefetch=prefetch, **change)


def test_a_member_is_alive_from_its_launch_to_its_last_reader_both_included() -> None:
    reading = graph(last={"a.u": 20})
    assert gathered_lives(reading)[0] == (8, 20, SIZE)
    assert live_bytes(gathered_lives(reading), [7, 8, 10, 18, 20, 21]) == [0, SIZE, SIZE, 2 * SIZE, 2 * SIZE, 0]
    assert peak_bytes(gathered_lives(reading)) == 2 * SIZE


def test_what_nobody_reads_is_alive_until_its_wait_and_reductions_are_never_counted() -> None:
    unread = lives("a.u", 1, 10, members=(Member("a.u", 0, 32, 23, F32, None),))
    assert gathered_lives(GraphAnalysis((unread,), (), (), 50)) == [(1, 9, SIZE)]
    assert peak_bytes(gathered_lives(GraphAnalysis((lives("a.u", 1, 10, kind="reduce_scatter"),), (), (), 50))) == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathering_as_far_ahead_as_asked_is_green_and_one_further_is_red(prefetch: int) -> None:
    launches = {fqn: 10 * max(1, i + 1 - prefetch) - 2 for i, fqn in enumerate(FQNS)}
    assert list(memory_problems(asked(prefetch), graph(), graph(launches))) == []
    everything = dict.fromkeys(FQNS, 1)
    found = list(memory_problems(asked(prefetch), graph(), graph(everything)))
    if prefetch < 2:
        allowed = (prefetch + 1) * SIZE
        assert found == [
            f"forward compute of a has {4 * SIZE} gathered bytes alive, {SIZE} before the pass: "
            f"prefetch = {prefetch} allows {allowed} more"
        ]
    else:
        assert found == [], "four are alive, and four may be"


def test_what_was_alive_before_the_pass_may_stay_so() -> None:
    early = graph(dict.fromkeys(FQNS, 1))
    assert list(memory_problems(asked(0), early, early)) == []


def test_a_gather_that_is_kept_longer_is_told() -> None:
    kept = graph(last=dict.fromkeys(FQNS, 40))
    assert any("forward compute of d has" in problem for problem in memory_problems(asked(1), graph(), kept))


def test_what_the_user_launches_by_hand_is_allowed() -> None:
    by_hand = graph({"d.u": 8})
    assert list(memory_problems(asked(0), graph(), by_hand)) == []
    deep = graph({"c.u": 8, "d.u": 8})
    assert list(memory_problems(asked(0), graph(), deep)) != []
    places = {"forward": {"c": "a", "d": "a"}}
    assert list(memory_problems(asked(0, launch_at=places), graph(), deep)) == []


def two_rounds(early: Mapping[str, int]) -> GraphAnalysis:
    """The graph twice over, the second round from 110 on; ``early`` has launches of the second."""
    uses = {fqn: 10 * (i + 1) for i, fqn in enumerate(FQNS)}
    buckets = [lives(fqn, use - 2, use) for fqn, use in uses.items()]
    buckets += [lives(fqn, early.get(fqn, use + 98), use + 100, round=1) for fqn, use in uses.items()]
    computes: Sequence[Any] = [(use + later, "forward", fqn) for later in (0, 100) for fqn, use in uses.items()]
    return GraphAnalysis(tuple(buckets), tuple(computes), (), 150)


def test_a_round_that_has_not_begun_allows_nothing() -> None:
    assert list(memory_problems(asked(0), two_rounds({}), two_rounds({"a.u": 1}))) == []
    assert list(memory_problems(asked(0), two_rounds({}), two_rounds({"a.u": 1, "b.u": 2}))) == [
        f"forward compute of a has {3 * SIZE} gathered bytes alive, {SIZE} before the pass: prefetch = 0 allows {SIZE} more"
    ]


def root(last: int) -> GraphAnalysis:
    """Entry ``a`` holds ``a.u``, used first, and ``d.u``, used last: one launch brings both."""
    members = (Member("a.u", 0, 32, 23, F32, 10), Member("d.u", 128, 32, 23, F32, last))
    merged = gather("a.u", 0, 2 * SIZE, launch=8, wait=9, first_use=10, members=members)
    plain = graph()
    return GraphAnalysis((merged, *plain.buckets[1:3]), plain.computes, (), 50)


def test_an_entry_that_is_used_again_keeps_what_it_brought_until_then_and_no_longer() -> None:
    asks = promise({"a.u": "a", "d.u": "a", "b.u": "b", "c.u": "c"}, registration=FQNS, prefetch=0)
    assert list(memory_problems(asks, graph(), root(40))) == []
    late = graph(last={"a.u": 10, "d.u": 40})
    kept = GraphAnalysis((root(40).buckets[0], *graph(last={"b.u": 40, "c.u": 40}).buckets[1:3]), late.computes, (), 50)
    assert any("forward compute of" in problem for problem in memory_problems(asks, late, kept))


def short_rounds(launches: Sequence[int] = (18, 28, 38), direction: Any = "backward") -> GraphAnalysis:
    """``a`` is kept from forward, and computes again at 10; ``b`` is gathered anew for each of its uses at 20, 30 and 40."""
    kept = lives("a.u", 1, 5, 10)
    rounds = [
        lives("b.u", at, use, round=number, direction=direction)
        for number, (at, use) in enumerate(zip(launches, (20, 30, 40), strict=True))
    ]
    computes: Sequence[Any] = [
        (5, "forward", "a.u"),
        (10, direction, "a.u"),
        *((use, direction, "b.u") for use in (20, 30, 40)),
    ]
    return GraphAnalysis((kept, *rounds), tuple(computes), (), 50)


@pytest.mark.parametrize(("prefetch", "launches"), [(1, (8, 18, 28)), (2, (8, 8, 18)), (3, (8, 8, 8))])
def test_prefetch_reaches_beyond_a_short_round_as_far_as_it_counts_and_no_further(
    prefetch: int, launches: tuple[int, int, int]
) -> None:
    assert list(memory_problems(asked(prefetch), short_rounds(), short_rounds(launches))) == []
    early = (*sorted(launches)[:prefetch], *[8] * (3 - prefetch))
    found = list(memory_problems(asked(prefetch), short_rounds(), short_rounds(early)))
    told = [
        f"backward compute of a has {4 * SIZE} gathered bytes alive, {SIZE} before the pass: "
        f"prefetch = {prefetch} allows {prefetch * SIZE} more"
    ]
    assert found == (told if prefetch < 3 else [])


def test_a_round_that_is_used_later_is_not_gathered_over_what_is_used_before_it() -> None:
    """Of ``a b a c`` the second ``a`` stands between ``b`` and a large ``c``, though it is of another round."""

    def used(launch: int) -> GraphAnalysis:
        uses = (("a.u", 10), ("b.u", 20), ("a.u", 30), ("c.u", 40))
        large = gather("c.u", 0, 9 * SIZE, launch=launch, wait=39, members=(Member("c.u", 0, 288, 23, F32, 40),))
        small = [lives(fqn, use - 2, use, round=int(use == 30)) for fqn, use in uses[:3]]
        computes: Sequence[Any] = [(use, "forward", fqn) for fqn, use in uses]
        return GraphAnalysis((*small, large), tuple(computes), (), 50)

    assert list(memory_problems(asked(1), used(38), used(28))) == []
    assert list(memory_problems(asked(1), used(38), used(18))) == [
        f"forward compute of b has {10 * SIZE} gathered bytes alive, {SIZE} before the pass: "
        f"prefetch = 1 allows {2 * SIZE} more"
    ]
