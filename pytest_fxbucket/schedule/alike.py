"""Blocks of lines that are alike but for one index, wherever they stand: written once, with the indices that they have.

``layers.{i}, i = 0 ... 59, 61 ... 125`` stands over what those layers have in common, and layer 60 has a block of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from pytest_fxbucket.schedule.folding import INDEX, numbers_of, place_text, ranges_text, written_out

Block = tuple[str, ...]
"""Lines; the first is a heading, a name with indices in it or without."""

_HEADING = re.compile(r"^(.*), i = ([^,].*)$")


def fold_alike(blocks: Sequence[Block]) -> list[Block]:
    """``blocks`` with those that are alike as one, where the first of them stood."""
    relative = [dict(_relatives(block)) for block in blocks]
    often = Counter(text for one in relative for text in one)
    groups: dict[tuple[Block, bool], list[int]] = {}
    for block, one in zip(blocks, relative, strict=True):
        best = max(one, key=lambda text: often[text], default=None)
        if best is None or often[best] == 1:
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
    if len(numbers) == 1:
        return tuple(written_out(block, numbers[0]))
    return (f"{block[0]}, i = {ranges_text(sorted(numbers))}", *block[1:])


def _relatives(block: Block) -> Iterator[tuple[Block, int]]:
    """(``block`` with one of its heading's indices called i, that index): i itself, and those that are some more or less.

    None of a block that has braces of its own.
    """
    if any("{i" in line for line in block):
        return
    for index in INDEX.finditer(block[0]):
        stem = re.split(r"[+\s]", block[0][: index.start()])[-1]
        number = int(index[0])
        for any_index in (index[0], r"(?:0|[1-9][0-9]*)"):
            name = r"(?<![\w.])" + re.escape(stem) + f"({any_index})"
            every = re.compile(name + r"(?=[.:+;,)\s]|$)")
            # without a stem, a number behind a member is its size
            inside = every if stem else re.compile(name + r"(?=\.)")
            place = partial(_place, stem, number)
            yield (every.sub(place, block[0]), *(inside.sub(place, line) for line in block[1:])), number


def _place(stem: str, number: int, found: re.Match[str]) -> str:
    return stem + place_text(int(found[1]) - number)
