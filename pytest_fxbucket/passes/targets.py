"""Which launches belong to which entry: by the parameter that they carry (plans), by module metadata, or by size alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_fxbucket.compat.c10d import group_ranks
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import ROWS, Collective
from pytest_fxbucket.graph.follow import hint
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.graph.storages import writes_beside
from pytest_fxbucket.passes.carried import LaunchContents, carried
from pytest_fxbucket.passes.module_names import ModuleStackFn, entries_by_module

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.step.roles import Direction, Value


Ends = tuple[Sequence["Value"], Sequence["Value"]]
_NO_ENTRY = "no entry names its module"


@dataclass(frozen=True, slots=True)
class UntouchedLaunch:
    """A launch that was not merged or not moved, and why."""

    what: str
    reason: str
    direction: str = ""
    kind: str = ""
    """Of a launch that was not merged; empty of one that was not moved."""
    fqns: tuple[str, ...] = ()
    """Parameters that it carries, as far as any are known."""


class LaunchTensor(NamedTuple):
    """One tensor of a launch; a coalesced launch has several."""

    input: fx.Node
    waits: tuple[fx.Node, ...]
    """All waits of its result, usually one: each one's readers get the unpacked result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeTarget(Collective):
    """One launch that an entry names and that may share a bucket."""

    launch: fx.Node
    parts: tuple[LaunchTensor, ...]
    ranks: int
    """Of the group; 0 if an all-reduce runs on a group that this process does not know."""
    device: str
    dropped: tuple[fx.Node, ...]
    """What goes with the launch besides its waits: parts of a coalesced result, a buffer of its own."""
    entry: str
    fqns: tuple[str, ...]
    """Parameters that it carries, or whose gradients it reduces; in byte order."""
    place: int
    """Index of its first parameter in the order of registration."""
    direction: Direction
    round: int
    """Of an all-gather: how many gathers of its parameter stand before it in its direction, as :attr:`Bucket.round`."""
    level: int
    """Of a reduction: how many others its members went through before, as :attr:`Bucket.level`. Of an all-gather: 1 if what it
    sends was gathered over its own group before, else 0."""
    together: str = ""
    """Name that the bucketer gives it: only launches of one name share a bucket."""

    @property
    def waits(self) -> list[fx.Node]:
        """All waits for it."""
        return [wait for part in self.parts for wait in part.waits]


@dataclass(frozen=True, slots=True)
class Targets:
    """Every launch of a graph, sorted into what a plan names and what it does not."""

    planned: tuple[MergeTarget, ...]
    """In order of launch."""
    left_alone: tuple[UntouchedLaunch, ...]
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

    ``outputs`` has a role for each value that the graph returns; without it :attr:`Targets.ends` stays None.

    ``reading`` is of ``graph``, or of the graph it was copied from: nodes are found by name.
    """
    place = {fqn: i for i, fqn in enumerate(entry_of)}
    nodes = {node.name: node for node in graph.nodes}
    names: dict[fx.Node, LaunchContents] = {}
    for bucket in reading.buckets:
        # A member without an FQN is no parameter, and no parameter's gradient.
        known = tuple(fqn for fqn in bucket.fqns if fqn)
        owners = {entry_of.get(fqn) for fqn in known}
        first = min((place.get(fqn, 0) for fqn in known), default=0)
        if not known or len(known) < len(bucket.fqns):
            name = LaunchContents(known, 0, bucket.direction, "it carries no parameter and no parameter's gradient")
        elif len(owners) > 1:
            several = ", ".join(sorted(str(owner or "no entry") for owner in owners))
            name = LaunchContents(known, first, bucket.direction, f"it carries parameters of several entries: {several}")
        else:
            entry = owners.pop()
            reason = "" if entry else "no entry names its parameter"
            name = LaunchContents(known, first, bucket.direction, reason, bucket.level, entry=entry, round=bucket.round)
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


def _named(known: Mapping[fx.Node, LaunchContents], entry_of: Mapping[fx.Node, str | None]) -> dict[fx.Node, LaunchContents]:
    """``known`` launches, in order, with their entries. When an entry gathers a parameter again, that is its next round."""
    gathers: Counter[tuple[object, ...]] = Counter()
    found: dict[fx.Node, LaunchContents] = {}
    for node, one in known.items():
        entry, number, level = None if one.reason else entry_of[node], 0, one.level
        if collectives.is_all_gather(node):
            group, level = collectives.argument(node, "group_name"), int(one.again)
            keys = {(entry, name, one.direction, group) for name in one.fqns}
            # A gather of what its group gathered before is no round: grouping keeps those apart by their level.
            if not one.again:
                number = max((gathers[key] for key in keys), default=0)
                gathers.update(keys)
        found[node] = one._replace(entry=entry, reason=one.reason or _NO_ENTRY, round=number, level=level)
    return found


def _sort(
    graph: fx.Graph, names: Mapping[fx.Node, LaunchContents], entries: tuple[str, ...], launching: tuple[str, ...] = ()
) -> Targets:
    order = order_of(graph)
    planned: list[MergeTarget] = []
    left: list[UntouchedLaunch] = []
    for node, name in sorted(names.items(), key=lambda item: order.index[item[0]]):
        target = mergeable(node, order, name) if name.entry is not None else name.reason
        if isinstance(target, str):
            kind = str(collectives.launch_kind(node))
            what = f"{kind} of {', '.join(name.fqns) or node.name} ({name.direction})"
            left.append(UntouchedLaunch(what, target, name.direction, kind, name.fqns))
        else:
            planned.append(target)
    return Targets(tuple(planned), tuple(left), len(names), order, entries, launching=launching)


# Which launches can share a bucket at all: their tensors, waits and process group; and of the others, why not.


def mergeable(node: fx.Node, order: Order, carried: LaunchContents) -> MergeTarget | str:
    """``node``, which carries ``carried``, as a launch that may share a bucket, or a sentence on why it may not.

    Raises :class:`PassError` if what it sends carries no fake value.
    """
    said = collectives.read_launch(node)
    assert said is not None
    if operator_name(node) not in collectives.MERGED:
        return f"{node.target} is not bucketed"
    # An all-reduce does not say how many ranks it has: only its group knows.
    ranks = _ranks_of(said.group) if said.kind == "all_reduce" else said.ranks
    if not isinstance(ranks, int):
        return f"its group size {ranks} is no number"
    if not isinstance(collectives.argument(node, "group_name"), str):
        return "its process group is no constant"
    if ranks == 1:
        return "its process group has one rank"
    inputs = collectives.tensors_sent(node)
    if not inputs:
        return "it sends nothing"
    bare = next((tensor for tensor in inputs if not isinstance(_value(tensor), torch.Tensor)), None)
    if bare is not None:
        raise PassError(f"{bare.name} carries no fake value (meta['val']), which merging {node.name} needs for its shape")
    parts, dropped, problem = _parts(node, inputs)
    if not problem:
        buffers, problem = _buffer(node)
        dropped += buffers
    problem = problem or _changed_in_flight(node, parts, order)
    if problem:
        return problem
    values = [_value(part.input) for part in parts]
    dtypes = {value.dtype for value in values}
    size = sum(hinted_numel(value) * value.dtype.itemsize for value in values)
    return MergeTarget(
        kind=said.kind,
        op=said.op,
        group=said.group,
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        # The larger side: of a gather that is what arrives.
        bytes=size * (ranks if ROWS[said.kind].brings == "all parts" else 1),
        launch=node,
        parts=parts,
        ranks=ranks,
        device=str(values[0].device),
        dropped=dropped,
        entry=carried.entry or "",
        fqns=carried.fqns,
        place=carried.place,
        direction=carried.direction,
        round=carried.round,
        level=carried.level,
    )


def _ranks_of(group: str) -> int:
    try:
        return len(group_ranks(group))
    except KeyError:
        return 0


def hinted_numel(value: torch.Tensor) -> int:
    """Elements of ``value``; of symbolic sizes their hints."""
    return math.prod(map(hint, value.shape))


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _parts(node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[tuple[LaunchTensor, ...], tuple[fx.Node, ...], str]:
    """Parts of the launch, the getitems between it and its waits, and what is wrong with them."""
    # A coalesced launch gives a list: the waits stand behind one getitem for each tensor. A plain launch is waited for itself.
    results: list[list[fx.Node]] = [[] for _ in inputs]
    dropped: list[fx.Node] = []
    coalesced = isinstance(collectives.sent_by(node), (list, tuple))
    for user in node.users:
        if not coalesced and collectives.is_wait(user):
            results[0].append(user)
        elif coalesced and user.op == "call_function" and user.target is getitem and isinstance(user.args[1], int):
            dropped.append(user)
            early = next((reader for reader in user.users if not collectives.is_wait(reader)), None)
            if early is not None:
                return (), (), f"{early.name} reads it before its wait"
            results[user.args[1]] += user.users
        else:
            return (), (), f"{user.name} reads it before its wait"
    if not all(results):
        return (), (), "nobody waits for it" if not any(results) else "nobody waits for a part of it"
    parts = tuple(LaunchTensor(tensor, tuple(waits)) for tensor, waits in zip(inputs, results, strict=True))
    return parts, tuple(dropped), ""


def _buffer(node: fx.Node) -> tuple[tuple[fx.Node, ...], str]:
    """The buffer of an ``_out`` form, if the launch alone uses it; else what keeps the launch from giving it up."""
    buffer = node.kwargs.get("out")
    if not isinstance(buffer, torch.fx.Node):
        return (), ""
    other = next((user for user in buffer.users if user is not node), None)
    if other is not None:
        return (), f"its buffer {buffer.name} is read elsewhere, by {other.name}"
    if operator_name(buffer) not in ("aten::empty", "aten::new_empty", "aten::empty_like"):
        return (), f"its buffer {buffer.name} is no new one"
    return (buffer,), ""


def _changed_in_flight(node: fx.Node, parts: Sequence[LaunchTensor], order: Order) -> str:
    """Say what writes the launch's input before its wait, as then nobody knows what arrives; empty if nothing does."""
    begin = order.index[node]
    for part in parts:
        end = min(order.index[wait] for wait in part.waits)
        writers = (order.nodes[i] for i in order.writing(part.input) if begin < i < end)
        if (writer := next((one for one in writers if not writes_beside(one, part.input)), None)) is not None:
            return f"{writer.name} writes what it sends before its wait"
    return ""
