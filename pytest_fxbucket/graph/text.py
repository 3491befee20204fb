"""A schedule as text that a person can review and a machine can read back.

One line an event, in order; then each bucket's members in byte order. No node name, rank, process group name, path or address.
Layers that are alike fold into one block: ``repeat 30 times, i = 1 ... 30`` with ``layers.{i}`` and ``layers.{i+1}`` in it;
``i = 0, 2 ... 60`` counts by two. A number that stays the same in all of them, as in ``layers.{i}.mlp.0``, stays a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pytest_fxbucket.graph.schedule import NamedBucket, Schedule

_INDEX = re.compile(r"(?<=\.)(0|[1-9][0-9]*)(?=[.:+\s]|$)")
_PLACE = re.compile(r"\{i([+-]\d+)?\}")
_REPEAT = re.compile(r"^( *)repeat (\d+) times, i = (\d+)(?:, (\d+))? \.\.\. (\d+)$")
_LONGEST_BLOCK = 200
_FEWEST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class _Line:
    """A line cut at its layer indices: words[0] numbers[0] words[1] ..."""

    words: tuple[str, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Repetition:
    """Blocks of lines that are alike but for indices that count by ``step``."""

    length: int
    times: int
    moves: tuple[tuple[int, ...], ...]
    """For each index of each line of a block, what it counts by: 0 or ``step``."""
    first: int
    step: int


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
    cut = [_cut(line) for line in lines]
    at = 0
    while at < len(lines):
        found = _repetition(cut, at)
        if found is None:
            out.append(lines[at])
            at += 1
            continue
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        second = f", {found.first + found.step}" if abs(found.step) != 1 else ""
        last = found.first + (found.times - 1) * found.step
        out.append(f"{indent}repeat {found.times} times, i = {found.first}{second} ... {last}")
        out += [
            f"  {_relative(line, moves, found.first)}"
            for line, moves in zip(cut[at : at + found.length], found.moves, strict=True)
        ]
        out.append(f"{indent}end")
        at += found.length * found.times
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
        first, last = int(match[3]), int(match[5])
        step = int(match[4]) - first if match[4] else 1 if last >= first else -1
        for index in range(first, last + (1 if step > 0 else -1), step or 1):
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
    for fqn, size in bucket.members:
        yield f"    {fqn} {size}"


def _repetition(lines: Sequence[_Line], at: int) -> _Repetition | None:
    """The repetition at ``at`` that saves most lines, or None."""
    best: _Repetition | None = None
    saved = 0
    for length in range(1, min(_LONGEST_BLOCK, (len(lines) - at) // _FEWEST_REPEATS) + 1):
        if best is not None and length % best.length == 0 and 2 * length <= best.length * best.times:
            continue  # larger blocks of the same repetition end where it ends, and save less
        found = _repeats(lines, at, length)
        if found is not None and (found.times - 1) * length > saved:
            saved, best = (found.times - 1) * length, found
    return best


def _repeats(lines: Sequence[_Line], at: int, length: int) -> _Repetition | None:
    """Blocks of ``length`` from ``at`` on that are alike but for indices that count alike, if there are enough of them."""
    moves = _moves(lines, at, length)
    steps = {move for line in moves or () for move in line if move}
    if moves is None or len(steps) != 1:
        return None
    times = 2
    while _moves(lines, at + (times - 1) * length, length) == moves:
        times += 1
    if times < _FEWEST_REPEATS:
        return None
    first = next(
        number
        for line, counted in zip(lines[at : at + length], moves, strict=True)
        for number, move in zip(line.numbers, counted, strict=True)
        if move
    )
    return _Repetition(length, times, moves, first, steps.pop())


def _moves(lines: Sequence[_Line], at: int, length: int) -> tuple[tuple[int, ...], ...] | None:
    """What each index of the block at ``at`` counts by to the next block; None if more than indices differs."""
    if at + 2 * length > len(lines) or lines[at].words != lines[at + length].words:
        return None
    found = []
    for here, there in zip(lines[at : at + length], lines[at + length : at + 2 * length], strict=True):
        if here.words != there.words:
            return None
        found.append(tuple(y - x for x, y in zip(here.numbers, there.numbers, strict=True)))
    return tuple(found)


def _cut(line: str) -> _Line:
    parts = _INDEX.split(line)
    return _Line(tuple(parts[::2]), tuple(map(int, parts[1::2])))


def _relative(line: _Line, moves: Sequence[int], first: int) -> str:
    places = [_place(number - first) if move else str(number) for number, move in zip(line.numbers, moves, strict=True)]
    return "".join(word + place for word, place in zip(line.words, [*places, ""], strict=True))


def _written_out(index: int, place: re.Match[str]) -> str:
    return str(index + int(place[1] or 0))


def _place(offset: int) -> str:
    return "{i}" if offset == 0 else f"{{i{offset:+d}}}"
