"""The FQN language: from the entries of a plan to the parameters of a model. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry, parse_entries
from pytest_fxbucket.plan.names import Names, no_match, unplanned_parameters
from pytest_fxbucket.words import show, some

__all__ = ["Entry", "Resolution", "ResolvedEntry", "parse_entries", "resolve"]

ROOT = "root"


@dataclass(frozen=True, slots=True)
class ResolvedEntry:
    """An entry and its parameters: canonical FQNs in the order of FSDP2's unit of its modules."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a plan's entries mean on one model.

    ``unplanned`` are the parameters in no entry (empty unless they are allowed), ``notes`` sentences on what a reader
    of the plan may not expect.
    """

    entries: tuple[ResolvedEntry, ...]
    unplanned: tuple[str, ...]
    notes: tuple[str, ...]


def entry_by_parameter(entries: Iterable[ResolvedEntry]) -> dict[str, str]:
    """FQN of each parameter of ``entries`` to its entry's name."""
    return {fqn: entry.name for entry in entries for fqn in entry.parameters}


def resolve(
    entries: Sequence[Entry],
    parameters: Sequence[str],
    modules: Sequence[str],
    *,
    aliases: Mapping[str, str] = {},
    unplanned: str = "error",
    where: str = "",
    what: str = "parameters",
) -> Resolution:
    """Find the parameters of each entry.

    ``parameters`` are canonical FQNs in registration order, ``modules`` every module's FQN, ``aliases`` maps the other
    names of tied parameters to the canonical ones. ``unplanned`` is ``error``, ``allow`` or ``root`` (an entry named
    "root" is added last). ``what`` is what to call ``parameters`` where they are something else. Raises PlanError, beginning
    with ``where``, for an entry that matches nothing or whose parameters another entry has, and for unplanned parameters if
    those are errors.
    """
    names = Names(parameters, modules, aliases, what)
    notes: list[str] = []
    try:
        found = [pair for entry in entries for pair in _expand(entry, names, notes)]
        resolved, owners = _claim(found, names)
        left = tuple(fqn for fqn in parameters if fqn not in owners)
        if left and unplanned == "error":
            raise PlanError(unplanned_parameters(left, [entry.name for entry in resolved]))
        if left and unplanned == ROOT:
            _no_entry_named_root(resolved)
            resolved.append(ResolvedEntry(ROOT, tuple(fqn for fqn in names.in_unit() if fqn not in owners)))
            left = ()
    except PlanError as error:
        raise PlanError(f"{where}: {error}" if where else str(error)) from None
    return Resolution(tuple(resolved), left, tuple(notes))


# Below, an entry in the making is its name, the text it came from, and {parameter as the entry spells it: canonical}.
_Found = tuple[str, str, dict[str, str]]


def _expand(entry: Entry, names: Names, notes: list[str]) -> list[_Found]:
    if len(entry.selectors) == 1:
        return [(fqn, entry.name, held) for fqn, held in _match(entry.selectors[0], entry, names, notes)]
    together: dict[str, str] = {}
    for selector in entry.selectors:
        for _, held in _match(selector, entry, names, notes):
            together.update(held)
    return [(entry.name, entry.name, together)]


def _match(selector: str, entry: Entry, names: Names, notes: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Give each FQN that a selector stands for and what it holds; at least one, or PlanError."""
    if "*" not in selector.split("."):
        held = names.held_by(selector)
        if not held:
            raise PlanError(f'entry "{entry.name}"{no_match(selector, entry.name, names)}')
        return [(selector, held)]
    candidates = _children_of_star(selector, entry, names)
    empty = [fqn for fqn in candidates if not names.held_by(fqn)]
    if len(empty) == len(candidates):
        raise PlanError(f'entry "{entry.name}"{no_match(candidates[0], entry.name, names)}')
    if empty:
        notes.append(f'entry "{entry.name}" leaves out {some(empty)}: no {names.what} there')
    return [(fqn, names.held_by(fqn)) for fqn in candidates if fqn not in empty]


def _children_of_star(selector: str, entry: Entry, names: Names) -> list[str]:
    reached = [""]
    components = selector.split(".")
    for place, component in enumerate(components):
        if component != "*":
            reached = [f"{fqn}.{component}" if fqn else component for fqn in reached]
            continue
        below = [child for fqn in reached for child in names.children(fqn)]
        if not below:
            stem = ".".join(components[:place])
            if "*" not in stem and not names.is_module(stem) and not names.held_by(stem):
                raise PlanError(f'entry "{entry.name}"{no_match(stem, entry.name, names)}')
            raise PlanError(f'entry "{entry.name}" matches nothing: "{stem}" has no child modules')
        reached = below
    return reached


def _claim(found: Sequence[_Found], names: Names) -> tuple[list[ResolvedEntry], dict[str, int]]:
    """Give every parameter its one entry; PlanError if two want it."""
    resolved: list[ResolvedEntry] = []
    owners: dict[str, int] = {}
    for place, (_, _, held) in enumerate(found):
        wanted = list(dict.fromkeys(held.values()))
        for fqn in wanted:
            if fqn in owners:
                raise PlanError(_overlap(found[owners[fqn]], found[place], fqn))
        owners.update(dict.fromkeys(wanted, place))
        resolved.append(ResolvedEntry(found[place][0], tuple(wanted)))
    return resolved, owners


def _overlap(first: _Found, second: _Found, fqn: str) -> str:
    if first[0] == second[0]:
        texts = sorted({first[1], second[1]} - {first[0]})
        origin = f' (once from "{texts[0]}")' if texts else ""
        return f'entry "{first[0]}" is there twice{origin}; take one out'
    spelled = [[name for name, canonical in found[2].items() if canonical == fqn] for found in (first, second)]
    if set(spelled[0]).isdisjoint(spelled[1]):
        return (
            f'entries "{first[0]}" and "{second[0]}" share a tied parameter, {spelled[0][0]} and {spelled[1][0]} '
            f'being one; make them one entry, "{first[0]}+{second[0]}"'
        )
    return f'entries "{first[0]}" and "{second[0]}" both hold {fqn}; let one of them have it'


def _no_entry_named_root(resolved: Sequence[ResolvedEntry]) -> None:
    if any(entry.name == ROOT for entry in resolved):
        raise PlanError('entry "root" has the name that unplanned = "root" gives to the rest; use unplanned = "error"')


# ``[parallel] reshard_after_forward``: which entries' parameters are gathered again in backward.


GatherAgain = bool | Mapping[str, bool] | None
"""For all entries, by selector of entries, or (None, and entries that no selector names) as FSDP2 has it by default."""

_RESHARD = "[parallel] reshard_after_forward"


def kept_entries(asked: GatherAgain, entries: Sequence[str], last: str | None) -> frozenset[str]:
    """Which of ``entries`` stay gathered until backward; ``last`` is the one that forward reads last.

    Left out it is as in FSDP2, whose root stays since backward needs it at once: what no entry names (``unplanned = "root"``),
    and the entry that forward reads last. Raises PlanError for a selector that stands for no entry, and for two that differ.
    """
    if isinstance(asked, bool):
        return frozenset(() if asked else entries)
    named = _by_entry(asked or {}, entries)
    return frozenset(entry for entry in entries if not named.get(entry, entry not in (last, ROOT)))


def _by_entry(asked: Mapping[str, bool], entries: Sequence[str]) -> dict[str, bool]:
    found: dict[str, tuple[str, bool]] = {}
    for selector, again in asked.items():
        matched = [entry for entry in entries if _stands_for(selector, entry)]
        if not matched:
            raise PlanError(f'{_RESHARD} names "{selector}", which is no entry of [bucket] plan; entries are {some(entries)}')
        for entry in matched:
            other, before = found.setdefault(entry, (selector, again))
            if before != again:
                raise PlanError(
                    f'{_RESHARD} is {show(before)} for {entry} by "{other}" and {show(again)} by "{selector}"; '
                    "let one of them name it"
                )
    return {entry: again for entry, (_, again) in found.items()}


def _stands_for(selector: str, entry: str) -> bool:
    """Whether each module of ``entry`` is one that ``selector`` names."""
    patterns = [name for one in parse_entries([selector], _RESHARD) for name in one.selectors]
    names = [name for one in parse_entries([entry], _RESHARD) for name in one.selectors]
    return selector == entry or all(any(_matches(pattern, name) for pattern in patterns) for name in names)


def _matches(pattern: str, name: str) -> bool:
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(a in ("*", b) for a, b in zip(parts, own, strict=True))
