"""Which bucket of one schedule is which of another: by what they carry first, then by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fxbucket.schedule.events import NAMELESS, PADDING
from pytest_fxbucket.schedule.read_back import ReadBucket


@dataclass(frozen=True, slots=True)
class Paired:
    """Buckets of two schedules; each is in one of the three."""

    pairs: tuple[tuple[ReadBucket, ReadBucket], ...]
    """In the order of the old ones."""
    lost: tuple[ReadBucket, ...]
    new: tuple[ReadBucket, ...]


def paired(old: Sequence[ReadBucket], new: Sequence[ReadBucket]) -> Paired:
    """Pair buckets of the same direction and kind that share most members; of the rest those that have the same name."""
    taken_old: dict[int, int] = {}
    taken_new: set[int] = set()
    for a, b in _candidates(old, new):
        if a not in taken_old and b not in taken_new:
            taken_old[a] = b
            taken_new.add(b)
    by_name = {bucket.name: b for b, bucket in enumerate(new) if b not in taken_new}
    for a, bucket in enumerate(old):
        if a not in taken_old and bucket.name in by_name:
            taken_old[a] = by_name.pop(bucket.name)
            taken_new.add(taken_old[a])
    return Paired(
        pairs=tuple((old[a], new[b]) for a, b in sorted(taken_old.items())),
        lost=tuple(bucket for a, bucket in enumerate(old) if a not in taken_old),
        new=tuple(bucket for b, bucket in enumerate(new) if b not in taken_new),
    )


def carried(bucket: ReadBucket) -> dict[str, str]:
    """Size of each member by FQN; the second of a name as ``name (2)``. Padding is none."""
    found: dict[str, str] = {}
    for fqn, size in bucket.members:
        if fqn != PADDING:
            name, count = fqn, 1
            while name in found:
                count += 1
                name = f"{fqn} ({count})"
            found[name] = size
    return found


def known(bucket: ReadBucket) -> list[str]:
    """Members by which a bucket is known again: all that are parameters."""
    return [fqn for fqn in carried(bucket) if not fqn.startswith(NAMELESS)]


def _candidates(old: Sequence[ReadBucket], new: Sequence[ReadBucket]) -> list[tuple[int, int]]:
    """Pairs that share a member: those that share most first, of those the ones that leave least out, then of the same name."""
    holders: dict[tuple[str, str, str], list[int]] = {}
    for b, bucket in enumerate(new):
        for fqn in known(bucket):
            holders.setdefault((bucket.direction, bucket.kind, fqn), []).append(b)
    shared: dict[tuple[int, int], int] = {}
    for a, bucket in enumerate(old):
        for fqn in known(bucket):
            for b in holders.get((bucket.direction, bucket.kind, fqn), ()):
                shared[a, b] = shared.get((a, b), 0) + 1

    def rank(pair: tuple[int, int]) -> tuple[int, int, bool, int, int]:
        a, b = pair
        return -shared[pair], len(old[a].members) + len(new[b].members), old[a].name != new[b].name, a, b

    return sorted(shared, key=rank)
