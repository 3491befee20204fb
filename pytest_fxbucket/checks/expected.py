"""Which launches a plan promises, told from the graph before the pass: each one's members, in byte order.

Members of one launch agree in entry, direction, kind, process group, reduction and dtype; a cap closes a launch before it would
grow above it; members that need each other's results end in different launches, as few as the longest chain of them. What no
pass may merge (:attr:`~pytest_fxbucket.graph.reading.Bucket.apart`) stays alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.checks.promise import DIRECTIONS, KINDS, Promise, of_kind
from pytest_fxbucket.graph import collectives

if TYPE_CHECKING:
    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.graph.reading import Bucket, Direction, Reading

MB = 1 << 20
Needs = Mapping[str, frozenset[str]]
"""For each launch, by its node's name, the launches whose results it needs."""


def needs_of(order: Order) -> Needs:
    """Which launches of a graph need which, through any path of values and writes."""
    names: list[str] = []
    above: list[int] = []
    found: dict[str, frozenset[str]] = {}
    for node, before in zip(order.nodes, order.before, strict=True):
        bits = 0
        for earlier in before:
            bits |= above[earlier]
        if collectives.launch_kind(node) is not None:
            found[node.name] = frozenset(name for i, name in enumerate(names) if bits >> i & 1)
            bits |= 1 << len(names)
            names.append(node.name)
        above.append(bits)
    return found


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
    found: list[tuple[Expected, list[Bucket]]] = []
    for direction in DIRECTIONS:
        for kind in KINDS:
            found += _of_kind(promise, of_kind(captured, direction, kind), needs, f"{direction} {kind}")
    circling = _circling([part for _, part in found], needs)
    return [replace(one, loose=number in circling) for number, (one, _) in enumerate(found)]


def _of_kind(promise: Promise, buckets: Sequence[Bucket], needs: Needs, what: str) -> Iterator[tuple[Expected, list[Bucket]]]:
    keyed = _by_key(promise, buckets)
    launches = Counter(key.name for key in keyed)
    for key, same in keyed.items():
        parts = [part for capped in _capped(promise, key.name, same) for part in _levels(capped, needs)]
        for number, part in enumerate(parts, start=1):
            label = f"entry {key.name}, {what}" if key.name else f"by size, {what}"
            label += f" {key.dtype.removeprefix('torch.')}" if launches[key.name] > 1 and not key.alone else ""
            label += f" ({key.alone})" if key.alone not in ("", key.name) else ""
            label += f", part {number} of {len(parts)}" if len(parts) > 1 else ""
            fqns = tuple(fqn for bucket in part for fqn in bucket.fqns)
            yield Expected(label, part[0].direction, part[0].kind, key.group, fqns), part


def _circling(parts: Sequence[Sequence[Bucket]], needs: Needs) -> set[int]:
    """Parts that lie on a circle of parts that need each other, or between two circles."""
    home = {bucket.node: number for number, part in enumerate(parts) for bucket in part}
    below = {
        number: {home[name] for bucket in part for name in needs.get(bucket.node, ()) if name in home} - {number}
        for number, part in enumerate(parts)
    }
    left = set(below)
    while True:
        needed = {other for number in left for other in below[number]}
        gone = {number for number in left if number not in needed or not below[number] & left}
        if not gone:
            return left
        left -= gone


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
    return _Key(
        name if entry is None else entry, alone, dtype, bucket.group, bucket.op, bucket.parts, "" if merged else bucket.node
    )


def _capped(promise: Promise, name: str, buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    if promise.by == "plan":
        place = promise.entries.index(name) if name in promise.entries else 0
        caps = [promise.caps[min(place, len(promise.caps) - 1)]]
        buckets = _laid_out(promise, buckets)
    else:
        caps = list(promise.caps)
    part: list[Bucket] = []
    parts = size = 0
    for bucket in buckets:
        cap = caps[min(parts, len(caps) - 1)] * MB
        if part and cap and size + bucket.bytes > cap:
            yield _laid_out(promise, part)
            part, size, parts = [], 0, parts + 1
        part.append(bucket)
        size += bucket.bytes
    yield _laid_out(promise, part)


def _laid_out(promise: Promise, buckets: Sequence[Bucket]) -> list[Bucket]:
    if promise.layout != "registration":
        return list(buckets)
    return sorted(buckets, key=lambda bucket: min(promise.registration.index(fqn) for fqn in bucket.fqns))


def _levels(buckets: Sequence[Bucket], needs: Needs) -> list[list[Bucket]]:
    """``buckets`` in as few parts as possible of which none holds two that need each other; the order inside is kept."""
    level: dict[str, int] = {}
    for bucket in sorted(buckets, key=lambda bucket: bucket.launch):
        taken = {level[name] for name in needs.get(bucket.node, ()) if name in level}
        level[bucket.node] = next(number for number in range(len(buckets)) if number not in taken)
    parts: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        parts.setdefault(level[bucket.node], []).append(bucket)
    return [parts[number] for number in sorted(parts)]
