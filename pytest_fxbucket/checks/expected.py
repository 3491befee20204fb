"""Which launches a plan promises, told from the graph before the pass: each one's members, in byte order.

Members of one launch agree in entry, direction, round (of gathers), kind, process group, reduction and dtype; a cap closes a
launch before it would grow above it; members that need each other's results end in different launches, as few as the longest
chain of them. What no pass may merge (:attr:`~pytest_fxbucket.graph.reading.Bucket.apart`) stays alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.checks.needs import Needs
from pytest_fxbucket.checks.promise import DIRECTIONS, KINDS, Promise, of_kind, of_round

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Direction
    from pytest_fxbucket.graph.buckets import Bucket, Reading

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Expected:
    """One launch that the plan promises."""

    label: str
    """For people."""
    direction: Direction
    kind: str
    group: str
    fqns: tuple[str, ...]
    """Members in byte order; one that the graph launches several times several times."""
    loose: bool = False
    """Whether it may be parted: with others it would form a circle of launches that need each other."""


def expected(promise: Promise, captured: Reading, needs: Needs) -> list[Expected]:
    """Every launch that carries parameters or gradients alone."""
    place = {fqn: i for i, fqn in enumerate(promise.registration)}
    capped = [
        _Capped(f"{direction} {kind}", key, list(_capped(promise, key.name, same, place)))
        for direction in DIRECTIONS
        for kind in KINDS
        for key, same in _by_key(promise, of_kind(captured, direction, kind)).items()
    ]
    parted = needs.parted([[bucket.node for bucket in part] for one in capped for part in one.parts])
    found = list(_labelled(capped, parted.level))
    circling = _circling({parted.part[part[0].node]: part for _, part in found}, parted.below)
    return [replace(one, loose=parted.part[part[0].node] in circling) for one, part in found]


def _labelled(several: Sequence[_Capped], levels: Mapping[str, int]) -> Iterator[tuple[Expected, list[Bucket]]]:
    launches = Counter((what, key.name, key.round) for what, key, _ in several)
    for what, key, capped in several:
        parts = [part for whole in capped for part in _parted(whole, levels)]
        for number, part in enumerate(parts, start=1):
            label = f"entry {key.name}, {what}" if key.name else f"by size, {what}"
            label += f" {key.dtype.removeprefix('torch.')}" if launches[what, key.name, key.round] > 1 and not key.alone else ""
            label += of_round(key.round)
            label += f" ({key.alone})" if key.alone not in ("", key.name) else ""
            label += f", part {number} of {len(parts)}" if len(parts) > 1 else ""
            fqns = tuple(fqn for bucket in part for fqn in bucket.fqns)
            yield Expected(label, part[0].direction, part[0].kind, key.group, fqns), part


def _circling(parts: Mapping[int, Sequence[Bucket]], below: Sequence[int]) -> set[int]:
    """Parts, by number, that lie on a circle of parts that need each other, or between two circles."""
    first = sorted(parts, key=lambda number: min(bucket.launch for bucket in parts[number]))
    left = _peeled(first, below, (1 << len(parts)) - 1)
    above = [0] * len(parts)
    for number in first:
        for other in first if left >> number & 1 else ():
            above[other] |= (below[number] >> other & 1) << number
    left = _peeled(first[::-1], above, left)
    return {number for number in first if left >> number & 1}


def _peeled(order: Sequence[int], below: Sequence[int], left: int) -> int:
    """``left`` (bits) without what needs none of it, again and again; one round, if ``order`` is one of the needs."""
    while True:
        before = left
        for number in order:
            if left >> number & 1 and not below[number] & left & ~(1 << number):
                left ^= 1 << number
        if left == before:
            return left


class _Capped(NamedTuple):
    """Launches that agree in a key, parted by the cap."""

    what: str
    key: _Key
    parts: list[list[Bucket]]


class _Key(NamedTuple):
    """What members of one launch agree in."""

    name: str
    """Entry; of a parameter in none its FQN; by size nothing."""
    alone: str
    """What shares no launch, by its FQNs, and by its node if the FQNs do not tell."""
    dtype: str
    group: str
    op: str
    parts: int
    round: int
    node: str


def _by_key(promise: Promise, buckets: Sequence[Bucket]) -> dict[_Key, list[Bucket]]:
    """Launches that share a bucket but for its size, in order of launch; a launch of no parameter belongs to none."""
    found: dict[_Key, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.members and all(bucket.fqns):
            found.setdefault(_key(promise, bucket), []).append(bucket)
    return found


def _key(promise: Promise, bucket: Bucket) -> _Key:
    entries = {"" if promise.by == "size" else promise.entry_of.get(fqn) for fqn in bucket.fqns}
    entry = entries.pop() if len(entries) == 1 else None
    merged = promise.merged and entry is not None and not bucket.apart and promise.ranks(bucket) != 1
    several = promise.mixed and bucket.kind == "all_gather"
    merged = merged and (several or bucket.dtype is not None)
    dtype = "several" if several and merged else str(bucket.dtype)
    name = " & ".join(bucket.fqns)
    alone = "" if merged else name
    node = "" if merged else bucket.node
    return _Key(name if entry is None else entry, alone, dtype, bucket.group, bucket.op, bucket.parts, bucket.round, node)


def _capped(promise: Promise, name: str, buckets: Sequence[Bucket], place: Mapping[str, int]) -> Iterator[list[Bucket]]:
    """``buckets`` laid out and cut so that each part stays under its cap; ``place`` is the order of registration."""
    if promise.by == "plan":
        turn = promise.entries.index(name) if name in promise.entries else 0
        caps = [promise.caps[min(turn, len(promise.caps) - 1)]]
        buckets = _laid_out(promise, buckets, place)
    else:
        caps = list(promise.caps)
    part: list[Bucket] = []
    parts = size = 0
    for bucket in buckets:
        cap = caps[min(parts, len(caps) - 1)] * MB
        if part and cap and size + bucket.bytes > cap:
            yield _laid_out(promise, part, place)
            part, size, parts = [], 0, parts + 1
        part.append(bucket)
        size += bucket.bytes
    yield _laid_out(promise, part, place)


def _laid_out(promise: Promise, buckets: Sequence[Bucket], place: Mapping[str, int]) -> list[Bucket]:
    if promise.layout != "registration":
        return list(buckets)
    return sorted(buckets, key=lambda bucket: min(place[fqn] for fqn in bucket.fqns))


def _parted(buckets: Sequence[Bucket], level: Mapping[str, int]) -> list[list[Bucket]]:
    """``buckets`` in as few parts as possible of which none holds two that need each other; the order inside is kept."""
    parts: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        parts.setdefault(level[bucket.node], []).append(bucket)
    return [parts[number] for number in sorted(parts)]
