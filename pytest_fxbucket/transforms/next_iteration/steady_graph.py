"""Where the block of the call before stands in the steady graph: launched first, finished as late as the forward allows.

Reductions are launched behind the gathers that stand before the first wait, so that no such gather queues behind a reduction.
The nodes behind a reduction stand right before the first launch or compute that needs one of them. Where reductions follow each
other, as in hybrid sharding, each gets an equal share of the compute in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from torch import fx

from pytest_fxbucket.graph.collectives import is_wait, launch_kind, waits_of
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.passes.arrange import arranged, relink

_LAUNCHED, _FINISHED = 0.75, 0.5
"""How far before its target a launch, or another node of the block, wishes to stand; nodes that stay are 1 apart."""


def place_late(
    graph: fx.Graph, block: Iterable[fx.Node], launches: Mapping[fx.Node, int], parameters: Iterable[fx.Node]
) -> list[int]:
    """Reorder the steady ``graph``, in which the nodes ``block`` stand first; gives how much compute hides each launch.

    That is the number of compute nodes outside the block between a launch and its first wait. ``launches`` are the block's
    reductions with their levels, ``parameters`` the inputs that are parameters.
    """
    order = order_of(graph)
    own = {order.index[node] for node in block}
    places = _Places(order, own, {order.index[launch]: level for launch, level in launches.items()}, set(parameters))
    nodes = [order.nodes[i] for i in arranged(dict(enumerate(order.before)), places.wished_places())]
    relink(graph, nodes)
    graph.lint()
    at = {node: number for number, node in enumerate(nodes)}
    rest = [at[node] for i, node in enumerate(order.nodes) if i not in own and computes(node)]
    ends = {launch: min((at[wait] for wait in waits_of(launch)), default=at[launch]) for launch in launches}
    return [sum(at[launch] < place < end for place in rest) for launch, end in ends.items()]


class _Places:
    """Where nodes wish to stand. Nodes are named by their index in the graph before it is reordered."""

    def __init__(self, order: Order, own: set[int], launches: Mapping[int, int], parameters: set[fx.Node]) -> None:
        self.order, self.own, self.launches, self.parameters = order, own, launches, parameters
        self.end = len(order.nodes) - 1

    def wished_places(self) -> list[float]:
        """The place that each node wishes for; a node that is not of the block wishes to stay where it stands."""
        # From the last to the first, so that a node knows the earliest wish among those that must stand behind it.
        wishes = [float(index) for index in range(len(self.order.nodes))]
        sooner: dict[int, float] = {}
        last = max(self.anchors.values(), default=self.end)
        for i in sorted(self.own, reverse=True):
            if i in self.launches:
                wishes[i] = self._launched(i)
            else:
                place = self.anchors[self.groups[i]] if i in self.groups else min(self.needed[i], last)
                wishes[i] = min(place - _FINISHED, sooner.get(i, float(self.end)))
            for source in self.order.before[i]:
                sooner[source] = min(sooner.get(source, wishes[i]), wishes[i])
        return wishes

    @cached_property
    def needed(self) -> list[int]:
        """For each node, the first launch or compute outside the block that needs it, or the output."""
        found = [self.end] * len(self.order.nodes)
        for i in range(self.end, -1, -1):
            stays = i not in self.own and (launch_kind(self.order.nodes[i]) is not None or computes(self.order.nodes[i]))
            first = i if stays else found[i]
            for earlier in self.order.before[i]:
                found[earlier] = min(found[earlier], first)
        return found

    @cached_property
    def groups(self) -> dict[int, int]:
        """Group of each node behind a reduction; reductions with a node behind both are one group, named by its first index."""
        # Union-find: a node behind two groups joins them.
        group = {i: i for i in self.launches}
        found: dict[int, int] = {}
        for i in sorted(self.own):
            behind = {_root(group, found[source]) for source in self.order.before[i] if source in found}
            behind |= {_root(group, i)} if i in self.launches else set()
            if behind:
                found[i] = min(behind)
                group.update(dict.fromkeys(behind, found[i]))
        return {i: _root(group, first) for i, first in found.items()}

    @cached_property
    def anchors(self) -> dict[int, int]:
        """For each group, the first launch or compute outside the block that needs any of its nodes, or the output."""
        found: dict[int, int] = {}
        for i, group in self.groups.items():
            found[group] = min(found.get(group, self.end), self.needed[i])
        return found

    @cached_property
    def top(self) -> int:
        """The first node outside the block that waits, or computes with a value of the block or an ungathered parameter."""
        direct = set(self.parameters)
        for i, node in enumerate(self.order.nodes):
            if i in self.own or (moves_data(node) and not direct.isdisjoint(node.all_input_nodes)):
                direct.add(node)
            elif is_wait(node) or (computes(node) and not direct.isdisjoint(node.all_input_nodes)):
                return i
        return self.end

    def _launched(self, launch: int) -> float:
        # Level 0 is launched at the top. Each further level stands behind its share of the compute between there and the
        # anchor, so that the level before it has the same share to hide behind.
        anchor, level = self.anchors[self.groups[launch]], self.launches[launch]
        if not level or anchor <= self.top:
            return min(self.top, anchor) - _LAUNCHED
        levels = 1 + max(self.launches[i] for i in self.launches if self.groups[i] == self.groups[launch])
        between = [i for i in range(self.top, anchor) if i not in self.own and computes(self.order.nodes[i])]
        at = between[len(between) * level // levels] if between else anchor
        return at - _FINISHED


def _root(group: Mapping[int, int], number: int) -> int:
    while group[number] != number:
        number = group[number]
    return number
