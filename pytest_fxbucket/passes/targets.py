"""Which launches belong to which entry: by the parameter that they carry (plans), by module metadata, or by size alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.passes import mergeable
from pytest_fxbucket.passes.carried import Carried, carried
from pytest_fxbucket.passes.mergeable import Part
from pytest_fxbucket.passes.module_names import ModuleStackFn, entries_by_module

if TYPE_CHECKING:
    import torch
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


@dataclass(slots=True, eq=False)  # freezing takes thrice as long, and there are thousands
class Target:
    """One launch that an entry names. Not to be changed."""

    launch: fx.Node
    parts: tuple[Part, ...]
    entry: str
    fqns: tuple[str, ...]
    """Parameters that it carries, or whose gradients it reduces; in byte order."""
    place: int
    """Of the first parameter in the order of registration."""
    direction: Direction
    kind: collectives.Kind
    op: str
    group: str
    ranks: int
    device: str
    dtype: torch.dtype | None
    bytes: int
    """Size of the larger side."""
    dropped: tuple[fx.Node, ...] = ()
    round: int = 0
    """Of an all-gather: which of those of its parameter in its direction, as :attr:`Bucket.round` says."""
    level: int = 0
    """Of a reduction: how many others its members went through before, as :attr:`Bucket.level` says; of a gather 1 if what
    it sends was gathered over its own group before."""

    @property
    def waits(self) -> list[fx.Node]:
        """All waits for it."""
        return [wait for part in self.parts for wait in part.waits]


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


class _Name(NamedTuple):
    """What one launch is called."""

    entry: str | None
    """None: no entry names it, for ``reason``."""
    fqns: tuple[str, ...]
    place: int
    direction: Direction
    reason: str = ""
    round: int = 0
    level: int = 0


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
    names: dict[fx.Node, _Name] = {}
    for bucket in reading.buckets:
        known = tuple(fqn for fqn in bucket.fqns if fqn)
        owners = {entry_of.get(fqn) for fqn in known}
        first = min((place.get(fqn, 0) for fqn in known), default=0)
        if not known or len(known) < len(bucket.fqns):
            name = _Name(None, known, 0, bucket.direction, "it carries no parameter and no parameter's gradient")
        elif len(owners) > 1:
            several = ", ".join(sorted(str(owner or "no entry") for owner in owners))
            name = _Name(None, known, first, bucket.direction, f"it carries parameters of several entries: {several}")
        else:
            entry = owners.pop()
            reason = "" if entry else "no entry names its parameter"
            name = _Name(entry, known, first, bucket.direction, reason, bucket.round, bucket.level)
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


def _named(known: Mapping[fx.Node, Carried], entry_of: Mapping[fx.Node, str | None]) -> dict[fx.Node, _Name]:
    """Names of ``known`` launches, in order; what one entry gathers again is of its next round."""
    gathers: Counter[tuple[object, ...]] = Counter()
    found: dict[fx.Node, _Name] = {}
    for node, one in known.items():
        entry, number = None if one.reason else entry_of[node], 0
        if collectives.is_all_gather(node):
            group = collectives.argument(node, "group_name")
            keys = {(entry, name, one.direction, group) for name in one.names}
            if not one.again:
                number = max((gathers[key] for key in keys), default=0)
                gathers.update(keys)
        reason = one.reason or _NO_ENTRY
        level = int(one.again) if collectives.is_all_gather(node) else one.level
        found[node] = _Name(entry, one.names, one.place, one.direction, reason, number, level)
    return found


def _sort(
    graph: fx.Graph, names: Mapping[fx.Node, _Name], entries: tuple[str, ...], launching: tuple[str, ...] = ()
) -> Targets:
    order = order_of(graph)
    planned: list[Target] = []
    left: list[LeftAlone] = []
    for node, name in sorted(names.items(), key=lambda item: order.index[item[0]]):
        launch = mergeable.read(node, order) if name.entry is not None else name.reason
        if isinstance(launch, str):
            kind = str(collectives.launch_kind(node))
            left.append(LeftAlone(_describe(node, name), launch, name.direction, kind, name.fqns))
        else:
            planned.append(_target(launch, name))
    return Targets(tuple(planned), tuple(left), len(names), order, entries, launching=launching)


def _target(launch: mergeable.MergeableLaunch, name: _Name) -> Target:
    return Target(
        launch=launch.node,
        parts=launch.parts,
        entry=name.entry or "",
        fqns=name.fqns,
        place=name.place,
        direction=name.direction,
        kind=launch.kind,
        op=launch.op,
        group=launch.group,
        ranks=launch.ranks,
        device=launch.device,
        dtype=launch.dtype,
        bytes=launch.bytes,
        dropped=launch.dropped,
        round=name.round,
        level=name.level,
    )


def _describe(node: fx.Node, name: _Name) -> str:
    return f"{collectives.launch_kind(node)} of {', '.join(name.fqns) or node.name} ({name.direction})"
