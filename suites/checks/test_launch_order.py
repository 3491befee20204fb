"""Gathers in the order in which they are needed, reductions as soon as their gradients are there; what is legal is green."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_fxbucket.checks.promises.order import launch_order_problems
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
from pytest_fxbucket.step.roles import Direction
from suites.checks.launches_by_hand import gather, promise

Compute = tuple[int, Direction, str]


def at(bucket: Bucket, launch: int, **change: Any) -> Bucket:
    return replace(bucket, launch=launch, **change)


def problems(before: Sequence[Bucket], after: Sequence[Bucket], computes: Sequence[Compute] = (), **keys: Any) -> list[str]:
    """What is said of launches ``before`` and ``after`` the pass, which left the ``computes`` where they were."""
    captured, passed = (
        GraphAnalysis(tuple(sorted(buckets, key=lambda one: one.launch)), tuple(computes), (), 100)
        for buckets in (before, after)
    )
    return list(launch_order_problems(promise(**keys), captured, passed))


A, B = gather("a.u", 1), gather("b.u", 2)
"""Of which the first is needed first."""
AHEAD = "entry a, forward all_gather is launched behind that of b, which is needed later"


def test_a_gather_behind_one_that_is_needed_later_is_named() -> None:
    assert problems([A, B], [A, at(B, 9)]) == [AHEAD]
    assert problems([A, B], [at(A, 5), at(B, 6)]) == []


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        pytest.param([at(A, 21), B], [A, at(B, 9)], {}, id="so it was before the pass"),
        pytest.param([A, B], [at(A, 10, blocked=9), at(B, 8)], {}, id="the first needs what stands between"),
        pytest.param([A, B], [A, at(B, 9, group="own")], {}, id="on groups of their own"),
        pytest.param([A, B], [A, at(B, 9)], {"launch_at": {"forward": {"b": "a"}}}, id="placed by hand"),
        pytest.param([A, B], [A, at(B, 9, wait=10)], {}, id="waited for first"),
        pytest.param([A, B], [A, at(B, 9, first_use=11)], {}, id="used first"),
        pytest.param([A, B], [A, at(B, 9), gather("b.v", 0)], {}, id="its entry is needed first"),
        pytest.param([A, B], [A, at(B, 9)], {"entry_of": {"a.u": "a"}}, id="in no entry"),
    ],
)
def test_what_may_stand_first_is_not_named(before: Sequence[Bucket], after: Sequence[Bucket], keys: dict[str, Any]) -> None:
    assert problems(before, after, **keys) == []


def reduction(fqn: str, place: int, **change: Any) -> Bucket:
    return gather(fqn, place, kind="reduce_scatter", op="avg", direction="backward", **change)


COMPUTES: list[Compute] = [(8, "backward", "a.u"), (12, "backward", "b.u"), (15, "optimizer", "b.u")]
R = reduction("a.u", 1, blocked=8)


def test_a_reduction_behind_compute_that_used_to_hide_it_is_named() -> None:
    said = "entry a, backward reduce_scatter is launched behind compute of b, which used to hide it"
    assert problems([R], [at(R, 13)], COMPUTES) == [said]
    assert problems([R], [at(R, 11)], COMPUTES) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([at(R, 13)], [at(R, 13)], id="so it was before the pass"),
        pytest.param([R], [at(R, 13, blocked=12)], id="it needs what is computed there"),
        pytest.param(
            [R, reduction("a.v", 1, launch=14)],
            [replace(at(R, 14), members=(*R.members, *reduction("a.v", 1).members))],
            id="with one of the last gradients",
        ),
        pytest.param([at(R, 13)], [at(R, 16)], id="only updates stand between"),
    ],
)
def test_a_reduction_that_could_not_start_sooner_is_not_named(before: Sequence[Bucket], after: Sequence[Bucket]) -> None:
    assert problems(before, after, COMPUTES) == []
