"""Do ranks launch what belongs together? If two launches of one size trade places on one rank, nothing hangs: values mix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis

Members = Mapping[str, tuple[int, ...]]
"""Ranks of each process group, by its name on one rank."""


def mixed_launches(readings: Mapping[int, tuple[GraphAnalysis, Members]]) -> Iterator[str]:
    """A sentence for each process group and rank whose launch carries other members than that of the group's first rank.

    ``readings`` has the reading of each rank's graph. A launch without a parameter is known by its direction and module.
    """
    # Launches among the same ranks are paired by their number, as a communicator pairs them. Whether all ranks launch equally
    # many is found elsewhere (:mod:`pytest_fxbucket.graph.calls`).
    first: dict[tuple[int, ...], tuple[int, list[Bucket]]] = {}
    for rank, (reading, members) in sorted(readings.items()):
        launched: dict[tuple[int, ...], list[Bucket]] = {}
        for bucket in reading.buckets:
            if bucket.group not in members:
                continue  # of an unknown group, which is a problem by itself
            launched.setdefault(members[bucket.group], []).append(bucket)
        for group, mine in launched.items():
            other, theirs = first.setdefault(group, (rank, mine))
            pairs = enumerate(zip(theirs, mine, strict=False), 1)
            if (odd := next(((at, was, now) for at, (was, now) in pairs if _differ(was, now)), None)) is not None:
                at, was, now = odd
                ranks, (before, after) = ", ".join(map(str, group)), _shown(was, now)
                yield f"launch {at} on ranks {ranks} carries {before} on rank {other}, and {after} on rank {rank}"


def _carried(bucket: Bucket) -> list[str]:
    """What a launch is known by: its members, else the module where it ran; empty if nothing is known."""
    if any(bucket.fqns):
        return list(bucket.fqns)
    return [f"values of {bucket.direction} {bucket.module}"] if bucket.module else []


def _differ(one: Bucket, other: Bucket) -> bool:
    was, now = _carried(one), _carried(other)
    return was != now and bool(was and now)


def _shown(one: Bucket, other: Bucket) -> tuple[str, str]:
    """Both in words; from the first member that differs on, if the words would be the same."""
    was, now = ([fqn or "a value" for fqn in _carried(bucket)] for bucket in (one, other))
    if some(was) != some(now):
        return some(was), some(now)
    at = next(place for place, pair in enumerate(zip(was, now, strict=True)) if pair[0] != pair[1])
    return f"{some(was[at:])} behind {some(was[:at])}", f"{some(now[at:])} there"
