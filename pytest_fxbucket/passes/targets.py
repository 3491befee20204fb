"""Which launches belong to which entry: by the parameter that they carry (plans), by module metadata, or by size alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.passes import mergeable
from pytest_fxbucket.passes.carried import Carried, carried
from pytest_fxbucket.passes.mergeable import Target
from pytest_fxbucket.passes.module_names import ModuleStackFn, entries_by_module

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.step.roles import Direction, Value

Ends = tuple[Sequence["Value"], Sequence["Value"]]
_NO_ENTRY = "no entry names its module"


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A launch that was not merged or not moved, and why."""

    what: str
    reason: str
    direction: str = ""
    kind: str = ""
    """Of a launch that was not merged; empty of one that was not moved."""
    fqns: tuple[str, ...] = ()
    """Parameters that it carries, as far as any are known."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Every launch of a graph, sorted into what a plan names and what it does not."""

    planned: tuple[Target, ...]
    """In order of launch."""
    left_alone: tuple[LeftAlone, ...]
    launches: int
    order: Order
    """Of the graph; it holds until the graph changes."""
    entries: tuple[str, ...] = ()
    """In the plan's order; empty if launches are bucketed by size."""
    ends: Ends | None = None
    """Roles of the graph's inputs and outputs; None if nobody said them."""
    launching: tuple[str, ...] = ()
    """Modules that launch collectives, as entries see their names; empty if nobody asked for them."""
    computes: tuple[tuple[fx.Node, Direction, str], ...] = ()
    """Compute with its direction and entry (empty: none), as far as that is known."""


def by_parameter(
    graph: fx.Graph,
    reading: GraphAnalysis,
    inputs: Sequence[Value],
    entry_of: Mapping[str, str],
    entries: Sequence[str] = (),
    outputs: Sequence[Value] | None = None,
) -> Targets:
    """Sort the launches of ``graph`` by the parameter they carry; ``entry_of`` maps FQNs to entries, in the order of bytes.

    Without ``outputs``, of which the graph returns one each, nothing is said of the optimizer.

    ``reading`` is of ``graph``, or of the graph it was copied from: nodes are found by name.
    """
    place = {fqn: i for i, fqn in enumerate(entry_of)}
    nodes = {node.name: node for node in graph.nodes}
    names: dict[fx.Node, Carried] = {}
    for bucket in reading.buckets:
        known = tuple(fqn for fqn in bucket.fqns if fqn)
        owners = {entry_of.get(fqn) for fqn in known}
        first = min((place.get(fqn, 0) for fqn in known), default=0)
        if not known or len(known) < len(bucket.fqns):
            name = Carried(known, 0, bucket.direction, "it carries no parameter and no parameter's gradient")
        elif len(owners) > 1:
            several = ", ".join(sorted(str(owner or "no entry") for owner in owners))
            name = Carried(known, first, bucket.direction, f"it carries parameters of several entries: {several}")
        else:
            entry = owners.pop()
            reason = "" if entry else "no entry names its parameter"
            name = Carried(known, first, bucket.direction, reason, bucket.level, entry=entry, round=bucket.round)
        names[nodes[bucket.node]] = name
    found = _sort(graph, names, tuple(entries) or tuple(dict.fromkeys(entry_of.values())))
    return replace(found, computes=_computes(nodes, reading, entry_of), ends=None if outputs is None else (inputs, outputs))


def _computes(
    nodes: Mapping[str, fx.Node], reading: GraphAnalysis, entry_of: Mapping[str, str]
) -> tuple[tuple[fx.Node, Direction, str], ...]:
    if reading.order is None:
        return ()
    at = reading.order.nodes
    return tuple((nodes[at[where].name], direction, entry_of.get(fqn, "")) for where, direction, fqn in reading.computes)


def by_module(
    graph: fx.Graph,
    plans: Sequence[tuple[str, Sequence[str]]],
    module_stack_fn: ModuleStackFn | None = None,
    *,
    where: str = "module_bucket_plans",
    unplanned: str = "allow",
    partial: bool = False,
) -> Targets:
    """Sort the launches of ``graph`` by the module that their nodes' metadata names.

    ``plans`` holds (entry, selectors). Raises :class:`PlanError` as :func:`entries_by_module` does; ``partial`` is as there.
    """
    known = carried(graph)
    activations = [node for node, one in known.items() if one.reason]
    named = entries_by_module(
        graph, plans, module_stack_fn, where=where, unplanned=unplanned, activations=activations, partial=partial
    )
    names = _named(known, {node: named.entry_of.get(node) for node in known})
    return _sort(graph, names, named.entries, named.launching)


def by_size(graph: fx.Graph) -> Targets:
    """Every launch of ``graph`` that carries a parameter or a gradient, whatever its module."""
    known = carried(graph)
    return _sort(graph, _named(known, dict.fromkeys(known, "")), ())


def _named(known: Mapping[fx.Node, Carried], entry_of: Mapping[fx.Node, str | None]) -> dict[fx.Node, Carried]:
    """``known`` launches, in order, with their entries; what one entry gathers again is of its next round."""
    gathers: Counter[tuple[object, ...]] = Counter()
    found: dict[fx.Node, Carried] = {}
    for node, one in known.items():
        entry, number, level = None if one.reason else entry_of[node], 0, one.level
        if collectives.is_all_gather(node):
            group, level = collectives.argument(node, "group_name"), int(one.again)
            keys = {(entry, name, one.direction, group) for name in one.fqns}
            if not one.again:
                number = max((gathers[key] for key in keys), default=0)
                gathers.update(keys)
        found[node] = one._replace(entry=entry, reason=one.reason or _NO_ENTRY, round=number, level=level)
    return found


def _sort(
    graph: fx.Graph, names: Mapping[fx.Node, Carried], entries: tuple[str, ...], launching: tuple[str, ...] = ()
) -> Targets:
    order = order_of(graph)
    planned: list[Target] = []
    left: list[LeftAlone] = []
    for node, name in sorted(names.items(), key=lambda item: order.index[item[0]]):
        target = mergeable.read(node, order, name) if name.entry is not None else name.reason
        if isinstance(target, str):
            kind = str(collectives.launch_kind(node))
            left.append(LeftAlone(_describe(node, name), target, name.direction, kind, name.fqns))
        else:
            planned.append(target)
    return Targets(tuple(planned), tuple(left), len(names), order, entries, launching=launching)


def _describe(node: fx.Node, name: Carried) -> str:
    return f"{collectives.launch_kind(node)} of {', '.join(name.fqns) or node.name} ({name.direction})"
