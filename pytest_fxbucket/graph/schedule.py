"""The schedule of a step in the words of its plan: launches, waits and compute by entry; and each bucket's members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.graph.reading import Bucket, Direction, Member, Reading


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at one place of the schedule."""

    direction: Direction
    what: str
    """launch, wait or compute."""
    label: str
    """Kind and entry of the bucket; of compute the entry alone."""


@dataclass(frozen=True, slots=True)
class NamedBucket:
    """A launch under the name by which events speak of it."""

    direction: Direction
    label: str
    dtype: str
    """Of all members; ``mixed`` if they differ."""
    bytes: int
    dims: str
    op: str
    members: tuple[tuple[str, str], ...]
    """(FQN, elements on a rank, with their dtype if not all have one) in byte order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All events in order, and all buckets in order of their launches."""

    events: tuple[Event, ...]
    buckets: tuple[NamedBucket, ...]


def schedule_of(reading: Reading, entry_of: Mapping[str, str], dims_of: Mapping[str, str]) -> Schedule:
    """The schedule that ``reading`` found; ``entry_of`` maps FQNs to entries, ``dims_of`` groups' names to mesh dimensions."""
    names = _labels(reading, entry_of)
    timeline = sorted(_timeline(reading, names, entry_of), key=lambda item: item[:2])
    events: list[Event] = []
    for _, _, event in timeline:
        if not (event.what == "compute" and events and events[-1] == event):
            events.append(event)
    buckets = tuple(_named(bucket, names[bucket.node], dims_of) for bucket in reading.buckets)
    return Schedule(tuple(events), buckets)


def label_of(bucket: Bucket, entry_of: Mapping[str, str]) -> str:
    """Kind and entry: ``all_gather layers.0``; several entries are joined by ``&``, of many the first and last."""
    entries = dict.fromkeys(entry_of.get(fqn, fqn) or "activations" for fqn in bucket.fqns)
    names = list(entries)
    shown = " & ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]} ({len(names)})"
    return f"{bucket.kind} {shown or 'activations'}"


def _labels(reading: Reading, entry_of: Mapping[str, str]) -> dict[str, str]:
    """Label of each launch by node name; launches that would share one in a direction are numbered."""
    plain = {bucket.node: label_of(bucket, entry_of) for bucket in reading.buckets}
    seen: dict[tuple[str, str], int] = {}
    labels: dict[str, str] = {}
    for bucket in reading.buckets:
        key = (bucket.direction, plain[bucket.node])
        seen[key] = seen.get(key, 0) + 1
        labels[bucket.node] = plain[bucket.node] + (f" #{seen[key]}" if seen[key] > 1 else "")
    return labels


def _timeline(reading: Reading, names: Mapping[str, str], entry_of: Mapping[str, str]) -> Iterator[tuple[int, int, Event]]:
    for bucket in reading.buckets:
        yield bucket.launch, 0, Event(bucket.direction, "launch", names[bucket.node])
        if bucket.wait is not None:
            yield bucket.wait, 1, Event(bucket.direction, "wait", names[bucket.node])
    for where, direction, fqn in reading.computes:
        yield where, 2, Event(direction, "compute", entry_of.get(fqn, fqn))


def _named(bucket: Bucket, label: str, dims_of: Mapping[str, str]) -> NamedBucket:
    dtypes = {str(dtype).removeprefix("torch.") for dtype in [bucket.dtype, *(member.dtype for member in bucket.members)]}
    mixed = len(dtypes) > 1
    return NamedBucket(
        direction=bucket.direction,
        label=label,
        dtype="mixed" if mixed else dtypes.pop(),
        bytes=bucket.bytes,
        dims=dims_of.get(bucket.group, "unknown group"),
        op=bucket.op,
        members=tuple((member.fqn or "(no parameter)", _size(member, mixed)) for member in bucket.members),
    )


def _size(member: Member, mixed: bool) -> str:
    return f"{member.numel} {str(member.dtype).removeprefix('torch.')}" if mixed else str(member.numel)
