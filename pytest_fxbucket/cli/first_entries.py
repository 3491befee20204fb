"""A first bucket plan for a model: repeated blocks as entries, and what lies before, between and after them.

An embedding and a head are needed at the two ends of a step, so they share no entry unless they are tied.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pytest_fxbucket.plan import Entry, PlanError, parse_entries, resolve
from pytest_fxbucket.plan.toml_text import to_toml

if TYPE_CHECKING:
    from torch import nn

_MOST_NAMES = 6  # a longer "+" entry reads worse than unplanned = "root"


@dataclass(frozen=True, slots=True)
class BlockNames:
    """The names of a model that :func:`pytest_fxbucket.plan.resolve` asks for."""

    names: dict[str, str]
    modules: list[str]

    @classmethod
    def of(cls, model: nn.Module) -> BlockNames:
        """Read the names from a model; a tied parameter's first name is its canonical one."""
        from pytest_fxbucket.capture.names import names_of

        return cls(names_of(model), [n for n, _ in model.named_modules(remove_duplicate=False)])

    @property
    def parameters(self) -> list[str]:
        """Canonical names, in registration order."""
        return list(dict.fromkeys(self.names.values()))

    @property
    def aliases(self) -> dict[str, str]:
        """Each other name of a tied parameter, to the canonical one."""
        return {name: fqn for name, fqn in self.names.items() if name != fqn}


@dataclass(frozen=True, slots=True)
class Draft:
    """``[bucket]`` of a first plan: its entries as text, and what becomes of parameters in none of them."""

    entries: tuple[str, ...]
    unplanned: str = "error"

    def __str__(self) -> str:
        rest = "; the rest share one bucket" if self.unplanned == "root" else ""
        return f"{', '.join(self.entries) or 'no block found'}{rest}"

    def of_any_depth(self, modules: Collection[str]) -> Draft:
        """The draft with ``layers.*`` for ``layers.[0-31]`` where these are all layers, so that it fits other sizes too."""
        return Draft(tuple(_all_of_list(entry, modules) for entry in self.entries), self.unplanned)

    def lines(self, aliases: Mapping[str, str]) -> Iterator[str]:
        """``[bucket]`` of a plan file; ``aliases`` are tied parameters, with the names that they have in it."""
        yield "[bucket]"
        for alias, fqn in list(aliases.items())[:3]:
            yield f"# {alias} is tied to {fqn}: one parameter, in one entry."
        if self.entries:
            yield "plan = ["
            yield from (f"  {to_toml(entry)}," for entry in self.entries)
            yield "]"
        if self.unplanned != "error":
            yield f"unplanned = {to_toml(self.unplanned)}  # parameters in no entry share one bucket"


def _all_of_list(entry: str, modules: Collection[str]) -> str:
    found = re.fullmatch(r"(.+)\.\[0-(\d+)\]", entry)
    is_all = found is not None and f"{found[1]}.{int(found[2]) + 1}" not in modules
    return f"{found[1]}.*" if found is not None and is_all else entry


def draft(model: nn.Module) -> Draft:
    """Plan every parameter of a model once; raises PlanError if it has none."""
    # Repeated blocks first. What is left goes into entries by its place among them; where that would give a long entry, or one
    # with a parameter that is tied to a block's, the rest is left to the root's bucket.
    names = BlockNames.of(model)
    if not names.parameters:
        raise PlanError("the model has no parameters, so there is nothing to plan")
    blocks = _untied(_blocks(model), names)
    planned = _resolve(blocks, names, "root") if blocks else set()
    left = [name for name in names.parameters if name not in planned]
    if not left:
        return Draft(tuple(blocks), "error")
    rest = _grouped(_together(left, planned, names), planned, names, model)
    entries = (*blocks, *("+".join(together) for together in rest))
    try:
        _resolve(entries, names, "error")
    except PlanError:  # a parameter in it is tied to one in a block
        return Draft(tuple(blocks), "root")
    if max(map(len, rest)) > _MOST_NAMES:
        return Draft(tuple(blocks), "root")

    def first_parameter(entry: str) -> int:
        return min(map(names.parameters.index, _resolve((entry,), names, "allow")))

    return Draft(tuple(sorted(entries, key=first_parameter)), "error")


def _grouped(covers: dict[str, str], planned: set[str], names: BlockNames, model: nn.Module) -> list[list[str]]:
    """Names in ``covers`` (by the parameters that they hold) that share an entry: neighbours; embeddings alone."""
    from torch import nn

    modules = dict(model.named_modules())
    groups: list[list[str]] = []
    last: tuple[int, bool] | None = None
    number = 0
    for fqn in names.parameters:
        number += fqn in planned  # equal for parameters that lie between the same two blocks
        # Another parameter of the same module may have put it into a group.
        if fqn in planned or any(covers[fqn] in group for group in groups):
            continue
        key = (number, isinstance(modules.get(covers[fqn]), nn.Embedding))
        if key != last:
            groups.append([])
        groups[-1].append(covers[fqn])
        last = key
    # Groups of tied parameters, as of an embedding and its head, are joined to the last.
    tied = {covers[fqn] for fqn in names.aliases.values() if fqn in covers}
    ends = [group for group in groups[:-1] if tied.intersection(group)]
    return [*(group for group in groups[:-1] if group not in ends), [name for group in (*ends, groups[-1]) for name in group]]


def _resolve(entries: tuple[str, ...], names: BlockNames, unplanned: str) -> set[str]:
    """Give the parameters that entries name, those of the root left out."""
    parsed = parse_entries(list(entries), "[bucket] plan")
    found = resolve(parsed, names.names, names.modules, aliases=names.names, unplanned=unplanned)
    # The root's entry comes last, and none of the others has a star, so that each of them is one entry here, too.
    return {fqn for entry in found.entries[: len(parsed)] for fqn in entry.parameters}


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Find the outermost children of a ModuleList, ModuleDict or Sequential that share their class with a sibling."""
    from torch import nn

    found: list[str] = []

    def walk(module: nn.Module, prefix: str) -> None:
        children = {name: child for name, child in module._modules.items() if child is not None}
        # Activations between layers hold no parameters: they are no blocks, however often they come.
        holds = {name for name, child in children.items() if next(child.parameters(), None) is not None}
        repeated: set[str] = set()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            often = Counter(type(children[name]) for name in holds)
            repeated = {name for name in holds if often[type(children[name])] > 1}
        found.extend(_ranges(prefix, [name for name in children if name in repeated]))
        for name, child in children.items():
            if name not in repeated:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return tuple(found)


def _ranges(prefix: str, names: list[str]) -> list[str]:
    """Write neighbouring numbers as a range and everything else as it is."""
    # A name such as "01" would not come back from a range.
    digits = [name for name in names if name.isdecimal() and str(int(name)) == name]
    found = [prefix + name for name in names if name not in digits]
    # Consecutive numbers all have the same difference from their place in the list.
    for _, run in groupby(enumerate(digits), key=lambda item: int(item[1]) - item[0]):
        numbers = [number for _, number in run]
        found.append(prefix + (f"[{numbers[0]}-{numbers[-1]}]" if len(numbers) > 1 else numbers[0]))
    return found


def _untied(blocks: tuple[str, ...], names: BlockNames) -> tuple[str, ...]:
    """Join blocks that share a tied parameter, so that each parameter keeps one entry."""
    entries = parse_entries(list(blocks), "[bucket] plan")
    groups: list[tuple[list[Entry], set[str]]] = []
    for entry in entries:
        alone = resolve([entry], names.names, names.modules, aliases=names.names, unplanned="allow")
        carried = set(alone.entries[0].parameters)
        # All groups that share a parameter with this entry become one, so that no two groups ever share any.
        tied = [group for group in groups if group[1] & carried]
        groups = [group for group in groups if not group[1] & carried]
        together = [each for group in tied for each in group[0]] + [entry]
        groups.append((together, carried.union(*(group[1] for group in tied))))
    if all(len(group) == 1 for group, _ in groups):
        return blocks
    return tuple("+".join(entry.name for entry in group) for group, _ in groups)


def _together(left: list[str], planned: set[str], names: BlockNames) -> dict[str, str]:
    """Name each parameter by the largest module that holds nothing planned."""
    # By its other name, too: a module that holds a planned parameter under an alias would plan it twice.
    taken = planned | {alias for alias, fqn in names.aliases.items() if fqn in planned}
    covers: dict[str, str] = {}
    for fqn in left:
        parts = fqn.split(".")
        stems = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        # The dots keep ``layers.1`` from holding ``layers.10.weight``. The last stem, the parameter, is always free.
        covers[fqn] = next(s for s in stems if not any(f"{other}.".startswith(f"{s}.") for other in taken))
    return covers
