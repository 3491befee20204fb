"""Do ranks launch what belongs together? Launches of one size that trade places on one rank hang nothing, and mix values."""

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

    ``readings`` has what is read of each rank's graph. What carries no parameter is told apart by its module, where it has one.
    """
    first: dict[tuple[int, ...], tuple[int, list[str]]] = {}
    for rank, (reading, members) in sorted(readings.items()):
        launched: dict[tuple[int, ...], list[str]] = {}
        for bucket in reading.buckets:
            launched.setdefault(members[bucket.group], []).append(_carried(bucket))
        for group, mine in launched.items():
            other, theirs = first.setdefault(group, (rank, mine))
            pairs = enumerate(zip(theirs, mine, strict=False), 1)
            if (odd := next(((at, was, now) for at, (was, now) in pairs if was != now and was and now), None)) is not None:
                at, was, now = odd
                ranks = ", ".join(map(str, group))
                yield f"launch {at} on ranks {ranks} carries {was} on rank {other}, and {now} on rank {rank}"


def _carried(bucket: Bucket) -> str:
    named = [fqn for fqn in bucket.fqns if fqn]
    return some(named) if named else f"values of {bucket.direction} {bucket.module}" if bucket.module else ""
