"""The schedule of a step in the words of its plan: launches, waits and compute by entry; and each bucket's members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.schedule.sections import DIRECTIONS, Sections, direction_of

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Direction
    from pytest_fxbucket.graph.buckets import Bucket, Member, Reading

ACTIVATIONS = "activations"
"""What carries no parameter and no parameter's gradient."""

COMPUTING = ("compute", "update")
"""What happens and is no communication: of the model, and of the optimizer."""

NORMS = "norms"
"""What an optimizer sends that is no parameter: norms of gradients, to clip them."""

PADDING = "(padding)"
"""Bytes between members, or after the last, that carry nothing."""

NAMELESS = "(no parameter)"
"""A member that is no parameter and no parameter's gradient: nothing that one could know again elsewhere."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at one place of the schedule."""

    section: str
    """forward, backward or optimizer; of the second microbatch ``forward #2``."""
    what: str
    """launch, wait, compute; update of the optimizer's compute."""
    label: str
    """Kind and entry of the bucket; of compute the entry, and how much of it if not all: ``layers.0 (2 of 10)``."""


@dataclass(frozen=True, slots=True)
class NamedBucket:
    """A launch under the name by which events speak of it."""

    direction: Direction
    kind: str
    entry: str
    number: int
    """Which of those of the same direction, kind and entry, from 1 on, in order of launch."""
    dtype: str
    """Of all members; if they differ ``mixed as`` the dtype that is sent."""
    bytes: int
    """Of the larger side: what is gathered, or what is reduced."""
    dims: str
    """Mesh dimension of its process group."""
    op: str
    """Of a reduction; ``from 0`` of a broadcast; empty for others."""
    members: tuple[tuple[str, str], ...]
    """(FQN, elements on a rank, with their dtype if not all have one) in byte order; ``(padding)`` with its bytes between."""

    @property
    def label(self) -> str:
        """``all_gather layers.0``, the second of them ``all_gather layers.0 #2``."""
        return f"{self.kind} {self.entry}" + (f" #{self.number}" if self.number > 1 else "")


@dataclass(frozen=True, slots=True)
class Schedule:
    """All events in order, and all buckets in order of the plan's entries, then of their launches."""

    events: tuple[Event, ...]
    buckets: tuple[NamedBucket, ...]


def schedule_of(reading: Reading, entry_of: Mapping[str, str], dims_of: Mapping[str, str]) -> Schedule:
    """The schedule that ``reading`` found.

    ``entry_of`` maps FQNs to entries, in the plan's order; ``dims_of`` groups' names to mesh dimensions. Raises
    :class:`GoldenError` for a group that it does not have: all such would read alike.
    """
    named = dict(named_buckets(reading, entry_of, dims_of))
    order = {entry: place for place, entry in enumerate(dict.fromkeys(entry_of.values()))}
    buckets = sorted(named.values(), key=lambda one: (order.get(one.entry, len(order)), DIRECTIONS.index(one.direction)))
    sections = Sections(reading)
    events = [*_communication(reading, named, sections), *_computes(reading, entry_of, sections)]
    timeline = sorted(events, key=lambda item: item[:2])
    return Schedule(tuple(_merged(timeline, _of_entry(timeline))), tuple(buckets))


def entry_text(bucket: Bucket, entry_of: Mapping[str, str]) -> str:
    """Entries of what ``bucket`` carries, joined by ``&``, of many the first and last; else whose activations."""
    entries = list(dict.fromkeys(entry_of.get(fqn, fqn) for fqn in bucket.fqns if fqn))
    if len(entries) > 3:
        return f"{entries[0]} ... {entries[-1]} ({len(entries)})"
    return " & ".join(entries) or nameless_text(bucket)


def nameless_text(bucket: Bucket) -> str:
    """What ``bucket`` carries if it is no parameter and no gradient: whose activations, or norms."""
    if bucket.direction == "optimizer":
        return NORMS
    return f"{ACTIVATIONS} of {bucket.module}" if bucket.module else ACTIVATIONS


def named_buckets(
    reading: Reading, entry_of: Mapping[str, str], dims_of: Mapping[str, str]
) -> Iterator[tuple[str, NamedBucket]]:
    """(node of the launch, bucket), in order of launch. Raises GoldenError for a process group that is not in ``dims_of``."""
    seen: dict[tuple[str, str, str], int] = {}
    for bucket in reading.buckets:
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
    reading: Reading, named: Mapping[str, NamedBucket], sections: Sections
) -> Iterator[tuple[int, int, Event, str]]:
    for bucket in reading.buckets:
        label = named[bucket.node].label
        yield bucket.launch, 0, _placed("launch", label, bucket.direction, bucket.launch, sections), ""
        waits = bucket.waits or ((bucket.wait,) if bucket.wait is not None else ())
        for number, where in enumerate(waits, 1):
            which = f"{label} ({number} of {len(waits)})" if len(waits) > 1 else label
            yield where, 1, _placed("wait", which, bucket.direction, where, sections), ""


def _placed(what: str, label: str, direction: Direction, where: int, sections: Sections) -> Event:
    """The event in the section where it stands."""
    section = sections.of(where, direction)
    return Event(section, what, label if direction_of(section) == direction else f"{label} of {direction}")


def _computes(reading: Reading, entry_of: Mapping[str, str], sections: Sections) -> Iterator[tuple[int, int, Event, str]]:
    """Compute, with what it has to do with: a parameter, or nothing for products of activations alone."""
    for named, found in ((True, reading.computes), (False, reading.products)):
        for where, direction, fqn in found:
            what = "update" if direction == "optimizer" else "compute"
            event = Event(sections.computing(where, direction), what, _computing(fqn, entry_of))
            yield where, 2, event, fqn if named else ""


def _of_entry(timeline: Iterable[tuple[int, int, Event, str]]) -> dict[Event, set[str]]:
    """What compute of each section and entry has to do with, and an entry's updates wherever they stand."""
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
    """Compute between two launches or waits is one event for each entry: in which order it stands there hides nothing."""
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
        yield member.fqn or NAMELESS, _size(member, mixed)
        end = member.offset + member.bytes
    part = bucket.bytes // bucket.parts
    if bucket.members and end < part:
        yield PADDING, f"{part - end} bytes"


def _size(member: Member, mixed: bool) -> str:
    return f"{member.numel} {_named_dtype(member.dtype)}" if mixed else str(member.numel)


def _named_dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.") if dtype is not None else "several"
