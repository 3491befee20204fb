"""The schedule of a step in the words of its plan: launches, waits and compute by entry and section; each bucket's members."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.errors import GoldenError

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.step.roles import Direction

ACTIVATIONS = "activations"
"""Entry of a launch that carries no parameter and no parameter's gradient."""

COMPUTING = ("compute", "update")
"""Kinds of events that are no communication: compute of the model, and updates of the optimizer."""

NORMS = "norms"
"""Entry of what an optimizer sends besides parameters: norms of gradients, to clip them."""

PADDING = "(padding)"
"""Bytes between members, or after the last, that carry nothing."""

NAMELESS = "(no parameter)"
"""A member that is no parameter and no parameter's gradient, so it cannot be recognized in another bucket."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at one place of the schedule."""

    section: str
    """forward, backward or optimizer; of the second microbatch ``forward #2``."""
    what: str
    """launch, wait, compute; update of the optimizer's compute."""
    label: str
    """Kind and entry of the bucket; for compute the entry, and how many parameters if not all: ``layers.0 (2 of 10)``."""


@dataclass(frozen=True, slots=True)
class NamedBucket:
    """A launch under the name by which events speak of it, read off a graph or out of a golden's text."""

    direction: str
    """forward or backward."""
    kind: str
    entry: str
    number: int
    """Its number, from 1 on, among the buckets of the same direction, kind and entry, in order of launch."""
    dtype: str
    """Of all members; if they differ ``mixed as`` the dtype that is sent."""
    bytes: int
    """Of the larger side: what is gathered, or what is reduced."""
    dims: str
    """Mesh dimension of its process group."""
    op: str
    """The operation of a reduction; ``from 0`` for a broadcast from rank 0; empty for others."""
    members: tuple[tuple[str, str], ...]
    """(FQN, elements on a rank, with their dtype if not all have one) in byte order; ``(padding)`` with its bytes between."""

    @property
    def label(self) -> str:
        """``all_gather layers.0``, the second of them ``all_gather layers.0 #2``."""
        return f"{self.kind} {self.entry}" + (f" #{self.number}" if self.number > 1 else "")

    @property
    def name(self) -> str:
        """``forward all_gather layers.0``."""
        return f"{self.direction} {self.label}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All events in order, and all buckets in order of the plan's entries, then of their launches."""

    events: tuple[Event, ...]
    buckets: tuple[NamedBucket, ...]


def schedule_of(reading: GraphAnalysis, entry_of: Mapping[str, str], dims_of: Mapping[str, str]) -> Schedule:
    """The schedule that ``reading`` found.

    ``entry_of`` maps FQNs to entries, in the plan's order; ``dims_of`` maps names of process groups to mesh dimensions. Raises
    :class:`GoldenError` for a group that ``dims_of`` does not have: the texts of all such groups would be the same.
    """
    named = dict(named_buckets(reading.buckets, entry_of, dims_of))
    order = {entry: place for place, entry in enumerate(dict.fromkeys(entry_of.values()))}
    # Sorting is stable: within an entry and a direction buckets stay in order of launch.
    buckets = sorted(named.values(), key=lambda one: (order.get(one.entry, len(order)), DIRECTIONS.index(one.direction)))
    sections = Sections(reading)
    events = [*_communication(reading, named, sections), *_computes(reading, entry_of, sections)]
    # At one position launches come before waits, and waits before compute.
    timeline = sorted(events, key=lambda item: item[:2])
    return Schedule(tuple(_merged(timeline, _of_entry(timeline))), tuple(buckets))


def entry_text(bucket: Bucket, entry_of: Mapping[str, str]) -> str:
    """Entries of the parameters in ``bucket``, joined by ``&``, of many the first and last; else :func:`nameless_text`."""
    entries = list(dict.fromkeys(entry_of.get(fqn, fqn) for fqn in bucket.fqns if fqn))
    if len(entries) > 3:
        return f"{entries[0]} ... {entries[-1]} ({len(entries)})"
    return " & ".join(entries) or nameless_text(bucket)


def nameless_text(bucket: Bucket) -> str:
    """What a ``bucket`` of no parameter and no gradient carries: activations, with their module, or norms."""
    if bucket.direction == "optimizer":
        return NORMS
    return f"{ACTIVATIONS} of {bucket.module}" if bucket.module else ACTIVATIONS


def named_buckets(
    buckets: Iterable[Bucket], entry_of: Mapping[str, str], dims_of: Mapping[str, str]
) -> Iterator[tuple[str, NamedBucket]]:
    """(node of the launch, bucket) of each, in order of launch.

    Raises :class:`GoldenError` for a process group that is not in ``dims_of``.
    """
    seen: dict[tuple[str, str, str], int] = {}
    for bucket in buckets:
        entry = entry_text(bucket, entry_of)
        key = (bucket.direction, bucket.kind, entry)
        seen[key] = seen.get(key, 0) + 1
        if bucket.group not in dims_of:
            raise GoldenError(
                f"{bucket.kind} ({bucket.node}) runs on process group {bucket.group!r}, of which only the factory knew the "
                "ranks, so a text could not say them; set checks.golden = false"
            )
        yield bucket.node, _named(bucket, entry, seen[key], dims_of[bucket.group])


def _communication(
    reading: GraphAnalysis, named: Mapping[str, NamedBucket], sections: Sections
) -> Iterator[tuple[int, int, Event, str]]:
    for bucket in reading.buckets:
        label = named[bucket.node].label
        yield bucket.launch, 0, _placed("launch", label, bucket.direction, bucket.launch, sections), ""
        waits = bucket.waits or ((bucket.wait,) if bucket.wait is not None else ())
        for number, where in enumerate(waits, 1):
            which = f"{label} ({number} of {len(waits)})" if len(waits) > 1 else label
            yield where, 1, _placed("wait", which, bucket.direction, where, sections), ""


def _placed(what: str, label: str, direction: Direction, where: int, sections: Sections) -> Event:
    """The event in the section where it stands; in a section of another direction its label names its own."""
    section = sections.of(where, direction)
    return Event(section, what, label if direction_of(section) == direction else f"{label} of {direction}")


def _computes(reading: GraphAnalysis, entry_of: Mapping[str, str], sections: Sections) -> Iterator[tuple[int, int, Event, str]]:
    """Events of compute, each with the FQN of its parameter; empty for products of activations alone."""
    for named, found in ((True, reading.computes), (False, reading.products)):
        for where, direction, fqn in found:
            what = "update" if direction == "optimizer" else "compute"
            event = Event(sections.computing(where, direction), what, _computing(fqn, entry_of))
            yield where, 2, event, fqn if named else ""


def _of_entry(timeline: Iterable[tuple[int, int, Event, str]]) -> dict[Event, set[str]]:
    """The FQNs that all compute of a section and entry has to do with; an entry's updates count in all sections together."""
    # This is the whole of which ``(2 of 10)`` in a label tells the part.
    found: dict[Event, set[str]] = {}
    for _, _, event, what in timeline:
        if event.what in COMPUTING:
            found.setdefault(_anywhere(event), set()).add(what)
    return found


def _anywhere(event: Event) -> Event:
    return event if event.what == "compute" else replace(event, section="optimizer")


def _computing(fqn: str, entry_of: Mapping[str, str]) -> str:
    """Entry of a parameter; of one that has none its module."""
    return entry_of.get(fqn) or fqn.rpartition(".")[0] or fqn


def _merged(timeline: list[tuple[int, int, Event, str]], of_entry: Mapping[Event, set[str]]) -> Iterator[Event]:
    """Merge compute between two launches or waits to one event for each entry: its order there does not matter for overlap."""
    run: dict[Event, set[str]] = {}
    for _, _, event, fqn in timeline:
        if event.what in COMPUTING:
            run.setdefault(event, set()).add(fqn)
            continue
        yield from _parts(run, of_entry)
        run.clear()
        yield event
    yield from _parts(run, of_entry)


def _parts(run: Mapping[Event, set[str]], of_entry: Mapping[Event, set[str]]) -> Iterator[Event]:
    for event, fqns in run.items():
        count = len(of_entry[_anywhere(event)])
        part = f" ({len(fqns)} of {count})" if len(fqns) < count else ""
        yield Event(event.section, event.what, event.label + part)


def _named(bucket: Bucket, entry: str, number: int, dims: str) -> NamedBucket:
    dtypes = {_named_dtype(dtype) for dtype in [bucket.dtype, *(member.dtype for member in bucket.members)]}
    mixed = len(dtypes) > 1
    return NamedBucket(
        direction=bucket.direction,
        kind=bucket.kind,
        entry=entry,
        number=number,
        dtype=f"mixed as {_named_dtype(bucket.dtype)}" if mixed else dtypes.pop(),
        bytes=bucket.bytes,
        dims=dims,
        op=bucket.op if bucket.source is None else f"from {bucket.source}",
        members=tuple(_members(bucket, mixed)),
    )


def _members(bucket: Bucket, mixed: bool) -> Iterator[tuple[str, str]]:
    end = 0
    for member in bucket.members:
        if member.offset > end:
            yield PADDING, f"{member.offset - end} bytes"
        yield member.fqn or NAMELESS, f"{member.numel} {_named_dtype(member.dtype)}" if mixed else str(member.numel)
        end = member.offset + member.bytes
    # Members lie in the part of one rank, while ``bytes`` are those of all parts.
    part = bucket.bytes // bucket.parts
    if bucket.members and end < part:
        yield PADDING, f"{part - end} bytes"


def _named_dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.") if dtype is not None else "several"


# In which section of a schedule each event stands: forward, backward, optimizer; with microbatches forward #2 and so on.
#
# A section extends over the compute of its direction. Forward compute behind backward compute begins a new round of sections.
# Updates that stand before all gradients are reduced are in the backward section. Work for the call before, in a steady graph,
# has no section of its own: it is in that in which it stands.


DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "optimizer")
_NAME = re.compile(rf"({'|'.join(DIRECTIONS)})(?: #(\d+))?")


class _Section(NamedTuple):
    name: str
    direction: Direction
    first: int
    last: int


class Sections:
    """Sections of one graph, by positions in it."""

    def __init__(self, reading: GraphAnalysis) -> None:
        computes = sorted((*reading.computes, *reading.products))
        self._late = reading.late
        self._found = list(_sections((where, of) for where, of, _ in computes if where not in reading.late))
        backward = [b for b in reading.buckets if b.direction == "backward" and b.launch not in reading.late]
        self._reduced = max((where for bucket in backward for where in (bucket.launch, *bucket.waits)), default=-1)

    def computing(self, where: int, direction: Direction) -> str:
        """The section of the compute of ``direction`` at ``where``; for an update, the section in which it stands."""
        if where in self._late:
            return self._standing(where, direction)
        if direction == "optimizer":
            return self._of_update(where)
        return next((one.name for one in self._found if one.direction == direction and where <= one.last), direction)

    def of(self, where: int, direction: Direction) -> str:
        """The section of a launch or wait that belongs to ``direction`` and stands at ``where``.

        It is mostly a section of its own direction; a launch for backward in the midst of forward compute is in forward.
        """
        if where in self._late:
            return self._standing(where, direction)
        if direction == "optimizer":
            return self._of_update(where)
        # ``here`` is the first section whose compute is not over at ``where``, ``mine`` the first from there on of the own
        # direction. Between two sections an event is in the earlier one if that is of its direction. Else ``mine`` holds unless
        # compute of an earlier section is still to come.
        here = next((i for i, one in enumerate(self._found) if where < one.last), len(self._found))
        own = [i for i, one in enumerate(self._found) if one.direction == direction]
        if not own:
            earlier = DIRECTIONS[: DIRECTIONS.index(direction)]
            return next((one.name for one in self._found[here:] if one.direction in earlier), direction)
        if 0 < here < len(self._found) and where < self._found[here].first and here - 1 in own:
            here -= 1
        mine = next((i for i in own if i >= here), own[-1])
        return self._found[min(here, mine)].name

    def _standing(self, where: int, direction: Direction) -> str:
        """The section in which an event of the call before stands, whatever its direction."""
        return next((one.name for one in self._found if where <= one.last), direction)

    def _of_update(self, where: int) -> str:
        """The section of an update: the last backward one as long as that computes or waits for reductions, else optimizer."""
        last = next((one for one in reversed(self._found) if one.direction == "backward"), None)
        if last is None or where > max(last.last, self._reduced):
            return "optimizer"
        return last.name


def _sections(computes: Iterable[tuple[int, Direction]]) -> Iterable[_Section]:
    """In order of round, then of direction; ``computes`` ascend."""
    places: dict[tuple[int, int], list[int]] = {}
    number, before = 0, 0
    for where, direction in computes:
        index = DIRECTIONS.index(direction)
        number += index == 0 < before  # forward behind anything else begins a round
        before = index
        places.setdefault((number, index), []).append(where)
    counts = dict.fromkeys(DIRECTIONS, 0)
    for (_, index), found in sorted(places.items()):
        direction = DIRECTIONS[index]
        counts[direction] += 1
        name = direction if counts[direction] == 1 else f"{direction} #{counts[direction]}"
        yield _Section(name, direction, found[0], found[-1])


def direction_of(section: str) -> str:
    """``backward`` of the section ``backward #2``; empty if ``section`` is no section's name."""
    match = _NAME.fullmatch(section)
    return match[1] if match else ""


def in_order(sections: Iterable[str]) -> list[str]:
    """Names of sections, each once, as a step runs them: forward, backward, forward #2, backward #2, and optimizer last."""

    def place(section: str) -> tuple[int, int]:
        match = _NAME.fullmatch(section)
        assert match is not None
        return int(match[2] or 1), DIRECTIONS.index(match[1])

    names = set(sections)
    last = max((place(name)[0] for name in names), default=1)
    return sorted(names, key=lambda name: (last, 2) if name == DIRECTIONS[2] else place(name))
