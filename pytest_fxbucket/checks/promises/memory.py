"""Is no more gathered ahead than the plan says?

At each compute, the bytes that are gathered and still to be read may exceed those of the schedule before the pass by the entry
in use, which a bucket brings as a whole, and by the ``prefetch`` entries after it. An entry that is used again later keeps
until then what it brought for that. What ``launch_at`` names is the user's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promises.expectations import DIRECTIONS, Expectations, by_round, of_kind, stages_of
from pytest_fxbucket.graph.buckets import gathered_lives, live_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.step.roles import Direction


def memory_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence for each direction in which more is alive at some compute than the plan allows: the first such compute."""
    before, after = _live_at_computes(captured), _live_at_computes(passed)
    for direction in DIRECTIONS:
        allowed = _Allowance(promise, captured, passed, direction)
        for key, (where, now) in after.items():
            place, then = before.get(key, (where, now))
            if key[0] != direction or now - then <= allowed.at(where):
                continue
            most = allowed.at(where) + allowed.for_later(where, place)
            if now - then > most:
                name = promise.entry_of.get(key[1], key[1])
                yield (
                    f"{direction} compute of {name} has {now} gathered bytes alive, {then} before the pass: "
                    f"prefetch = {promise.overlap.prefetch} allows {most} more"
                )
                break


def _live_at_computes(reading: GraphAnalysis) -> dict[tuple[Direction, str, int], tuple[int, int]]:
    """(position, bytes alive) by (direction, FQN, nth) of every compute."""
    places = [where for where, _, _ in reading.computes]
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for (where, direction, fqn), alive in zip(reading.computes, live_bytes(gathered_lives(reading), places), strict=True):
        found[direction, fqn, seen[direction, fqn]] = (where, alive)
        seen[direction, fqn] += 1
    return found


class _Allowance:
    """Bytes that a direction's rounds (microbatches) may hold at a position, those of them that are under way there."""

    def __init__(self, promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis, direction: Direction) -> None:
        rounds = by_round(of_kind(passed, direction, "all_gather"))
        self.rounds = [_Round(promise, buckets, direction) for buckets in rounds.values()]
        self.gathered: dict[str, list[int]] = {}
        """Positions of each parameter's gathers before the pass."""
        for bucket in of_kind(captured, direction, "all_gather"):
            for fqn in bucket.fqns:
                self.gathered.setdefault(fqn, []).append(bucket.launch)

    def at(self, where: int) -> int:
        here = [one for one in self.rounds if one.begins[:1] <= [where] and where <= one.last]
        return sum(one.at(where) for one in here or self.rounds[:1])

    def for_later(self, where: int, place: int) -> int:
        """Bytes of entries begun earlier that were gathered only behind ``place`` before the pass; ``where`` it is now."""
        begun = [one for stage in self.rounds for one in stage.before(where)]
        return sum(
            member.bytes * bucket.parts
            for bucket in begun
            for member in bucket.members
            if (member.last_use or 0) >= where and any(at > place for at in self.gathered.get(member.fqn, ()))
        )


class _Round:
    """Bytes of the entry in use at a position, of the ``prefetch`` entries after it, and of those placed by hand."""

    def __init__(self, promise: Expectations, buckets: Sequence[Bucket], direction: Direction) -> None:
        stages = stages_of(promise, buckets, lambda bucket: bucket.wait or 0)
        self.begins = [min(bucket.wait or 0 for bucket in stage) for stage in stages.values()]
        self.stages = list(stages.values())
        self.last = max((member.last_use or 0 for bucket in buckets for member in bucket.members), default=0)
        """Where the last of what it gathers is read."""
        sizes = [sum(bucket.bytes for bucket in stage) for stage in stages.values()]
        by_hand = sum(
            size for name, size in zip(stages, sizes, strict=True) if name in promise.overlap.launch_at.get(direction, {})
        )
        self.sums = [sum(sizes[i : i + promise.overlap.prefetch + 1]) + by_hand for i in range(len(sizes))] or [0]

    def at(self, where: int) -> int:
        return self.sums[max(bisect_right(self.begins, where) - 1, 0)]

    def before(self, where: int) -> list[Bucket]:
        """Buckets of the entries that were begun before the one in use."""
        return [bucket for stage in self.stages[: max(bisect_right(self.begins, where) - 1, 0)] for bucket in stage]
