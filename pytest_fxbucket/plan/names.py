"""The names of a model as selectors see them: modules, parameters, ties; and what to say of a name that matches nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from pytest_fxbucket.words import one_or_other, show, some


class Names:
    """An index of fully qualified names (FQNs): what each one holds, and what stands below it.

    ``what`` says for people what entries are to hold, in the plural.
    """

    def __init__(
        self, parameters: Sequence[str], modules: Sequence[str], aliases: Mapping[str, str], what: str = "parameters"
    ) -> None:
        self.what = what
        self.order = {fqn: place for place, fqn in enumerate(parameters)}
        self.modules = [fqn for fqn in modules if fqn]
        self._held: dict[str, dict[str, str]] = {}  # FQN -> {name below it: canonical FQN}
        self._children: dict[str, dict[str, None]] = {}  # module -> FQNs of its child modules, in order
        self._own: dict[str, list[str]] = {}  # module -> names of its own parameters, in order
        for fqn in self.modules:
            self._add_child(fqn)
        for fqn in parameters:
            self._add_parameter(fqn, fqn)
        for alias, fqn in aliases.items():
            self._add_parameter(alias, fqn)

    def held_by(self, selector: str) -> dict[str, str]:
        """Give the parameters that a name holds, as {name as spelled below it: canonical FQN}; empty if none.

        They are in the order of FSDP2's unit of that module (``torch.distributed.fsdp._fully_shard._fsdp_init``), which is that
        of its bytes: those of a module's children before its own.
        """
        held = self._held.get(selector, {})
        place = {name: number for number, name in enumerate(self._in_unit(selector))}
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


def unplanned_parameters(fqns: Sequence[str], entries: Sequence[str] = ()) -> str:
    """Say that parameters are in no entry, and the ways out; ``entries`` are the names of those that there are."""
    subject = "1 parameter is" if len(fqns) == 1 else f"{len(fqns)} parameters are"
    hint = f'add an entry such as "{new_entry(fqns[0], entries)}"'
    return (
        f"{subject} in no entry ({some(fqns)}); {hint}, or set [bucket] unplanned to "
        f'"root" (all such in one bucket) or "allow" (no bucket)'
    )


def new_entry(fqn: str, entries: Sequence[str]) -> str:
    """An entry for ``fqn`` that holds nothing of ``entries``: the module that holds it, or one around that beside entries."""
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


def no_match(selector: str, entry: str, names: Names) -> str:
    """Finish the sentence that begins with the entry: what stands in the way and which names are nearest."""
    subject = "" if selector == entry else f': "{selector}"'
    if names.is_module(selector):
        return f"{subject} is a module without {names.what}; take it out"
    ways = [_wrapped(selector, names), _reached(selector, names)]
    out_of_range = ways[1] and selector.rpartition(".")[2].isdigit()
    if not ways[0] and not out_of_range:
        ways.append(_nearest(selector, names))
    said = "; ".join(way for way in ways if way)
    return f"{subject} matches nothing; {said or _all_there_is(names)}"


def _all_there_is(names: Names) -> str:
    known = names.children("") or names.known()
    if known:
        return f"the model has {some(known)}"
    return f"the graph names no {names.what}: trace it so that its nodes keep nn_module_stack, or leave the plan out here"


def _wrapped(selector: str, names: Names) -> str:
    """Say which wrapper stands between the selector and a name that the model has."""
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


def _reached(selector: str, names: Names) -> str:
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


def _nearest(selector: str, names: Names) -> str:
    """Name what is spelled nearly so: the whole name, or else its last part somewhere in the model."""
    near = get_close_matches(selector, names.known(), n=2, cutoff=0.6)
    if not near:
        leaves = {fqn.rpartition(".")[2]: fqn for fqn in reversed(names.known())}
        near = [leaves[leaf] for leaf in get_close_matches(selector.rpartition(".")[2], list(leaves), n=1, cutoff=0.6)]
    return f"did you mean {one_or_other([show(fqn) for fqn in near])}?" if near else ""
