"""The language of selectors: from the entries of a plan to FQNs of parameters of a model. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry, parse_entries
from pytest_fxbucket.words import one_or_other, show, some

__all__ = ["Entry", "Resolution", "ResolvedEntry", "parse_entries", "resolve"]

ROOT = "root"


@dataclass(frozen=True, slots=True)
class ResolvedEntry:
    """An entry and its parameters: canonical FQNs in the order that FSDP2 has in a unit of the same modules."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """A plan's entries on one model, with the parameters that they hold.

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
    parameters: Iterable[str],
    modules: Sequence[str],
    *,
    aliases: Mapping[str, str] = {},
    unplanned: str = "error",
    where: str = "",
    what: str = "parameters",
) -> Resolution:
    """Find the parameters of each entry.

    ``parameters`` are FQNs in registration order, of a tied parameter each of its names at its place; ``aliases`` maps those
    that are not canonical (a tied parameter's first) to the canonical ones. ``modules`` is every module's FQN. ``unplanned`` is
    ``error``, ``allow`` or ``root`` (an entry named "root" is added last). ``what`` is what to call ``parameters`` where they
    are something else. Raises PlanError, beginning with ``where``, for an entry that matches nothing or whose parameters
    another entry has, and for unplanned parameters if those are errors.
    """
    # Selectors are expanded to names, names to the parameters below them; then each parameter is claimed by one entry, and the
    # parameters that are left go where ``unplanned`` says.
    canonical = {name: aliases.get(name, name) for name in (*parameters, *aliases)}
    names = _Names(canonical, modules, what)
    notes: list[str] = []
    try:
        found = [pair for entry in entries for pair in _expand(entry, names, notes)]
        resolved, owners = _claim(found)
        if unplanned == ROOT:
            refuse_entry_named_root(resolved)
        left = tuple(fqn for fqn in dict.fromkeys(canonical.values()) if fqn not in owners)
        if left and unplanned == "error":
            raise PlanError(_unplanned_parameters(left, [entry.name for entry in resolved]))
        if left and unplanned == ROOT:
            resolved.append(ResolvedEntry(ROOT, tuple(fqn for fqn in names.in_unit() if fqn not in owners)))
            left = ()
    except PlanError as error:
        raise PlanError(f"{where}: {error}" if where else str(error)) from None
    return Resolution(tuple(resolved), left, tuple(notes))


def parameters_of(
    entries: Sequence[Entry], names: Mapping[str, str], modules: Sequence[str], where: str, what: str = "parameters"
) -> set[str]:
    """Canonical FQNs of the parameters that ``entries`` name; ``names`` has the canonical one of every name, as registered.

    Raises PlanError as :func:`resolve`.
    """
    named = resolve(entries, names, modules, aliases=names, unplanned="allow", where=where, what=what)
    return {fqn for entry in named.entries for fqn in entry.parameters}


# Below, an entry in the making is its name, the text it came from, and {parameter as the entry spells it: canonical}.
_Found = tuple[str, str, dict[str, str]]


def _expand(entry: Entry, names: _Names, notes: list[str]) -> list[_Found]:
    # A single selector makes an entry of each name that it stands for; several, joined by ``+``, are one entry together.
    if len(entry.selectors) == 1:
        return [(fqn, entry.name, held) for fqn, held in _match(entry.selectors[0], entry, names, notes)]
    together: dict[str, str] = {}
    for selector in entry.selectors:
        for _, held in _match(selector, entry, names, notes):
            together.update(held)
    return [(entry.name, entry.name, together)]


def _match(selector: str, entry: Entry, names: _Names, notes: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Each FQN that a selector stands for, with the parameters below it; raises PlanError if there is none."""
    if "*" not in selector.split("."):
        held = names.held_by(selector)
        if not held:
            raise PlanError(f'entry "{entry.name}"{_no_match(selector, entry.name, names)}')
        return [(selector, held)]
    candidates = _children_of_star(selector, entry, names)
    empty = [fqn for fqn in candidates if not names.held_by(fqn)]
    # A star also meets modules without parameters, such as activations; it is wrong if it meets nothing else.
    if len(empty) == len(candidates):
        raise PlanError(f'entry "{entry.name}"{_no_match(candidates[0], entry.name, names)}')
    if empty:
        notes.append(f'entry "{entry.name}" leaves out {some(empty)}: no {names.what} there')
    return [(fqn, names.held_by(fqn)) for fqn in candidates if fqn not in empty]


def _children_of_star(selector: str, entry: Entry, names: _Names) -> list[str]:
    # Modules are reached component by component: a star goes on to all children, a name to a name, whether it exists or not.
    reached = [""]
    components = selector.split(".")
    for place, component in enumerate(components):
        if component != "*":
            reached = [f"{fqn}.{component}" if fqn else component for fqn in reached]
            continue
        below = [child for fqn in reached for child in names.children(fqn)]
        if not below:
            stem = ".".join(components[:place])
            # Behind an earlier star the stem is no name that could be looked up.
            if "*" not in stem and not names.is_module(stem) and not names.held_by(stem):
                raise PlanError(f'entry "{entry.name}"{_no_match(stem, entry.name, names)}')
            raise PlanError(f'entry "{entry.name}" matches nothing: "{stem}" has no child modules')
        reached = below
    return reached


def _claim(found: Sequence[_Found]) -> tuple[list[ResolvedEntry], dict[str, int]]:
    """Give every parameter to its one entry; raises PlanError if two entries hold it."""
    resolved: list[ResolvedEntry] = []
    owners: dict[str, int] = {}
    for place, (_, _, held) in enumerate(found):
        # One entry may hold a tied parameter under both its names.
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
    # If the two entries spell the parameter differently, it is a tied one, and no name is in both for the user to take out.
    spelled = [[name for name, canonical in found[2].items() if canonical == fqn] for found in (first, second)]
    if set(spelled[0]).isdisjoint(spelled[1]):
        return (
            f'entries "{first[0]}" and "{second[0]}" share a tied parameter, {spelled[0][0]} and {spelled[1][0]} '
            f'being one; make them one entry, "{first[0]}+{second[0]}"'
        )
    return f'entries "{first[0]}" and "{second[0]}" both hold {fqn}; let one of them have it'


def refuse_entry_named_root(resolved: Sequence[ResolvedEntry]) -> None:
    """Raise PlanError for an entry that has the name of the one of what is left, where there is to be one."""
    if any(entry.name == ROOT for entry in resolved):
        raise PlanError('entry "root" has the name that unplanned = "root" gives to the rest; use unplanned = "error"')


# The names of a model as selectors see them: modules, parameters, ties.


class _Names:
    """An index of fully qualified names (FQNs): what each one holds, and what stands below it.

    ``what`` says for people what entries are to hold, in the plural.
    """

    def __init__(self, names: Mapping[str, str], modules: Sequence[str], what: str) -> None:
        self.what = what
        self.modules = [fqn for fqn in modules if fqn]
        self._held: dict[str, dict[str, str]] = {}  # FQN -> {name below it: canonical FQN}
        self._children: dict[str, dict[str, None]] = {}  # module -> FQNs of its child modules, in order
        self._own: dict[str, list[str]] = {}  # module -> names of its own parameters, in order
        for fqn in self.modules:
            self._add_child(fqn)
        for spelled, canonical in names.items():
            self._add_parameter(spelled, canonical)

    def held_by(self, selector: str) -> dict[str, str]:
        """Give the parameters that a name holds, as {name as spelled below it: canonical FQN}; empty if none.

        They are in the order of FSDP2's unit of that module (``torch.distributed.fsdp._fully_shard._fsdp_init``), which is that
        of its bytes: those of a module's children before its own.
        """
        held = self._held.get(selector, {})
        place = {name: number for number, name in enumerate(self._in_unit(selector))}
        # A parameter's own name is no unit, so it has no place in one; it holds itself alone.
        return dict(sorted(held.items(), key=lambda one: place.get(one[0], -1)))

    def in_unit(self) -> list[str]:
        """Give canonical FQNs of all parameters, in the order of a unit that is the whole model."""
        return list(dict.fromkeys(self._held[name][name] for name in self._in_unit("")))

    def is_module(self, fqn: str) -> bool:
        """Tell whether a module of that name exists, with parameters or without."""
        return fqn in self._children

    def children(self, fqn: str) -> list[str]:
        """Give the FQNs of the child modules, in registration order; ``""`` is the model itself."""
        return list(self._children.get(fqn, {}))

    def known(self) -> list[str]:
        """Give every name that a selector could be: modules first, then parameters and their tied names."""
        modules = [fqn for fqn in self._children if fqn]
        return modules + [fqn for fqn in self._held if fqn not in self._children]

    def _in_unit(self, module: str) -> Iterator[str]:
        for child in self._children.get(module, {}):
            yield from self._in_unit(child)
        yield from self._own.get(module, ())

    def _add_child(self, fqn: str) -> None:
        self._children.setdefault(fqn, {})
        # Not every module need be among those given: what stands before a dot of a known name is one, too.
        while fqn:
            parent = fqn.rpartition(".")[0]
            self._children.setdefault(parent, {})[fqn] = None
            fqn = parent

    def _add_parameter(self, spelled: str, canonical: str) -> None:
        parent = spelled.rpartition(".")[0]
        if parent and parent not in self._children:
            self._add_child(parent)
        self._own.setdefault(parent, []).append(spelled)
        name = spelled
        while name:
            self._held.setdefault(name, {})[spelled] = canonical
            name = name.rpartition(".")[0]


# What to say of an entry that matches nothing, and of parameters in no entry.


def _unplanned_parameters(fqns: Sequence[str], entries: Sequence[str] = ()) -> str:
    """Say that parameters are in no entry, and the ways out; ``entries`` are the names of the existing entries."""
    subject = "1 parameter is" if len(fqns) == 1 else f"{len(fqns)} parameters are"
    hint = f'add an entry such as "{new_entry(fqns[0], entries)}"'
    return (
        f"{subject} in no entry ({some(fqns)}); {hint}, or set [bucket] unplanned to "
        f'"root" (all such in one bucket) or "allow" (no bucket)'
    )


def new_entry(fqn: str, entries: Sequence[str]) -> str:
    """A new entry for ``fqn`` that overlaps none of ``entries``.

    It is the innermost module around the parameter that is a sibling of an entry; if there is none, the module that holds the
    parameter; if an entry has some of that, the parameter itself.
    """
    holder = fqn.rpartition(".")[0] or fqn
    planned = [name for entry in entries for name in entry.split("+")]
    outward = holder
    while (parent := outward.rpartition(".")[0]) and _is_free(outward, planned):
        if any(name.rpartition(".")[0] == parent for name in planned):
            return outward
        outward = parent
    return holder if _is_free(holder, planned) else fqn


def _is_free(module: str, planned: Sequence[str]) -> bool:
    return not any(name == module or name.startswith(f"{module}.") for name in planned)


def _no_match(selector: str, entry: str, names: _Names) -> str:
    """Finish the sentence that begins with the entry: what stands in the way and which names are nearest."""
    subject = "" if selector == entry else f': "{selector}"'
    if names.is_module(selector):
        return f"{subject} is a module without {names.what}; take it out"
    ways = [_wrapped(selector, names), _reached(selector, names)]
    # For a number that is too large the nearest names would be other numbers.
    out_of_range = ways[1] and selector.rpartition(".")[2].isdigit()
    if not ways[0] and not out_of_range:
        ways.append(_nearest(selector, names))
    said = "; ".join(way for way in ways if way)
    return f"{subject} matches nothing; {said or _all_there_is(names)}"


def _all_there_is(names: _Names) -> str:
    known = names.children("") or names.known()
    if known:
        return f"the model has {some(known)}"
    return f"the graph names no {names.what}: trace it so that its nodes keep nn_module_stack, or leave the plan out here"


def _wrapped(selector: str, names: _Names) -> str:
    """Say which prefix the selector lacks, or has too much, to be a name of the model; wrapped modules have such prefixes."""
    longer = [fqn for fqn in names.known() if fqn.endswith(f".{selector}")]
    if longer:
        best = min(longer, key=lambda fqn: (fqn.count("."), fqn))
        prefix = best[: -len(selector) - 1]
        return f'"{best}" exists, so write it with "{prefix}." before it'
    known = set(names.known())
    parts = selector.split(".")
    for start in range(1, len(parts)):
        shorter = ".".join(parts[start:])
        if shorter in known:
            return f'"{shorter}" exists, so write it without "{".".join(parts[:start])}."'
    return ""


def _reached(selector: str, names: _Names) -> str:
    """Say how far the selector matched and what stands below that."""
    parts = selector.split(".")
    for end in range(len(parts) - 1, 0, -1):
        stem = ".".join(parts[:end])
        if names.is_module(stem):
            below = [name for name in names.known() if name.startswith(f"{stem}.") and "." not in name[len(stem) + 1 :]]
            leaves = [name[len(stem) + 1 :] for name in below]
            return f'"{stem}" has children {_fold(leaves)}' if leaves else f'"{stem}" has no children'
    return ""


def _fold(leaves: Sequence[str]) -> str:
    numbers = [int(leaf) for leaf in leaves if leaf.isdigit()]
    if len(numbers) == len(leaves) > 1 and sorted(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{min(numbers)}..{max(numbers)}"
    return some(leaves, 6)


def _nearest(selector: str, names: _Names) -> str:
    """Suggest names that are spelled nearly like ``selector``, or else one whose last part is spelled nearly like its own."""
    near = get_close_matches(selector, names.known(), n=2, cutoff=0.6)
    if not near:
        # Backwards, so that of equal last parts the first one of the model stays.
        leaves = {fqn.rpartition(".")[2]: fqn for fqn in reversed(names.known())}
        near = [leaves[leaf] for leaf in get_close_matches(selector.rpartition(".")[2], list(leaves), n=1, cutoff=0.6)]
    return f"did you mean {one_or_other([show(fqn) for fqn in near])}?" if near else ""


# ``[parallel] reshard_after_forward``: which entries' parameters are gathered again in backward.


GatherAgain = bool | Mapping[str, bool] | None
"""One answer for all entries, or one for each selector of entries. None is FSDP2's default, also for entries not selected."""

_RESHARD = "[parallel] reshard_after_forward"


def kept_entries(asked: GatherAgain, entries: Sequence[str], last: Collection[str | None]) -> frozenset[str]:
    """Which of ``entries`` stay gathered until backward; ``last`` has those that count as FSDP2's root.

    An entry without an answer is as in FSDP2, whose root stays gathered since backward needs it at once. Here these are the
    entry that forward reads last, and that of ``unplanned = "root"``. Raises PlanError for a selector that stands for no
    entry, and for two selectors that answer differently for one entry.
    """
    if isinstance(asked, bool):
        return frozenset(() if asked else entries)
    named = _by_entry(asked or {}, entries)
    # Answers say what is gathered again; what stays is the rest.
    return frozenset(entry for entry in entries if not named.get(entry, entry not in last))


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
    """Whether ``selector`` names every module of ``entry``."""
    patterns = [name for one in parse_entries([selector], _RESHARD) for name in one.selectors]
    try:
        names = [name for one in parse_entries([entry], _RESHARD) for name in one.selectors]
    except PlanError:  # a star stands for names that nobody wrote, such as a key of a ModuleDict, which need be no selector
        names = [entry]
    return selector == entry or all(any(_matches(pattern, name) for pattern in patterns) for name in names)


def _matches(pattern: str, name: str) -> bool:
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(a in ("*", b) for a, b in zip(parts, own, strict=True))
