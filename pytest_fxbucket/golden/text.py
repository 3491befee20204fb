"""A schedule as text that a person reviews and a machine reads back. Lines that repeat but for a layer's index are one block.

``repeat 30 times, i = 1 ... 30`` stands over a block with ``layers.{i}`` and ``layers.{i+1}`` in it; ``0 ... 60 by 2`` counts
by two, ``30 ... 1`` down. A number that stays the same in all of them, as in ``layers.{i}.mlp.0``, stays a number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pytest_fxbucket.golden.schedule import PADDING, NamedBucket, Schedule, in_order
from pytest_fxbucket.words import plural

if TYPE_CHECKING:
    from pytest_fxbucket.step.roles import MeshDim

INDEX = re.compile(
    # Python looks behind for texts of one length only: so kinds are there by their last letters, and ``update`` also with the
    # blank that fills its column.
    # in a name (layers.0, layer_0, block0), a whole name (where it is launched or computed), or a name's first part (0.weight)
    r"(?:(?<=[._A-Za-z])|(?<=gather |catter |reduce |ompute |update |pdate  |to_all |adcast )|^|(?<=[ +])(?=[0-9]+\.))"
    r"(0|[1-9][0-9]*)(?=[.:+;,)\s]|$)"
)
"""A number that may count layers."""
_REPEAT = re.compile(r"^( *)repeat \d+ times, (\w) = (.+)$")
_RANGE = re.compile(r"(\d+)(?: \.\.\. (\d+)(?: by (\d+))?)?")
_LONGEST_BLOCK = 200
_FEWEST_REPEATS = 3
_FRAME = 2
"""Lines around a block: its heading and its end. Folding must save more than these."""


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
    """For each index of each line of a block, how much it grows from block to block: 0 or ``step``."""
    first: int
    step: int


def fold(lines: Sequence[str], letter: str = "i") -> list[str]:
    """Replace blocks that repeat but for a counting index, called ``letter``, by one; :func:`unfold` gives the lines back."""
    # Greedy, from the top: at each line the repetition that saves most lines is taken whole, and the walk goes on behind it.
    out: list[str] = []
    cut = [_cut(line, at) for at, line in enumerate(lines)]
    at = 0
    while at < len(lines):
        found = _repetition(cut, at)
        if found is None:
            out.append(lines[at])
            at += 1
            continue
        at, found = _from_launch(lines, cut, at, found, out)
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        numbers = range(found.first, found.first + found.times * found.step, found.step)
        out.append(f"{indent}repeat {found.times} times, {letter} = {ranges_text(numbers)}")
        out += [
            f"  {_relative(line, moves, found.first, letter)}"
            for line, moves in zip(cut[at : at + found.length], found.moves, strict=True)
        ]
        out.append(f"{indent}end")
        at += found.length * found.times
    return out


def _from_launch(
    lines: Sequence[str], cut: Sequence[_Line], at: int, found: _Repetition, out: list[str]
) -> tuple[int, _Repetition]:
    """The repetition ``found`` turned so that its block begins with its first launch; lines before that go to ``out``.

    A repetition can be cut into blocks at any of its lines: turned, the same layers give the same block whatever precedes them.
    """
    first = next((i for i in range(at, at + found.length) if lines[i].lstrip().startswith("launch ")), at)
    turned = _repeats(cut, first, found.length)
    # From a later line on the last block is not whole any more, and those that are left may be too few.
    if turned is None:
        return at, found
    out += lines[at:first]
    return first, turned


def unfold(lines: Sequence[str]) -> list[str]:
    """``lines`` with every ``repeat`` block written out."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        match = _REPEAT.match(lines[at])
        if match is None:
            out.append(lines[at])
            at += 1
            continue
        end = next((i for i in range(at, len(lines)) if lines[i] == match[1] + "end"), len(lines))
        block = [line[2:] for line in lines[at + 1 : end]]
        for number in numbers_of(match[3]):
            out += written_out(block, number, match[2])
        at = end + 1
    return out


def written_out(lines: Sequence[str], number: int, letter: str = "i") -> list[str]:
    """``lines`` with ``{i}``, ``{i+1}`` and so on as numbers, where i is ``number``."""
    place = re.compile(r"\{" + letter + r"([+-]\d+)?\}")
    return [place.sub(lambda found: str(number + int(found[1] or 0)), line) for line in lines]


def place_text(offset: int, letter: str = "i") -> str:
    """``{i}``, ``{i+1}``, ``{i-1}``."""
    return f"{{{letter}}}" if offset == 0 else f"{{{letter}{offset:+d}}}"


def ranges_text(numbers: Sequence[int]) -> str:
    """``numbers``, in their order, as ``0 ... 59, 61 ... 125``; three or more that are evenly spaced are one range."""
    return ", ".join(_ranges(numbers))


def numbers_of(text: str) -> list[int]:
    """The numbers that :func:`ranges_text` wrote."""
    found: list[int] = []
    for first, last, by in _RANGE.findall(text):
        end, step = int(last or first), int(by or 1)
        found += range(int(first), end + 1, step) if end >= int(first) else range(int(first), end - 1, -step)
    return found


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    at = 0
    while at < len(numbers):
        end, step = at + 1, numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 0
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if step and end - at >= _FEWEST_REPEATS:
            yield f"{numbers[at]} ... {numbers[end - 1]}" + (f" by {abs(step)}" if abs(step) != 1 else "")
            at = end
        else:
            yield str(numbers[at])
            at += 1


def _repetition(lines: Sequence[_Line], at: int) -> _Repetition | None:
    """The repetition at ``at`` that saves most lines, or None."""
    best: _Repetition | None = None
    saved = _FRAME
    for length in range(1, min(_LONGEST_BLOCK, (len(lines) - at) // _FEWEST_REPEATS) + 1):
        if best is not None and length % best.length == 0 and 2 * length <= best.length * best.times:
            continue  # larger blocks of the same repetition end where it ends, and save less
        found = _repeats(lines, at, length)
        if found is not None and (found.times - 1) * length > saved:
            saved, best = (found.times - 1) * length, found
    return best


def _repeats(lines: Sequence[_Line], at: int, length: int) -> _Repetition | None:
    """The repetition of blocks of ``length`` lines from ``at`` on, whose indices stay or grow by one step; None if short."""
    moves = _moves(lines, at, length)
    steps = {move for line in moves or () for move in line if move}
    if moves is None or len(steps) != 1:
        return None
    # Two blocks are alike by now. Those that follow must grow in the same way.
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
    """How much each index of the block at ``at`` grows to the next block; None if the blocks differ in more than indices."""
    # The first line is compared first: blocks of each length are tried at each line, and most differ there already.
    if at + 2 * length > len(lines) or lines[at].words != lines[at + length].words:
        return None
    found = []
    for here, there in zip(lines[at : at + length], lines[at + length : at + 2 * length], strict=True):
        if here.words != there.words:
            return None
        found.append(tuple(y - x for x, y in zip(here.numbers, there.numbers, strict=True)))
    return tuple(found)


def _cut(line: str, at: int) -> _Line:
    """``line`` cut at its indices. One with braces of its own is made like no other, or :func:`unfold` would fill them in."""
    if "{" in line:
        return _Line((line, f"line {at}"), ())
    parts = INDEX.split(line)
    return _Line(tuple(parts[::2]), tuple(map(int, parts[1::2])))


def _relative(line: _Line, moves: Sequence[int], first: int, letter: str) -> str:
    places = [
        place_text(number - first, letter) if move else str(number) for number, move in zip(line.numbers, moves, strict=True)
    ]
    return "".join(word + place for word, place in zip(line.words, [*places, ""], strict=True))


# Blocks of lines that are alike but for one index, wherever they stand: written once, with a list of their indices.
#
# ``layers.{i}, i = 0 ... 59, 61 ... 125`` stands over what those layers have in common, and layer 60 has a block of its own.
# Each block is written in several ways, relative to each index of its heading, and goes with the text that most blocks share.


Block = tuple[str, ...]
"""Lines; the first is a heading, a name with indices in it or without."""

_HEADING = re.compile(r"^(.*), i = ([^,].*)$")


def fold_alike(blocks: Sequence[Block]) -> list[Block]:
    """``blocks`` with each group of blocks that are alike as one, at the place of its first."""
    relative = [dict(_relatives(block)) for block in blocks]
    often = Counter(text for one in relative for text in one)
    groups: dict[tuple[Block, bool], list[int]] = {}
    for block, one in zip(blocks, relative, strict=True):
        best = max(one, key=lambda text: often[text], default=None)
        if best is None or often[best] == 1:
            # The flag parts a block that has braces of its own from a relative text that reads like it.
            groups[block, False] = []
        else:
            groups.setdefault((best, True), []).append(one[best])
    return [_headed(block, numbers) for (block, _), numbers in groups.items()]


def unfold_alike(block: Block) -> list[Block]:
    """The blocks that one block of :func:`fold_alike` stands for."""
    match = _HEADING.match(block[0])
    if match is None:
        return [block]
    lines = (match[1], *block[1:])
    return [tuple(written_out(lines, number)) for number in numbers_of(match[2])]


def _headed(block: Block, numbers: Sequence[int]) -> Block:
    if not numbers:
        return block
    # The blocks that shared this text went with others that more blocks share.
    if len(numbers) == 1:
        return tuple(written_out(block, numbers[0]))
    return (f"{block[0]}, i = {ranges_text(sorted(numbers))}", *block[1:])


def _relatives(block: Block) -> Iterator[tuple[Block, int]]:
    """(``block`` written relative to one of its heading's indices, that index), for each index in two ways.

    In the first way only that number behind the same stem becomes ``{i}``; in the second every number behind the stem becomes
    ``{i}``, ``{i+1}`` and so on. A block that has braces of its own yields nothing.
    """
    if any("{i" in line for line in block):
        return
    for index in INDEX.finditer(block[0]):
        stem = re.split(r"[+\s]", block[0][: index.start()])[-1]
        number = int(index[0])
        for any_index in (index[0], r"(?:0|[1-9][0-9]*)"):
            name = r"(?<![\w.])" + re.escape(stem) + f"({any_index})"
            every = re.compile(name + r"(?=[.:+;,)\s]|$)")
            # Without a stem any number would match; in a member's line, the number behind the name is its size.
            inside = every if stem else re.compile(name + r"(?=\.)")
            place = partial(_place, stem, number)
            yield (every.sub(place, block[0]), *(inside.sub(place, line) for line in block[1:])), number


def _place(stem: str, number: int, found: re.Match[str]) -> str:
    return stem + place_text(int(found[1]) - number)


# A schedule as text that a person can review and a machine can read back.
#
# First a line for each event, in order, by direction and microbatch; then the members of each entry's launches, in byte order.
# Members are listed once, below, and not with each event, so that a change of them is a change in one place. The text has no
# name of a node or process group, no rank, path or address. Layers that are alike are folded.


def schedule_lines(schedule: Schedule, *, folded: bool = True) -> list[str]:
    """Lines of the whole schedule; layers that are alike are folded unless ``folded`` is false."""
    lines: list[str] = []
    for section in in_order(event.section for event in schedule.events):
        events = [f"  {event.what:7} {event.label}" for event in schedule.events if event.section == section]
        lines += [section, *(fold(events) if folded else events), ""]
    by_entry: dict[str, list[NamedBucket]] = {}
    for bucket in schedule.buckets:
        by_entry.setdefault(bucket.entry, []).append(bucket)
    blocks = [(entry, *_entry_lines(buckets, folded)) for entry, buckets in by_entry.items()]
    return [*lines, "buckets", *(f"  {line}" for block in (fold_alike(blocks) if folded else blocks) for line in block)]


def _entry_lines(buckets: Sequence[NamedBucket], folded: bool) -> Iterator[str]:
    """A line for each bucket; buckets in a row with equal members have these once, below the last of them."""
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        yield f"  {_bucket_line(bucket)}"
        if following is None or following.members != bucket.members:
            members = [f"    {fqn} {size}" for fqn, size in bucket.members]
            yield from fold(members, "j") if folded else members


def _bucket_line(bucket: NamedBucket) -> str:
    number = f" #{bucket.number}" if bucket.number > 1 else ""
    op = f"{bucket.op} over " if bucket.op else ""
    count = sum(fqn != PADDING for fqn, _ in bucket.members)
    return (
        f"{bucket.direction} {bucket.kind}{number}: {count} {plural('member', count)}, {bucket.dtype}, "
        f"{bucket.bytes} bytes, {op}{bucket.dims}"
    )


def golden_text(plan: str, mesh: Sequence[MeshDim], schedules: Mapping[str, Schedule], stages: Sequence[str] = ()) -> str:
    """Body of the golden of ``plan``; ``schedules`` by phase of the step, ``stages`` lines of its pipeline.

    An empty name or mesh is left out.
    """
    lines = [f"plan {plan}"] if plan else []
    lines += ["mesh " + " ".join(f"{dim.name}={dim.size}" for dim in mesh)] if mesh else []
    lines += stages
    for phase, schedule in schedules.items():
        lines += ["", f"graph {phase}", "", *schedule_lines(schedule)]
    return "\n".join(lines).strip() + "\n"
