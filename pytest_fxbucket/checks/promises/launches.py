"""The launches that a plan promises, derived from the graph before the pass, with members in byte order; and is each there?

Members of one launch agree in entry, direction, round (of gathers), kind, process group, reduction and dtype. A launch is
closed before it would grow above its cap. Members that need each other's results are in different launches, as few as the
longest chain of such needs. Launches that no pass may merge (:attr:`~pytest_fxbucket.graph.buckets.Bucket.unmergeable`) stay
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.checks.promises.expectations import DIRECTIONS, KINDS, Expectations, of_kind, of_round
from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.graph.preserved import alignment
from pytest_fxbucket.words import some, times

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.graph.order import Order

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Expected:
    """One launch that the plan promises."""

    label: str
    """For people."""
    launches: tuple[Bucket, ...]
    """The launches before the pass that it replaces, in byte order; they agree in direction, kind and group."""
    loose: bool = False
    """Whether it may be split: whole, it would be in a circle of launches that need each other, or would not stay hidden."""

    @property
    def first(self) -> Bucket:
        """Its first launch, for the properties that all of them share."""
        return self.launches[0]

    @property
    def fqns(self) -> tuple[str, ...]:
        """Members in byte order; a member that the graph launches several times is in there as often."""
        return tuple(fqn for bucket in self.launches for fqn in bucket.fqns)


def expected(promise: Expectations, captured: GraphAnalysis, order: Order | None) -> list[Expected]:
    """Every promised launch that carries only parameters or gradients; ``order`` says which launch needs which other."""
    # Three steps. Launches with equal keys are laid out and cut by the cap. Each piece is parted so that no part needs its own
    # result. Then parts that need each other in a circle, which cannot all be launched whole, are marked as loose.
    place = {fqn: i for i, fqn in enumerate(promise.registration)}
    capped = [
        _Capped(f"{direction} {kind}", key, list(_capped(promise, key.name, same, place)))
        for direction in DIRECTIONS
        for kind in KINDS
        for key, same in _by_key(promise, of_kind(captured, direction, kind)).items()
    ]
    if promise.bucket.by == "overlap":
        # All may be split anyway, so neither levels nor circles need be looked for.
        return [replace(one, loose=True) for one in _labelled(capped, {})]
    parted = in_parts(order, [[bucket.node for bucket in part] for one in capped for part in one.parts])
    found = list(_labelled(capped, parted.level))
    circling = _circling({parted.part[one.first.node]: one.launches for one in found}, parted.below)
    return [replace(one, loose=parted.part[one.first.node] in circling) for one in found]


def _labelled(several: Sequence[_Capped], levels: Mapping[str, int]) -> Iterator[Expected]:
    launches = Counter((what, key.name, key.round) for what, key, _ in several)
    for what, key, capped in several:
        parts = [part for whole in capped for part in _parted(whole, levels)]
        for number, part in enumerate(parts, start=1):
            label = f"entry {key.name}, {what}" if key.name else f"by size, {what}"
            label += f" {dtype_name(key.dtype)}" if launches[what, key.name, key.round] > 1 and not key.alone else ""
            label += of_round(key.round)
            label += f" ({key.alone})" if key.alone not in ("", key.name) else ""
            label += f", part {number} of {len(parts)}" if len(parts) > 1 else ""
            yield Expected(label, tuple(part))


def _circling(parts: Mapping[int, Sequence[Bucket]], below: Sequence[int]) -> set[int]:
    """Parts, by number, that lie on a circle of parts that need each other, or between two circles."""
    # Peel off what needs nothing that is left, then, with the needs turned round, what nothing left needs. In order of launch
    # most needs lead back, so one round of peeling nearly always does. Sets of parts are bits of an int.
    first = sorted(parts, key=lambda number: min(bucket.launch for bucket in parts[number]))
    left = _peeled(first, below, (1 << len(parts)) - 1)
    above = [0] * len(parts)
    for number in first:
        for other in first if left >> number & 1 else ():
            above[other] |= (below[number] >> other & 1) << number
    left = _peeled(first[::-1], above, left)
    return {number for number in first if left >> number & 1}


def _peeled(order: Sequence[int], below: Sequence[int], left: int) -> int:
    """``left`` (bits) without the parts that need no other part in it, repeated until none goes.

    One round does it if ``order`` has every part behind the parts that it needs.
    """
    while True:
        before = left
        for number in order:
            if left >> number & 1 and not below[number] & left & ~(1 << number):
                left ^= 1 << number
        if left == before:
            return left


class _Capped(NamedTuple):
    """Launches that agree in a key, cut into parts by the cap."""

    what: str
    key: _Key
    parts: list[list[Bucket]]


class _Key(NamedTuple):
    """The properties that members of one launch agree in."""

    name: str
    """The entry; the FQNs of parameters in no entry; empty in a plan that buckets by size."""
    alone: str
    """FQNs of a launch that may not be merged; empty if it may. Such launches are told apart by ``node`` too."""
    dtype: str
    group: str
    op: str
    parts: int
    round: int
    node: str


def _by_key(promise: Expectations, buckets: Sequence[Bucket]) -> dict[_Key, list[Bucket]]:
    """Launches that would share a bucket if there were no cap, in order of launch, without launches of no parameter."""
    found: dict[_Key, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.members and all(bucket.fqns):
            found.setdefault(_key(promise, bucket), []).append(bucket)
    return found


def _key(promise: Expectations, bucket: Bucket) -> _Key:
    entries = {promise.entry_of.get(fqn) if promise.bucket.has_entries else "" for fqn in bucket.fqns}
    entry = entries.pop() if len(entries) == 1 else None
    # In a group of one rank nothing travels, so its launches stay as they are.
    merged = promise.bucket.enabled and entry is not None and not bucket.unmergeable and promise.ranks(bucket) != 1
    several = promise.bucket.dtypes == "mixed" and bucket.kind == "all_gather"
    merged = merged and (several or bucket.dtype is not None)
    dtype = "several" if several and merged else str(bucket.dtype)
    name = " & ".join(bucket.fqns)
    alone = "" if merged else name
    node = "" if merged else bucket.node
    return _Key(name if entry is None else entry, alone, dtype, bucket.group, bucket.op, bucket.parts, bucket.round, node)


def _capped(promise: Expectations, name: str, buckets: Sequence[Bucket], place: Mapping[str, int]) -> Iterator[list[Bucket]]:
    """``buckets`` laid out and cut so that each part stays under its cap; ``place`` is the order of registration.

    A plan with ``by = "overlap"`` merges only as far as launches stay hidden, so it may cut anywhere: all are one part here.
    """
    if promise.bucket.by == "overlap":
        yield _laid_out(promise, buckets, place)
        return
    # By entry the layout is made first and each entry has one cap, the last one for all further entries. By size launches are
    # cut in graph order, each part has a cap of its own, and the layout is made within it.
    if promise.bucket.has_entries:
        turn = promise.entries.index(name) if name in promise.entries else 0
        caps = [promise.bucket.cap_mb[min(turn, len(promise.bucket.cap_mb) - 1)]]
        buckets = _laid_out(promise, buckets, place)
    else:
        caps = list(promise.bucket.cap_mb)
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


def _laid_out(promise: Expectations, buckets: Sequence[Bucket], place: Mapping[str, int]) -> list[Bucket]:
    if promise.bucket.layout != "registration":
        return list(buckets)
    return sorted(buckets, key=lambda bucket: min(place[fqn] for fqn in bucket.fqns))


def _parted(buckets: Sequence[Bucket], level: Mapping[str, int]) -> list[list[Bucket]]:
    """``buckets`` parted by their ``level``, so that no part holds two that need each other; the order inside is kept."""
    parts: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        parts.setdefault(level.get(bucket.node, 0), []).append(bucket)
    return [parts[number] for number in sorted(parts)]


# Is each promised launch there: with all its members and no others, in the layout asked for, and only once?


Member = tuple[str, str]
"""FQN, and the process group if that parameter is launched on several groups, else an empty string."""
_VERB = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "all-reduced"}


def launch_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """How ``passed`` breaks the promised launches, one sentence each; ``captured`` is the graph before the pass."""
    wanted = expected(promise, captured, captured.order)
    for direction in DIRECTIONS:
        for kind in KINDS:
            here = [one for one in wanted if (one.first.direction, one.first.kind) == (direction, kind)]
            there = of_kind(passed, direction, kind)
            yield from _Launches(promise, here, there).problems()
            yield from _above_cap(promise, of_kind(captured, direction, kind), there)


def _above_cap(promise: Expectations, before: Sequence[Bucket], there: Sequence[Bucket]) -> Iterator[str]:
    """In a plan with ``by = "overlap"``, a sentence for each launch of several members that is larger than the cap.

    One that carried them all before the pass stays as it is: a pass merges, and cuts nothing.
    """
    cap, whole = promise.bucket.cap_mb[0] * MB, {frozenset(bucket.fqns) for bucket in before}
    for bucket in there if promise.bucket.by == "overlap" and cap else ():
        size = bucket.parts * sum(member.bytes for member in bucket.members)  # without what fills up dtypes of several widths
        if len(bucket.members) > 1 and size > cap and all(bucket.fqns) and frozenset(bucket.fqns) not in whole:
            what = f"{bucket.direction} {bucket.kind} of {some(bucket.fqns)}"
            yield f"{what} has {size:,} bytes, above cap_mb = {promise.bucket.cap_mb[0]:g}"


class _Launches:
    """The promised launches of one direction and kind, and those that are there.

    A member is known by its FQN, and by its process group where one parameter is launched on several.
    """

    def __init__(self, promise: Expectations, wanted: Sequence[Expected], there: Sequence[Bucket]) -> None:
        self.promise, self.wanted = promise, wanted
        groups: dict[str, set[str]] = {}
        for one in wanted:
            for fqn in one.fqns:
                groups.setdefault(fqn, set()).add(one.first.group)
        self.several = {fqn for fqn, names in groups.items() if len(names) > 1}
        self.count = Counter(member for one in wanted for member in self._members(one.fqns, one.first.group))
        # A gather may run on the twin of its group now, and what is wanted names the group of before.
        self.there = [(bucket, self._members(bucket.fqns, untwinned(bucket.group))) for bucket in there]
        self.have = Counter(member for _, members in self.there for member in members)
        self.carrying: dict[frozenset[tuple[Member, int]], list[Bucket]] = {}
        """Launches by their members, each member with how often the launch carries it."""
        for bucket, members in self.there:
            self.carrying.setdefault(frozenset(Counter(members).items()), []).append(bucket)

    def problems(self) -> Iterator[str]:
        # Exact matches are given out before anything is said: what became of a promised launch without one is looked for among
        # the launches that no other one matched.
        taken: set[str] = set()
        own: list[Bucket | None] = []
        for one in self.wanted:
            own.append(self._match(one, taken))
            taken.update(match.node for match in own[-1:] if match is not None)
        for one, match in zip(self.wanted, own, strict=True):
            yield from self._missing(one)
            yield from self._layout(match, one, one.fqns) if match is not None else self._parted(one, taken)

    def _match(self, one: Expected, taken: Collection[str]) -> Bucket | None:
        """A launch of exactly these members that is not in ``taken``."""
        same = self.carrying.get(frozenset(Counter(self._members(one.fqns, one.first.group)).items()), [])
        return next((bucket for bucket in same if bucket.node not in taken), None)

    def _missing(self, one: Expected) -> Iterator[str]:
        members = {fqn: self._member(fqn, one.first.group) for fqn in dict.fromkeys(one.fqns)}
        verb, where = _VERB[one.first.kind], one.first.direction
        missing = [fqn for fqn, member in members.items() if not self.have[member]]
        if missing:
            yield f"{one.label}: {some(missing)} {'is' if len(missing) == 1 else 'are'} not {verb} in {where}"
        twice = [fqn for fqn, member in members.items() if self.have[member] > self.count[member] == 1]
        if twice:
            yield f"{one.label}: {some(twice)} {'is' if len(twice) == 1 else 'are'} {verb} more than once in {where}"
        for fqn, member in members.items():
            have, count = self.have[member], self.count[member]
            if count > 1 and have and have != count:
                yield f"{one.label}: {fqn} is {verb} {times(have)} in {where}, {times(count)} before the pass"

    def _parted(self, one: Expected, taken: Collection[str]) -> Iterator[str]:
        """Sentences on a promised launch without an exact match, from the launches that carry some of its members."""
        members = set(self._members(one.fqns, one.first.group))
        carrying = [bucket for bucket, found in self.there if members.intersection(found)]
        carrying = [bucket for bucket in carrying if bucket.node not in taken] or carrying
        if one.loose:
            for bucket in carrying:
                # It may be split anywhere, but each part must be laid out as the whole is.
                yield from self._layout(bucket, one, [fqn for fqn in one.fqns if fqn in bucket.fqns])
        elif len(carrying) > 1:
            yield f"{one.label}: {len(carrying)} launches, expected 1"
        elif carrying:
            yield from self._layout(carrying[0], one, one.fqns)

    def _layout(self, bucket: Bucket, one: Expected, members: Sequence[str]) -> Iterator[str]:
        have = list(bucket.fqns)
        foreign = [fqn for fqn in have if fqn not in members]
        if foreign:
            owners = sorted({self.promise.entry_of.get(fqn, "no entry") for fqn in foreign if fqn})
            names = some([fqn or "something that is no parameter" for fqn in foreign])
            yield f"{one.label}: its launch also carries {names}{' of ' * bool(owners)}{', '.join(owners)}"
        many = [fqn for fqn in dict.fromkeys(have) if have.count(fqn) > max(members.count(fqn), 1)]
        if many:
            yield f"{one.label}: its launch carries {some(many)} twice"
        elif not foreign and sorted(have) == sorted(members) and have != list(members):
            at = next(i for i, (x, y) in enumerate(zip(have, members, strict=True)) if x != y)
            order = self.promise.bucket.layout
            yield f"{one.label}: member {at} of the layout is {have[at]}, expected {members[at]} ({order} order)"
        yield from _gaps(bucket, one)

    def _members(self, fqns: Sequence[str], group: str) -> list[Member]:
        return [self._member(fqn, group) for fqn in fqns]

    def _member(self, fqn: str, group: str) -> Member:
        return fqn, group if fqn in self.several else ""


def _gaps(bucket: Bucket, one: Expected) -> Iterator[str]:
    step = alignment(bucket)
    begin = 0
    for member in bucket.members:
        begin = -(-begin // step) * step  # rounded up
        if member.offset != begin:
            yield f"{one.label}: {member.fqn} begins at byte {member.offset} of a rank's part, expected {begin}"
            return
        begin += member.bytes


# Which launches of a graph need which others' results, through any path of values and writes; asked for groups of launches.
#
# All pairs would be the square of the launches. Less is enough: which launches of one group need each other, and which part of
# a group needs which other part. One walk in graph order carries at every node a bit for each part that it depends on.


@dataclass(frozen=True, slots=True)
class LaunchGroups:
    """Groups of launches cut into parts, so that no part holds two launches that need each other. Launches go by node names."""

    level: dict[str, int]
    """For each launch, the number of its part within its group."""
    part: dict[str, int]
    """For each launch, the number of its part among the parts of all groups."""
    below: list[int]
    """For each part, the parts that it needs: bit n is set if one of its launches needs a launch of part n."""


def in_parts(order: Order | None, groups: Sequence[Sequence[str]]) -> LaunchGroups:
    """Each of ``groups`` in as few parts as the longest chain of launches in it that need each other.

    ``order`` is that of their graph; without it no launch counts as needing another. No launch is in two groups.
    """
    part_of: dict[tuple[int, int], int] = {}
    found = LaunchGroups({}, {}, [])
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    above: list[int] = []
    needs: Iterable[tuple[str, Sequence[int]]] = ((name, ()) for name in group_of)
    if order is not None:
        needs = ((node.name, before) for node, before in zip(order.nodes, order.before, strict=True))
    for name, before in needs:
        bits = 0
        for earlier in before:
            bits |= above[earlier]
        if name in group_of:
            # A launch goes into the first part of its group that it does not depend on. Each launch of part n depends on one of
            # part n - 1, so the number of its part is the length of the longest chain that it depends on.
            group, level = group_of[name], 0
            while bits >> part_of.setdefault((group, level), len(part_of)) & 1:
                level += 1
            found.level[name], found.part[name] = level, part_of[group, level]
            found.below.extend([0] * (len(part_of) - len(found.below)))
            found.below[found.part[name]] |= bits
            bits |= 1 << found.part[name]
        above.append(bits)
    return found
