"""How many gathered bytes are alive at each place of a schedule: from a member's launch to its last reader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Reading

Lives = list[tuple[int, int, int]]
"""(first position, last position, bytes) of each gathered tensor; both ends included."""


def gathered_lives(reading: Reading) -> Lives:
    """Of each gathered member. A member that nobody reads lives until its wait."""
    lives: Lives = []
    for bucket in reading.buckets:
        if bucket.kind == "all_gather":
            for member in bucket.members:
                end = member.last_use if member.last_use is not None else bucket.wait
                lives.append((bucket.launch, bucket.launch if end is None else end, member.bytes * bucket.parts))
    return lives


def live_bytes(lives: Lives, places: Iterable[int]) -> list[int]:
    """Bytes alive at each of ``places``, which ascend."""
    events = sorted([(first, size) for first, _, size in lives] + [(last + 1, -size) for _, last, size in lives])
    found: list[int] = []
    alive = at = 0
    for place in places:
        while at < len(events) and events[at][0] <= place:
            alive += events[at][1]
            at += 1
        found.append(alive)
    return found


def peak_bytes(lives: Lives) -> int:
    """Most bytes alive at once."""
    return max(live_bytes(lives, sorted({first for first, _, _ in lives})), default=0)
