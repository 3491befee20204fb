"""The FQN language: from the entries of a plan to the parameters of a model. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry, parse_entries
from pytest_fxbucket.plan.names import Names, no_match, unplanned_parameters
from pytest_fxbucket.words import some

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
