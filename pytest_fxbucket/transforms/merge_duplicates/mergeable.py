"""A launch as it may be merged with another that brings the same, or why not; when memory is written; what people call it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem

import torch
from torch import fx

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import Bucket
from pytest_fxbucket.graph.effects import effects_of, written
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.graph.order import Order
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.step.roles import Value

_FORMS = ("_coalesced", "_out", "_")
"""Endings of operators' names that are forms of one collective: coalesced, into an ``out`` buffer, in place."""


@dataclass(frozen=True, slots=True)
class MergeableLaunch:
    """One launch as the graph had it when it was read: its properties hold only until the graph changes."""

    launch: fx.Node
    kind: collectives.Kind
    index: int
    tensors: tuple[fx.Node, ...]
    """What it sends; several of a coalesced one."""
    parts: Mapping[int, fx.Node]
    """For a coalesced launch, the ``getitem`` of each part that somebody takes."""
    waits: Mapping[int, tuple[fx.Node, ...]]
    """Waits for each part, and waits on the results of those waits, in order; a launch of one tensor has part 0."""
    problem: str
    """Why it is left alone, as a clause that calls the launch "it"; empty if it may be merged."""

    @property
    def says(self) -> Hashable:
        """Operator and arguments, except the tensors sent and an ``out`` buffer: equal for launches of one collective."""
        op = overload(self.launch)
        assert op is not None
        name = op._schema.name
        for form in _FORMS:
            name = name.removesuffix(form)
        others = [a.name for a in op._schema.arguments[1:] if a.name != "out"]
        values = [collectives.argument(self.launch, other) for other in others]
        return name, *zip(others, (untwinned(v) if isinstance(v, str) else repr(v) for v in values), strict=True)


def read(launch: fx.Node, writes: GraphWrites) -> MergeableLaunch:
    """``launch``, a node that launches a collective, with its waits."""
    kind = collectives.launch_kind(launch)
    assert kind is not None
    # A second ``getitem`` of one part counts as an early reader: its waits would have to be told from those of the first.
    several = isinstance(collectives.sent_by(launch), (list, tuple))
    tensors = tuple(collectives.tensors_sent(launch))
    parts: dict[int, fx.Node] = {}
    waits: dict[int, list[fx.Node]] = {}
    early = ""
    index = writes.order.index
    for user in launch.users:
        if not several and collectives.is_wait(user):
            waits.setdefault(0, []).append(user)
        elif several and user.target is getitem and isinstance(user.args[1], int) and user.args[1] not in parts:
            parts[user.args[1]] = user
            waits[user.args[1]] = [wait for wait in user.users if collectives.is_wait(wait)]
            early = early or next((f"{n.name} reads it before its wait" for n in user.users if not collectives.is_wait(n)), "")
        else:
            early = early or f"{user.name} reads it before its wait"
    for found in waits.values():
        for wait in found:  # grows while it is walked: a wait on a wait's result waits for the same launch
            found += [user for user in wait.users if collectives.is_wait(user)]
    in_order = {part: tuple(sorted(found, key=index.__getitem__)) for part, found in waits.items()}
    sent = MergeableLaunch(launch, kind, index[launch], tensors, parts, in_order, "")
    return replace(sent, problem=_form(sent) or early or _written(sent, writes))


def _form(sent: MergeableLaunch) -> str:
    if isinstance(sent.launch.kwargs.get("out"), torch.fx.Node):
        return "it fills a buffer that it is given"
    if written(sent.launch):
        return "it works in place"
    if sent.kind == "other" or effects_of(sent.launch).chained or not sent.tensors:
        return f"{sent.launch.target} is no collective that is merged"
    return ""


def _written(sent: MergeableLaunch, writes: GraphWrites) -> str:
    # Until its last wait a collective may still read what it sends, and readers of merged launches share one result: neither
    # may be written.
    order = writes.order
    if not any(sent.waits.values()) or not all(sent.waits.values()):
        return "nobody waits for it, or for a part of it"
    end = max(order.index[wait] for waits in sent.waits.values() for wait in waits)
    for tensor in sent.tensors:
        if (writer := writes.first(tensor, sent.index, end)) is not None:
            return f"{named(writer)} what it sends before its wait"
    writing = order.writing(sent.launch)
    return f"{named(order.nodes[writing[0]])} its result" if writing else ""


# What people call a launch: its kind, the parameters that it carries, its direction.


class Labels:
    """Names of the launches of a graph. The graph is read when the first name is asked for, which must be before it changes."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        self._graph, self._inputs, self._outputs = graph, inputs, outputs

    def of(self, launch: fx.Node) -> str:
        """``all_gather of layers.0.wq.weight (forward)``; a launch without parameters is named by the nodes that it sends."""
        return f"{collectives.launch_kind(launch)} of {self.carried(launch)} ({self.direction(launch)})"

    def carried(self, launch: fx.Node) -> str:
        """FQNs of the parameters that ``launch`` carries, else the names of the nodes that it sends."""
        bucket = self._buckets.get(launch.name)
        fqns = [fqn for fqn in bucket.fqns if fqn] if bucket is not None else []
        sent = collectives.sent_by(launch)
        nodes = sent if isinstance(sent, (list, tuple)) else [sent]
        return ", ".join(fqns or [getattr(node, "name", str(node)) for node in nodes])

    def direction(self, launch: fx.Node) -> str:
        """forward, backward or optimizer."""
        bucket = self._buckets.get(launch.name)
        return bucket.direction if bucket is not None else direction_of(launch)

    @cached_property
    def _buckets(self) -> dict[str, Bucket]:
        # A graph whose bytes cannot be followed has launches all the same: they are called by names of nodes then.
        with suppress(PassError):
            return {bucket.node: bucket for bucket in read_graph(self._graph, self._inputs, self._outputs).buckets}
        return {}


# When memory of a graph is written: by operators whose schema says so, and by barriers, which may write anything.


class GraphWrites:
    """The writes of a graph as it was when ``order`` was read. Places are indices of nodes in it.

    A collective in place counts where it is launched: until its wait nobody may read what it fills.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        barred = bool(order.barriers)
        self._anywhere = [i for i, node in enumerate(order.nodes) if barred and effects_of(node).barrier]
        self._of: dict[frozenset[int], list[int]] = {}

    def last(self, node: fx.Node, begin: int, end: int) -> int | None:
        """Place of the last write, strictly between ``begin`` and ``end``, to the memory of ``node``'s result; None if none."""
        places = self._writing_places(node)
        at = bisect_left(places, end) - 1
        return places[at] if at >= 0 and places[at] > begin else None

    def first(self, node: fx.Node, begin: int, end: int) -> fx.Node | None:
        """The first node strictly between ``begin`` and ``end`` that writes the memory of ``node``'s result; None if none."""
        places = self._writing_places(node)
        at = bisect_right(places, begin)
        return self.order.nodes[places[at]] if at < len(places) and places[at] < end else None

    def _writing_places(self, node: fx.Node) -> list[int]:
        storages = self.order.storages(node)
        if storages not in self._of:
            self._of[storages] = sorted({*self.order.writing(node), *self._anywhere}) if storages else []
        return self._of[storages]


def named(writer: fx.Node) -> str:
    """``writer`` as the subject of a sentence on what it writes."""
    may = " may" if effects_of(writer).barrier else ""
    return f"{writer.name} ({writer.target}){may} write{'' if may else 's'}"
