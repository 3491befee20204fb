"""Entries of a bucket plan: written out, merged and split. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from pytest_fxbucket.plan.entries import Entry, parse_entries
from pytest_fxbucket.plan.schema import Plan

_NUMBERED = re.compile(r"(.+)\.(\d+)")
_PATTERN = re.compile(r"(^|\.)\*(\.|$)")
_NO_NUMBER = ("", -1)


def together(entries: Sequence[Entry]) -> Entry:
    """One entry with the selectors of all ``entries``."""
    # Read as a plan file is read, so that the entry equals the one that the proposed file will give.
    (one,) = parse_entries(["+".join(name for entry in entries for name in entry.selectors)], "a merged entry")
    return one


def apart(entry: Entry) -> list[Entry]:
    """An entry for each selector of ``entry``."""
    return list(parse_entries(list(entry.selectors), "a parted entry"))


def written_out(plan: Plan, names: Sequence[str]) -> list[Entry]:
    """The entries of ``plan`` with stars expanded; ``names`` are the names of all entries on the model, in the plan's order."""
    # The last name is the root's if the plan leaves unplanned parameters to it: the plan file does not list that entry.
    own = names[:-1] if names and names[-1] == plan.bucket.root else names
    # A name that the plan does not list came from a star, so it is that of a single module.
    known = {entry.name: entry for entry in plan.bucket.plan}
    return [known.get(name) or Entry(name, (name,)) for name in own]


def with_stars(plan: Plan, before: Sequence[Entry], after: Sequence[Entry]) -> tuple[Entry, ...]:
    """``after``, with stars of ``plan`` put back for entries that are unchanged since ``before``; both have stars expanded."""
    # A star can stand again only if all its entries are still there, unchanged, next to each other and in order.
    known = {entry.name for entry in plan.bucket.plan}
    places = {entry: place for place, entry in enumerate(after)}
    found, star_at = dict(enumerate(after)), dict[int, Entry]()
    for star in (entry for entry in plan.bucket.plan if is_star(entry)):
        own = [entry for entry in before if entry.name not in known and _stands_for(star, entry)]
        at = [places.get(entry, -1) for entry in own]  # -1: changed or gone
        if own and at == list(range(at[0], at[0] + len(own))) and at[0] >= 0:
            star_at[at[0]] = star
            for place in at:
                found.pop(place, None)
    return tuple((found | star_at)[place] for place in sorted(found | star_at))


def is_star(entry: Entry) -> bool:
    """Whether ``entry`` has a ``*``, and so stands for one entry for each module that it names."""
    return len(entry.selectors) == 1 and bool(_PATTERN.search(entry.name))


def _stands_for(star: Entry, entry: Entry) -> bool:
    pattern, name = star.name.split("."), entry.name.split(".")
    return len(pattern) == len(name) and all(part in ("*", own) for part, own in zip(pattern, name, strict=True))


def runs(entries: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each run of entries with numbered children of one module, as ``layers.0`` and ``layers.1+layers.2``."""
    place = 0
    for stem, group in groupby(entries, key=_stem):
        count = len(list(group))
        if stem:
            yield place, place + count
        place += count


def _stem(entry: Entry) -> str:
    """The module of which ``entry`` holds numbered children, and nothing else; empty if there is none."""
    stems = {found[1] if (found := _NUMBERED.fullmatch(name)) else "" for name in entry.selectors}
    return stems.pop() if len(stems) == 1 else ""


def regrouped(entries: Sequence[Entry], size: int) -> list[Entry]:
    """The selectors of ``entries`` in entries of ``size`` selectors each; the last may have fewer."""
    singles = [single for entry in entries for single in apart(entry)]
    return [together(singles[place : place + size]) for place in range(0, len(singles), size)]


def items_of(entries: Sequence[Entry]) -> list[str]:
    """``entries`` as a plan file lists them: neighbours with consecutive numbers become one range, ``layers.[0-3]``."""
    found: list[str] = []
    begin, last = _NO_NUMBER, _NO_NUMBER
    for entry in entries:
        numbered = _NUMBERED.fullmatch(entry.name) if len(entry.selectors) == 1 else None
        # A number with leading zeros would not be found again from a range.
        now = (numbered[1], int(numbered[2])) if numbered and str(int(numbered[2])) == numbered[2] else _NO_NUMBER
        if now != _NO_NUMBER and now == (last[0], last[1] + 1):
            found[-1] = f"{begin[0]}.[{begin[1]}-{now[1]}]"
        else:
            found.append(entry.name)
            begin = now
        last = now
    return found
