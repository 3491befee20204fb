"""Where a reduction's members lie otherwise than in torch's own: round a ring that changes the order of their sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import REDUCTIONS

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, Reading


def moved(reading: Reading, units: Mapping[str, Sequence[str]], differing: Collection[str], torchs: str) -> str:
    """A sentence on the first member, in byte order, of the first reduction of a ``differing`` gradient that lies elsewhere.

    ``units`` are FQNs by unit of torch's, each in registration order, which is the order of bytes there. Empty: none does.
    """
    for bucket in reading.buckets:
        if (
            bucket.kind in REDUCTIONS
            and any(fqn in differing for fqn in bucket.fqns)
            and (found := _first(reading, bucket, units))
        ):
            unit, fqn, here, there = found
            return (
                f"{bucket.kind} of {unit}: its first member that moved is {fqn}, at byte {here} of a rank's part, and at byte "
                f"{there} in {torchs}; where a ring adds, the order of a sum depends on that"
            )
    return ""


def _first(reading: Reading, bucket: Bucket, units: Mapping[str, Sequence[str]]) -> tuple[str, str, int, int] | None:
    """(unit, FQN, offset here, offset in torch's) in bytes."""
    same = [one for one in reading.buckets if (one.kind, one.level, one.round) == (bucket.kind, bucket.level, bucket.round)]
    sizes = {member.fqn: member.bytes for one in same for member in one.members}
    for member in bucket.members:
        unit = next((name for name, fqns in units.items() if member.fqn in fqns), "")
        if not unit:
            continue
        before = units[unit][: units[unit].index(member.fqn)]
        there = sum(sizes.get(fqn, 0) for fqn in before)
        if there != member.offset:
            return unit, member.fqn, member.offset, there
    return None
