"""Which entry each launch belongs to, told by the modules that its metadata names (:mod:`pytest_fxbucket.graph.modules`).

Whatever wraps the model, the variable that holds it, ``torch.compile``, activation checkpointing, a module of the user's, is no
part of an entry: entries are read without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.modules import (
    NO_MODULES,
    ModuleStackFn,
    Path,
    merged_parts,
    module_path,
    module_stack,
    shared_path,
    wrong_stack,
)
from pytest_fxbucket.plan.entries import Entry
from pytest_fxbucket.plan.selectors import ROOT, Resolution, refuse_entry_named_root, resolve
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from torch import fx

__all__ = ["ByModule", "ModuleStackFn", "entries_by_module", "module_path"]


@dataclass(frozen=True, slots=True)
class ByModule:
    """The entries of a plan, and the launches that each one names."""

    entries: tuple[str, ...]
    """In order, ranges and stars written out."""
    entry_of: Mapping[fx.Node, str]
    """Launches that no entry names are left out."""
    launching: tuple[str, ...] = ()
    """FQNs of the modules that launch collectives, as entries see them."""


def entries_by_module(
    graph: fx.Graph,
    plans: Sequence[tuple[str, Sequence[str]]],
    module_stack_fn: ModuleStackFn | None = None,
    *,
    where: str = "module_bucket_plans",
    unplanned: str = "allow",
    activations: Collection[fx.Node] = (),
    partial: bool = False,
) -> ByModule:
    """Sort the launches of ``graph`` into entries: (name, selectors), as :func:`parse_entries` gives them.

    A launch belongs to the innermost of its modules that an entry names; one that was merged before, to its old entry. All
    entries are read behind one prefix: the shortest that all launches share and behind which every entry matches. ``unplanned``
    is what to do with a launch in no entry, ``activations`` (launches) aside: allow, error, or root (an entry of that name).
    ``partial``: this is one of several graphs of a model, so a part of an entry that matches nothing may match in another.

    Raises :class:`PlanError`, beginning with ``where``, for a graph without module names, an entry that matches no module or no
    launch, and entries that overlap.
    """
    stack = module_stack_fn or module_stack
    launches = [node for node in graph.nodes if collectives.launch_kind(node)]
    merged = {node: parts for node in launches if (parts := merged_parts(node))}
    paths = {node: _paths(stack(node), where) for node in launches if node not in merged}
    if not partial:
        _refuse_nameless([*merged.values(), *paths.values()], module_stack_fn, where)
    entries = [Entry(name, tuple(_clean(selector) for selector in selectors)) for name, selectors in plans]
    selectors = [module_path(selector) for entry in entries for selector in entry.selectors]
    distinct = dict.fromkeys(paths.values())
    prefix = _prefix(distinct, merged.values(), selectors)
    plain, starred = frozenset(selectors), [selector for selector in selectors if "*" in selector]
    chosen = {found: _chosen(found, plain, starred, prefix) for found in distinct}
    modules_of = {node: chosen[found] for node, found in paths.items()}
    modules_of |= {node: tuple(map(".".join, parts)) for node, parts in merged.items()}
    named = list(dict.fromkeys(name for node in launches for name in modules_of[node] if name))
    present = _present(entries, named) if partial else entries
    try:
        resolution = _resolve(present, named, [], where)
    except PlanError:
        # Once more for its error alone: with all modules of the graph it can name what is near, and what launches nothing.
        _resolve(present, named, _every_module(graph, stack, prefix), where)
        raise
    entry_of = _entry_of(modules_of, resolution)
    names = (
        _in_order(entries, [entry.name for entry in resolution.entries])
        if partial
        else [entry.name for entry in resolution.entries]
    )
    left = [node for node in launches if node not in entry_of and node not in activations]
    if left and unplanned == "error":
        raise PlanError(f"{where}: {_unplanned(left, modules_of)}")
    if unplanned == ROOT:
        refuse_entry_named_root(resolution.entries)
    if left and unplanned == ROOT:
        names.append(ROOT)
        entry_of |= dict.fromkeys(left, ROOT)
    return ByModule(tuple(names), entry_of, tuple(named))


def _paths(stack: Sequence[tuple[str, type]], where: str) -> tuple[Path, ...]:
    """Modules of one node, innermost first."""
    if wrong := wrong_stack(stack):
        raise PlanError(f"{where}: {wrong}")
    return tuple(dict.fromkeys(module_path(item[0]) for item in reversed(stack)))


def _refuse_nameless(paths: Sequence[Sequence[Path]], given: ModuleStackFn | None, where: str) -> None:
    if not paths:
        raise PlanError(f"{where}: no entry can match: the graph launches no collective")
    if any(any(found) for found in paths):
        return
    if given is not None:
        raise PlanError(f"{where}: no entry can match: module_stack_fn names no module for any of {len(paths)} collectives")
    raise PlanError(
        f"{where}: no entry can match: no collective carries a module's name (nn_module_stack or fwd_nn_module_stack in "
        "node.meta, or an annotation module_fqn or module_path); trace with them, pass module_stack_fn, or bucket by size"
    )


def _clean(selector: str) -> str:
    """``selector`` without the names that are no modules to those who write plans."""
    return ".".join(part for part in selector.split(".") if part not in NO_MODULES) or selector


def _prefix(paths: Iterable[Sequence[Path]], merged: Iterable[Sequence[Path]], selectors: Sequence[Path]) -> Path:
    """The shortest prefix that all launches share and behind which most selectors match; most are all, if nothing is wrong."""
    # How many selectors match behind each prefix, the shortest first: the first with the most is taken.
    named = [found for found in paths if any(found)]
    shared = shared_path(found[0] for found in named)
    every = {path for found in named for path in found}
    bare = {part for parts in merged for part in parts}
    counts = []
    for length in range(len(shared) + 1):
        behind = bare | {path[length:] for path in every if path[:length] == shared[:length]}
        modules = {path[:end] for path in behind for end in range(len(path) + 1)}
        counts.append(sum(_is_among(modules, selector) for selector in selectors))
    return shared[: counts.index(max(counts))]


def _is_among(modules: Collection[Path], selector: Path) -> bool:
    return selector in modules or ("*" in selector and any(_matches(selector, module) for module in modules))


def _matches(selector: Path, module: Path) -> bool:
    return len(selector) == len(module) and all(a in ("*", b) for a, b in zip(selector, module, strict=True))


def _chosen(paths: Sequence[Path], plain: Collection[Path], starred: Sequence[Path], prefix: Path) -> tuple[str, ...]:
    """FQN behind ``prefix`` of one of a node's modules ``paths``: the innermost that a selector covers, else the innermost."""
    behind = [path[len(prefix) :] if path[: len(prefix)] == prefix else path for path in paths]
    for path in behind:
        outward = [path[:end] for end in range(len(path) + 1)]
        if any(module in plain for module in outward) or any(_is_among(outward, selector) for selector in starred):
            return (".".join(path),)
    return tuple(".".join(path) for path in behind[:1])


def _present(entries: Sequence[Entry], named: Sequence[str]) -> list[Entry]:
    """``entries`` as far as they match any of ``named``; one of several selectors stays one, under its name."""
    paths = [module_path(name) for name in named]
    modules = {path[:end] for path in paths for end in range(len(path) + 1)}
    present = []
    for entry in entries:
        kept = tuple(selector for selector in entry.selectors if _is_among(modules, module_path(selector)))
        if kept:
            together = len(entry.selectors) > len(kept) == 1  # a single selector would name the entry after itself
            present.append(Entry(entry.name, kept * 2 if together else kept))
    return present


def _in_order(entries: Sequence[Entry], present: Sequence[str]) -> list[str]:
    """Names of all ``entries``; where one is a star, those that it gives in this graph."""
    names: list[str] = []
    for entry in entries:
        star = module_path(entry.selectors[0]) if len(entry.selectors) == 1 and "*" in entry.selectors[0] else None
        names += [name for name in present if _matches(star, module_path(name))] if star else [entry.name]
    return names


def _resolve(entries: Sequence[Entry], named: Sequence[str], modules: Sequence[str], where: str) -> Resolution:
    return resolve(entries, named, [*modules, *named], unplanned="allow", where=where, what="collectives")


def _every_module(graph: fx.Graph, stack: ModuleStackFn, prefix: Path) -> list[str]:
    """FQNs of all modules that any node names, in order."""
    found = dict.fromkeys(path for node in graph.nodes for path in reversed(_paths(stack(node), "")))
    return [".".join(path[len(prefix) :]) for path in found if path[: len(prefix)] == prefix]


def _entry_of(modules_of: Mapping[fx.Node, Sequence[str]], resolution: Resolution) -> dict[fx.Node, str]:
    owner = {module: entry.name for entry in resolution.entries for module in entry.parameters}
    owners = {node: {owner.get(name) for name in names} for node, names in modules_of.items()}
    # A launch that was merged before has several names. If they are of several entries, it belongs to none.
    return {node: name for node, found in owners.items() if len(found) == 1 and (name := next(iter(found))) is not None}


def _unplanned(left: Sequence[fx.Node], modules_of: Mapping[fx.Node, Sequence[str]]) -> str:
    """Say which launches are in no entry, and the ways out."""
    named = list(dict.fromkeys(name for node in left for name in modules_of[node] if name))
    what = f"modules {some(named)}" if named else f"{some([node.name for node in left])}, which name no module"
    hint = f'add an entry such as "{named[0]}", or ' if named else ""
    return (
        f"{len(left)} collectives are in no entry, those of {what}; {hint}set [bucket] unplanned to "
        '"root" (all such in one bucket) or "allow" (no bucket)'
    )
