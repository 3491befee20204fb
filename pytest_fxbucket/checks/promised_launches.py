"""Is each launch that the plan promises there: whole, alone, in the layout asked for, and no more of them?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.expected import Expected, expected
from pytest_fxbucket.checks.needs import Needs
from pytest_fxbucket.checks.promise import DIRECTIONS, KINDS, Promise, of_kind
from pytest_fxbucket.compat.groups import untwinned
from pytest_fxbucket.graph.preserved import alignment
from pytest_fxbucket.units import some, times

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, Reading

Member = tuple[str, str]
"""FQN, and process group where it is launched on several."""
_VERB = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "all-reduced"}


def launch_problems(promise: Promise, captured: Reading, passed: Reading) -> Iterator[str]:
    """What ``passed`` does not keep of the promised launches, one sentence each; ``captured`` is the graph before the pass."""
    wanted = expected(promise, captured, Needs(captured.order))
    for direction in DIRECTIONS:
        for kind in KINDS:
            here = [one for one in wanted if (one.direction, one.kind) == (direction, kind)]
            yield from _Launches(promise, here, of_kind(passed, direction, kind)).problems()


class _Launches:
    """The promised launches of one direction and kind, and those that are there.

    A member is known by its FQN, and by its process group where one parameter is launched on several.
    """

    def __init__(self, promise: Promise, wanted: Sequence[Expected], there: Sequence[Bucket]) -> None:
        self.promise, self.wanted = promise, wanted
        groups: dict[str, set[str]] = {}
        for one in wanted:
            for fqn in one.fqns:
                groups.setdefault(fqn, set()).add(one.group)
        self.several = {fqn for fqn, names in groups.items() if len(names) > 1}
        self.count = Counter(member for one in wanted for member in self._members(one.fqns, one.group))
        self.there = [(bucket, self._members(bucket.fqns, untwinned(bucket.group))) for bucket in there]
        self.have = Counter(member for _, members in self.there for member in members)
        self.carrying: dict[frozenset[tuple[Member, int]], list[Bucket]] = {}
        """Launches by their members, each with how often it is in it."""
        for bucket, members in self.there:
            self.carrying.setdefault(frozenset(Counter(members).items()), []).append(bucket)

    def problems(self) -> Iterator[str]:
        taken: set[str] = set()
        own: list[Bucket | None] = []
        for one in self.wanted:
            own.append(self._match(one, taken))
            taken.update(match.node for match in own[-1:] if match is not None)
        for one, match in zip(self.wanted, own, strict=True):
            yield from self._missing(one)
            yield from self._layout(match, one, one.fqns) if match is not None else self._parted(one, taken)

    def _match(self, one: Expected, taken: Collection[str]) -> Bucket | None:
        """A launch of just these members that is nobody else's."""
        same = self.carrying.get(frozenset(Counter(self._members(one.fqns, one.group)).items()), [])
        return next((bucket for bucket in same if bucket.node not in taken), None)

    def _missing(self, one: Expected) -> Iterator[str]:
        members = {fqn: self._member(fqn, one.group) for fqn in dict.fromkeys(one.fqns)}
        verb, where = _VERB[one.kind], one.direction
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
        """No launch carries just what is promised: what the launches do that have some of it."""
        members = set(self._members(one.fqns, one.group))
        carrying = [bucket for bucket, found in self.there if members.intersection(found)]
        carrying = [bucket for bucket in carrying if bucket.node not in taken] or carrying
        if one.loose:
            for bucket in carrying:
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
            order = self.promise.layout
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
        begin = -(-begin // step) * step
        if member.offset != begin:
            yield f"{one.label}: {member.fqn} begins at byte {member.offset} of a rank's part, expected {begin}"
            return
        begin += member.bytes
