"""Is no more gathered ahead than the plan says?

At each compute, the bytes that are gathered and still to be read are compared with those before the pass. They may be more by
the entry in use, which a bucket brings as a whole, and by the ``prefetch`` entries after it. Parameters of earlier entries
that are read again later may stay too, if before the pass they were gathered only later. Entries that ``launch_at`` names are
the user's own choice and allowed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.checks.promises.expectations import DIRECTIONS, Expectations, of_kind
from pytest_fxbucket.checks.promises.prefetch import numbered, rounds_of
from pytest_fxbucket.graph.buckets import gathered_lives, live_bytes

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.step.roles import Direction


def memory_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence for the first compute of each direction at which more bytes are alive than the plan allows."""
    before, after = _live_at_computes(captured), _live_at_computes(passed)
    for direction in DIRECTIONS:
        allowed = _Allowance(promise, captured, passed, direction)
        for key, (where, now) in after.items():
            # Compute that is new has no bytes to be compared with, so it is passed over.
            place, then = before.get(key, (where, now))
            if key[0] != direction or now - then <= allowed.at(where):
                continue
            # Asked only now, since it walks over the members of all earlier stages.
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
    computes = numbered(reading)
    alive = live_bytes(gathered_lives(reading), [where for where, _ in computes])
    return {key: (where, size) for (where, key), size in zip(computes, alive, strict=True)}


class _Allowance:
    """Bytes that a direction may hold at a position: of the entry in use, the ``prefetch`` after it, and those placed by hand.

    Entries count as stages. A microbatch, or a further gather of the same entry, gives stages of its own, so ``prefetch`` may
    reach from one microbatch into the next.
    """

    def __init__(self, promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis, direction: Direction) -> None:
        self.prefetch = promise.overlap.prefetch
        rounds = rounds_of(promise, passed, direction).values()
        stages = [_Stage(name, mark.place, own.get(name, [])) for own, marks in rounds for name, mark in marks.items()]
        self.stages = sorted({stage.begins: stage for stage in stages}.values(), key=lambda stage: stage.begins)
        self.begins = [stage.begins for stage in self.stages]
        self.by_hand = promise.overlap.launch_at.get(direction, {}).keys()
        self.gathered: dict[str, list[int]] = {}
        """Positions of each parameter's gathers before the pass."""
        for bucket in of_kind(captured, direction, "all_gather"):
            for fqn in bucket.fqns:
                self.gathered.setdefault(fqn, []).append(bucket.launch)

    def at(self, where: int) -> int:
        now = self._in_use(where)
        ahead = self.stages[now + self.prefetch + 1 :]
        by_hand = {stage.name: stage.bytes for stage in reversed(ahead) if stage.name in self.by_hand}  # each one's next
        return sum(stage.bytes for stage in self.stages[now : now + self.prefetch + 1]) + sum(by_hand.values())

    def for_later(self, where: int, place: int) -> int:
        """Bytes of earlier entries still to be read at ``where``, which before the pass were gathered only behind ``place``.

        ``where`` is the position of one compute now, ``place`` its position before the pass.
        """
        return sum(
            member.bytes * bucket.parts
            for stage in self.stages[: self._in_use(where)]
            for bucket in stage.buckets
            for member in bucket.members
            if (member.last_use or 0) >= where and any(at > place for at in self.gathered.get(member.fqn, ()))
        )

    def _in_use(self, where: int) -> int:
        """Index of the stage that began last at ``where``; before all of them the first, which may be prefetched then."""
        return max(bisect_right(self.begins, where) - 1, 0)


class _Stage(NamedTuple):
    """The gathers of one entry and round, which are needed together; empty for an entry that stayed gathered."""

    name: str
    begins: int
    buckets: Sequence[Bucket]

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)
