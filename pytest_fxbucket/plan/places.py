"""Places by hand: ``launch_at`` and ``wait_before`` name pairs of entries, for each direction. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import Metadata, Rule, wrong
from pytest_fxbucket.units import nearest, show

DIRECTIONS = ("forward", "backward")

Places = Mapping[str, Mapping[str, str]]
"""By direction: the entry that is launched or waited for, to the entry whose compute starts then."""


def places(doc: str) -> Metadata:
    """Take a table of entry = entry for each direction, as dicts; directions without a pair are left out."""
    expects = 'a table such as { forward = { "layers.3" = "layers.1" } }'

    def read(value: object, where: str) -> object:
        if not isinstance(value, Mapping):
            raise wrong(where, expects, value)
        for direction in value:
            if direction not in DIRECTIONS:
                raise PlanError(f'{where} has no key "{direction}"{nearest(str(direction), list(DIRECTIONS))}')
        found = {direction: _pairs(value[direction], f"{where}.{direction}") for direction in DIRECTIONS if direction in value}
        return {direction: pairs for direction, pairs in found.items() if pairs}

    return {"rule": Rule(doc, expects, read)}


def _pairs(raw: object, where: str) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise wrong(where, "a table of entry = entry", raw)
    pairs: dict[str, str] = {}
    for entry, other in raw.items():
        if isinstance(other, Mapping):
            inner = next(iter(other), "0")
            raise PlanError(
                f'{where} has a table at {entry}; write an entry with dots in quotes, as in "{entry}.{inner}" = ...'
            )
        for name in (entry, other):
            if not isinstance(name, str) or not name.strip():
                raise PlanError(f"{where} has {show(name)} in the pair of {show(entry)}; write entry = entry, each in quotes")
        pairs[entry] = other
    return pairs


def refuse_wrong_places(key: str, by_direction: Places, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for pairs that name no entry of ``entries``, or that form a circle.

    ``key`` is ``launch_at`` or ``wait_before``. Whether a place can be had in a graph is for the pass to tell.
    """
    for direction, pairs in by_direction.items():
        inside = f"{where}: [overlap] {key}.{direction}"
        for entry, other in pairs.items():
            for name in (entry, other):
                if name not in entries:
                    raise PlanError(f'{inside}: "{entry}" = "{other}" names no bucket: {_no_entry(name, entries)}')
        circle = _circle(pairs)
        if circle:
            raise PlanError(f"{inside}: {_says(circle)}")


def _no_entry(name: str, entries: Sequence[str]) -> str:
    """Say that ``name`` is no entry, and which one is meant."""
    holders = [entry for entry in entries if any(name == part or name.startswith(f"{part}.") for part in entry.split("+"))]
    if holders:
        return f'"{name}" is within the entry "{holders[0]}"; name that'
    close = get_close_matches(name, entries, n=1, cutoff=0.6)
    if close:
        return f'there is no entry "{name}"; did you mean "{close[0]}"?'
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    return f'there is no entry "{name}"; entries are {", ".join(entries[:6])}{more}'


def _circle(pairs: Mapping[str, str]) -> list[str]:
    """Entries of which each is placed at the next one and the last at the first; empty if there are none.

    Every entry is placed at one other at most, so a walk from it either ends or comes back.
    """
    done: set[str] = set()
    for start in pairs:
        walk: list[str] = []
        entry: str | None = start
        while entry is not None and entry not in done:
            done.add(entry)
            walk.append(entry)
            entry = pairs.get(entry)
        if entry in walk:
            return walk[walk.index(entry) :]
    return []


def _says(circle: Sequence[str]) -> str:
    if len(circle) == 1:
        return f'"{circle[0]}" is placed at itself; name the entry whose compute is to hide it'
    ring = " -> ".join([*circle, circle[0]])
    return f"the pairs form a circle, {ring}; each would have to come before the next, so take one out"
