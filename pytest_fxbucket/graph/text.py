"""A schedule as text that a person can review and a machine can read back.

One line an event, in order; then each bucket's members in byte order. No node name, rank, process group name, path or address.
Layers that are alike fold into one block: ``repeat 30 times, i = 1 ... 30`` with ``layers.{i}`` and ``layers.{i+1}`` in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from pytest_fxbucket.graph.schedule import NamedBucket, Schedule

_INDEX = re.compile(r"(?<=\.)\d+(?=[.:\s]|$)")
_PLACE = re.compile(r"\{i([+-]\d+)?\}")
_REPEAT = re.compile(r"^( *)repeat (\d+) times, i = (\d+) \.\.\. (\d+)$")
_LONGEST_BLOCK = 200
_FEWEST_REPEATS = 3


def schedule_lines(schedule: Schedule, *, folded: bool = True) -> list[str]:
    """Lines of the whole schedule; equal layers folded unless asked otherwise."""
    lines: list[str] = []
    for direction in ("forward", "backward"):
        events = [f"  {event.what:7} {event.label}" for event in schedule.events if event.direction == direction]
        if events:
            lines += [direction, *(fold(events) if folded else events), ""]
    lines.append("buckets")
    members = [line for bucket in schedule.buckets for line in _bucket_lines(bucket)]
    lines += fold(members) if folded else members
    return lines


def fold(lines: Sequence[str]) -> list[str]:
    """Replace blocks that repeat but for a counting layer index by one block; :func:`unfold` gives the lines back."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        found = _repetition(lines, at)
        if found is None:
            out.append(lines[at])
            at += 1
            continue
        length, times, first, last = found
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        out.append(f"{indent}repeat {times} times, i = {first} ... {last}")
        out += [f"  {line}" for line in _relative(lines[at : at + length], first)]
        out.append(f"{indent}end")
        at += length * times
    return out


def unfold(lines: Sequence[str]) -> list[str]:
    """Lines with every ``repeat`` block written out."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        match = _REPEAT.match(lines[at])
        if match is None:
            out.append(lines[at])
            at += 1
            continue
        end = next((i for i in range(at, len(lines)) if lines[i] == match[1] + "end"), len(lines))
        first, last = int(match[3]), int(match[4])
        for index in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1):
            out += [_PLACE.sub(partial(_written_out, index), line[2:]) for line in lines[at + 1 : end]]
        at = end + 1
    return out


def _bucket_lines(bucket: NamedBucket) -> Iterator[str]:
    op = f" {bucket.op}" if bucket.op else ""
    count = len(bucket.members)
    yield (
        f"  {bucket.direction} {bucket.label}: {count} member{'s' * (count != 1)}, {bucket.dtype}, "
        f"{bucket.bytes} bytes, {bucket.dims}{op}"
    )
    for fqn, numel in bucket.members:
        yield f"    {fqn} {numel}"


def _repetition(lines: Sequence[str], at: int) -> tuple[int, int, int, int] | None:
    """(block length, times, first index, last index) of the repetition at ``at`` that saves most lines, or None."""
    best: tuple[int, int, int, int] | None = None
    saved = 0
    for length in range(1, min(_LONGEST_BLOCK, (len(lines) - at) // _FEWEST_REPEATS) + 1):
        found = _repeats(lines, at, length)
        if found is not None and (found[0] - 1) * length > saved:
            saved, best = (found[0] - 1) * length, (length, *found)
    return best


def _repeats(lines: Sequence[str], at: int, length: int) -> tuple[int, int, int] | None:
    """(times, first index, last index) of blocks of ``length`` that are alike but for an index counting up or down by one."""
    first = _first_index(lines[at : at + length])
    second = _first_index(lines[at + length : at + 2 * length])
    if first is None or second is None or abs(second - first) != 1:
        return None
    block, step, times = _relative(lines[at : at + length], first), second - first, 1
    while True:
        start = at + times * length
        if start + length > len(lines) or _relative(lines[start : start + length], first + times * step) != block:
            break
        times += 1
    return (times, first, first + (times - 1) * step) if times >= _FEWEST_REPEATS else None


def _first_index(lines: Sequence[str]) -> int | None:
    match = next((found for line in lines if (found := _INDEX.search(line))), None)
    return int(match[0]) if match else None


def _relative(lines: Sequence[str], index: int) -> list[str]:
    return [_INDEX.sub(lambda m: _place(int(m[0]) - index), line) for line in lines]


def _written_out(index: int, place: re.Match[str]) -> str:
    return str(index + int(place[1] or 0))


def _place(offset: int) -> str:
    return "{i}" if offset == 0 else f"{{i{offset:+d}}}"
