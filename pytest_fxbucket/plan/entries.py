"""The entries of a bucket plan as text: ``"layers.[0-3]"``, ``"norm+output"``, ``["norm", "output"]``."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import Metadata, Rule, wrong
from pytest_fxbucket.words import show

# At most 18 digits, since ``len`` of Python's ranges ends at 2**63.
_RANGE = re.compile(r"\[(0|[1-9]\d{0,17})-(0|[1-9]\d{0,17})\]")
_LETTERS = re.compile(r"([^\[\]]*)\[([A-Za-z]{1,8})\]([^\[\]]*)")
_MOST_ENTRIES = 100_000  # a slip of the keyboard ("[0-99999999]") should not eat the memory
_EXPECTS = 'a list of entries such as ["embed", "layers.[0-3]", "norm+output"]'


@dataclass(frozen=True, slots=True)
class Entry:
    """The parameters that a plan puts in one bucket: the entry's text with ranges written out, and its FQNs or patterns."""

    name: str
    selectors: tuple[str, ...]


def parse_entries(raw: object, where: str) -> tuple[Entry, ...]:
    """Read the list of entries of a plan.

    ``raw`` is a list of strings and of lists of strings (an inner list is the same as ``+``). A range gives an entry
    for each number, both ends in, unless ``+`` holds it in one entry. ``*`` is kept, since it needs the model. Raises
    PlanError beginning with ``where``.
    """
    if not isinstance(raw, list | tuple):
        raise wrong(where, _EXPECTS, raw)
    entries: list[Entry] = []
    for item in raw:
        entries.extend(_entries_of(item, where))
        if len(entries) > _MOST_ENTRIES:
            raise PlanError(f"{where} has more than {_MOST_ENTRIES} entries after its ranges are written out")
    return tuple(entries)


def entry_list(doc: str) -> Metadata:
    """Make the rule of a key that holds entries."""
    return {"rule": Rule(doc, _EXPECTS, parse_entries)}


def _entries_of(item: object, where: str) -> list[Entry]:
    # A range makes an entry of each number; within ``+`` its numbers are selectors of the one entry.
    parts = _parts(item, where)
    name = "+".join(parts)
    spelled = [_spell_out(part, f'{where}: entry "{name}"') for part in parts]
    if len(parts) == 1:
        return [Entry(text, (text,)) for text in spelled[0]]
    selectors = tuple(itertools.chain.from_iterable(spelled))
    for selector, times in Counter(selectors).items():
        if times > 1:
            raise PlanError(f'{where}: entry "{name}" names "{selector}" twice; name it once')
    return [Entry(name, selectors)]


def _parts(item: object, where: str) -> list[str]:
    if isinstance(item, list | tuple):
        if not item:
            raise PlanError(f"{where} has an empty list as an entry; name a module or parameter in it, or take it out")
        inner = [part for part in item if not isinstance(part, str)]
        if inner:
            raise PlanError(f"{where} has {show(inner[0])} in an inner list, which may hold strings only")
        return [part for text in item for part in _split(text, where)]
    if not isinstance(item, str):
        raise PlanError(f"{where} has {show(item)} as an entry; an entry is the name of a module or parameter in quotes")
    return _split(item, where)


def _split(text: str, where: str) -> list[str]:
    parts = [part.strip() for part in text.split("+")]
    if not text.strip():
        raise PlanError(f"{where} has an empty entry; name a module or parameter, or take it out")
    for part in parts:
        if not part:
            raise PlanError(f'{where}: entry "{text}" has nothing on one side of a +')
        if not all(part.split(".")) or any(char.isspace() for char in part):
            raise PlanError(f'{where}: entry "{text}" is no name; write the parts with single dots, as in "layers.0"')
    return parts


def _spell_out(text: str, where: str) -> list[str]:
    # Names are counted before any is made: a range is kept as Python's, which costs nothing however long it is.
    choices = [_choices(component, where) for component in text.split(".")]
    total = math.prod(len(numbers) for numbers in choices)
    if total > _MOST_ENTRIES:
        raise PlanError(f"{where} stands for {total} names, more than {_MOST_ENTRIES}; mind its range")
    return [".".join(map(str, path)) for path in itertools.product(*choices)]


def _choices(component: str, where: str) -> Sequence[str | int]:
    if "*" in component and component != "*":
        raise PlanError(f'{where} has a * within a name; it stands for a whole one, as in "layers.*", so name each module')
    if "[" not in component and "]" not in component:
        return [component]
    # Letters in brackets would be a set of characters, as in a shell's pattern: the error writes the names out.
    found = _RANGE.fullmatch(component)
    if found is None and (letters := _LETTERS.fullmatch(component)):
        each = [f'"{letters[1]}{letter}{letters[3]}"' for letter in letters[2]]
        raise PlanError(f'{where} has "{component}", and brackets hold numbers; name each: {", ".join(each)}')
    if found is None:
        raise PlanError(f'{where} has "{component}", which is no range; write both ends between dots, as in "layers.[0-3]"')
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise PlanError(f'{where} has a range that runs backwards, "{component}"; write "[{last}-{first}]"')
    return range(first, last + 1)
