"""What changed between two schedules, in words: first buckets, then places of launches and waits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from pytest_fxbucket.graph.text import unfold

_BUCKET = re.compile(
    r"^  (?P<name>(?:forward|backward) .*): \d+ members?, (?P<dtype>\w+), (?P<bytes>\d+) bytes, (?P<where>.*)$"
)
_MEMBER = re.compile(r"^(?P<fqn>.+?) (?P<size>\d+(?: [a-z]\w*)?)$")


@dataclass(frozen=True, slots=True)
class _Read:
    """A schedule text, read back."""

    events: dict[str, list[str]]
    buckets: dict[str, tuple[str, str, str]]
    members: dict[str, list[str]]


def differences(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Sentences on how the schedule ``new`` differs from ``old``, both as lines of schedule text."""
    a, b = _read(old), _read(new)
    return [*_bucket_words(a, b), *_event_words(a, b)]


def _read(lines: Sequence[str]) -> _Read:
    events: dict[str, list[str]] = {"forward": [], "backward": []}
    buckets: dict[str, tuple[str, str, str]] = {}
    members: dict[str, list[str]] = {}
    section = name = ""
    for line in unfold(lines):
        if line in ("forward", "backward", "buckets"):
            section = line
        elif section in events and line.startswith("  "):
            events[section].append(" ".join(line.split()))
        elif section == "buckets" and (match := _BUCKET.match(line)):
            name = match["name"]
            buckets[name] = (match["dtype"], match["bytes"], match["where"])
            members[name] = []
        elif section == "buckets" and name and line.startswith("    "):
            members[name].append(line.strip())
    return _Read(events, buckets, members)


def _bucket_words(a: _Read, b: _Read) -> Iterator[str]:
    for name in [n for n in a.buckets if n not in b.buckets]:
        yield f"bucket lost: {name} ({_count(a.members[name])})"
    for name in [n for n in b.buckets if n not in a.buckets]:
        yield f"bucket new: {name} ({_count(b.members[name])})"
    for name in [n for n in a.buckets if n in b.buckets]:
        for what, old, new in zip(("dtype", "bytes", "group or op"), a.buckets[name], b.buckets[name], strict=True):
            if old != new:
                yield f"{what} of {name} changed: {old} -> {new}"
        old_members, new_members = a.members[name], b.members[name]
        yield from _member_words(name, old_members, new_members)
        if sorted(old_members) == sorted(new_members) and old_members != new_members:
            at = next(i for i, (x, y) in enumerate(zip(old_members, new_members, strict=True)) if x != y)
            yield (f"byte layout of {name} changed: {_pair(new_members[at])[0]} stands where {_pair(old_members[at])[0]} stood")


def _member_words(bucket: str, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Members are lines of FQN and elements."""
    lost = [_pair(member) for member in old if member not in new]
    gained = [_pair(member) for member in new if member not in old]
    sizes = dict(gained)
    for fqn, size in lost:
        if fqn in sizes:
            yield f"{fqn} of {bucket} changed: {size} -> {sizes[fqn]} elements"
        else:
            yield f"{bucket} lost {fqn}"
    yield from (f"{bucket} gained {fqn}" for fqn, _ in gained if fqn not in dict(lost))


def _pair(member: str) -> tuple[str, str]:
    match = _MEMBER.match(member)
    return (match["fqn"], match["size"]) if match else (member, "")


def _event_words(a: _Read, b: _Read) -> Iterator[str]:
    for direction in ("forward", "backward"):
        old, new = _numbered(a.events[direction]), _numbered(b.events[direction])
        here, there = set(new), set(old)
        kept = [event for event in old if event in here]
        other = [event for event in new if event in there]
        yield from (f"{direction}: {event} is gone" for event in old if event not in here and _known(event, b, direction))
        yield from (f"{direction}: {event} is new" for event in new if event not in there and _known(event, a, direction))
        matcher = SequenceMatcher(None, kept, other, autojunk=False)
        still = {event for block in matcher.get_matching_blocks() for event in kept[block.a : block.a + block.size]}
        for event in [event for event in other if event not in still]:
            yield _moved(event, kept, other, direction)


def _known(event: str, other: _Read, direction: str) -> bool:
    """Whether the event is of a bucket that the other schedule has too, so that no line on buckets says it."""
    what, _, label = event.partition(" ")
    return what != "compute" and f"{direction} {label}" in other.buckets


def _moved(event: str, old: list[str], new: list[str], direction: str) -> str:
    before_old, before_new = set(old[: old.index(event)]), set(new[: new.index(event)])
    passed = [other for other in old if other in before_new and other not in before_old]
    jumped = [other for other in old if other in before_old and other not in before_new]
    way, over = ("later", passed) if len(passed) >= len(jumped) else ("earlier", jumped)
    past = f" past {over[-1] if way == 'later' else over[0]}" if over else ""
    return f"{direction}: {event} moved {way}{past}"


def _numbered(events: Sequence[str]) -> list[str]:
    """Events made distinct: the second of a name gets ``(2)``."""
    seen: dict[str, int] = {}
    out = []
    for event in events:
        seen[event] = seen.get(event, 0) + 1
        out.append(event if seen[event] == 1 else f"{event} ({seen[event]})")
    return out


def _count(members: Sequence[str]) -> str:
    return f"{len(members)} member{'s' * (len(members) != 1)}"
