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
        yield from (f"{name} lost {member.split()[0]}" for member in old_members if member not in new_members)
        yield from (f"{name} gained {member.split()[0]}" for member in new_members if member not in old_members)
        if sorted(old_members) == sorted(new_members) and old_members != new_members:
            at = next(i for i, (x, y) in enumerate(zip(old_members, new_members, strict=True)) if x != y)
            yield (
                f"byte layout of {name} changed: {new_members[at].split()[0]} stands where {old_members[at].split()[0]} stood"
            )


def _event_words(a: _Read, b: _Read) -> Iterator[str]:
    for direction in ("forward", "backward"):
        old, new = _numbered(a.events[direction]), _numbered(b.events[direction])
        kept = [event for event in old if event in set(new)]
        other = [event for event in new if event in set(old)]
        matcher = SequenceMatcher(None, kept, other, autojunk=False)
        still = {event for block in matcher.get_matching_blocks() for event in kept[block.a : block.a + block.size]}
        for event in [event for event in other if event not in still]:
            yield _moved(event, kept, other, direction)


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
