"""Updates as soon as they can be: behind the wait for the last reduction that each needs, before anything else goes on.

What they need besides, and nobody had needed before, comes with them. What needs the reductions of several entries (a norm over
all gradients, one parameter group for all entries) waits for the last of those: often that is where it stood.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import REDUCTIONS, communicates
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.update_provenance import ON_LISTS
from pytest_fxbucket.graph.updates import Ready, readiness, updates_between
from pytest_fxbucket.passes.targets import UntouchedLaunch
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.merge import Merged


def tell_apart(order: Order, wishes: list[float], found: Sequence[int]) -> None:
    """Let each node wish for the place that it has in the order ``found``, which its wishes lead to.

    Nodes of one place share one still, from a launch, wait or compute to the next: an update must know which it passes.
    """
    settled: list[float] = []
    for index, before in enumerate(order.before):
        settled.append(max(wishes[index], max((settled[source] for source in before), default=-1.0)))
    place, last = 0, -1.0
    for position, index in enumerate(found):
        if settled[index] != last or communicates(order.nodes[index]) or computes(order.nodes[index]):
            place, last = position, settled[index]
        wishes[index] = float(place)


def hoist_updates(order: Order, wishes: list[float], updating: Set[int], waits: Mapping[int, str]) -> list[int]:
    """Let ``updating`` nodes wish to stand right behind the wait for the last reduction that they need; gives those that move.

    ``waits`` has the waits for the planned reductions with their entries. ``wishes`` are the places that nodes will have,
    and launches, waits and computes of one place are told apart (:func:`tell_apart`).
    """
    found = readiness(order, updating, waits, wishes)
    others = sorted(_others(order, wishes, updating, waits))
    # Only an update that gets past a launch, a wait or compute of the backward wins anything by moving.
    moved = [i for i, one in found.items() if bisect_right(others, one.place) < bisect_left(others, wishes[i])]
    for index in moved:
        wishes[index] = found[index].place
    # What these need, and needs no reduction itself (a step count, a learning rate), comes along.
    # From the last on, so that a source has its own new wish when its sources follow it.
    for index in sorted(updating, reverse=True):
        for source in order.before[index]:
            if source in updating and source not in found:
                wishes[source] = min(wishes[source], wishes[index])
    return moved


def kept_pairs(
    order: Order, wishes: Sequence[float], moved: Sequence[int], waits: Set[int]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(update, wait behind it) for each place where updates were moved to: the last of them that gives a tensor."""
    last = {wishes[i]: i for i in sorted(moved) if isinstance(order.nodes[i].meta.get("val"), torch.Tensor)}
    behind = sorted((wishes[i], i) for i in waits)
    for place, index in last.items():
        at = bisect_right(behind, (place, len(order.nodes)))  # behind every wait of that very place
        if at < len(behind):
            yield order.nodes[index], order.nodes[behind[at][1]]


def why_late(order: Order, updating: Set[int], waits: Mapping[int, str]) -> tuple[UntouchedLaunch, ...]:
    """Updates that cannot run with one entry, since they need the reductions of several; one reason for each set of entries."""
    if not updating:
        return (UntouchedLaunch("updates", 'updates = "ready", but no update of a parameter was found in the graph'),)
    first: dict[frozenset[str], Ready] = {}
    for one in readiness(order, updating, waits).values():
        if one.joins >= 0:
            first.setdefault(one.entries, one)
    return tuple(UntouchedLaunch(f"updates of {some(sorted(one.entries))}", _why(order, one)) for one in first.values())


def updates_behind(graph: fx.Graph, updating: Set[fx.Node], buckets: Sequence[Merged]) -> list[tuple[str, ...]]:
    """For each of ``buckets`` the other entries of which an update stands between its launch and its first wait, in order."""
    if not updating:
        return [() for _ in buckets]
    order = order_of(graph)
    found = readiness(order, {order.index[node] for node in updating}, waits_of(order, buckets))
    spans = [(order.index[b.launch], min(order.index[wait] for wait in b.waits), _name(b)) for b in buckets]
    return updates_between(found, spans)


def waits_of(order: Order, buckets: Sequence[Merged]) -> dict[int, str]:
    """Waits for the reductions among ``buckets`` by index, with their entries; by size, each bucket's own name."""
    return {order.index[wait]: _name(bucket) for bucket in buckets if bucket.first.kind in REDUCTIONS for wait in bucket.waits}


def _name(bucket: Merged) -> str:
    return bucket.first.entry or bucket.launch.name


def _others(order: Order, places: Sequence[float], updating: Set[int], waits: Mapping[int, str]) -> Iterator[float]:
    """Places of all that an update should not stand behind without need: launches, waits, and compute of the backward."""
    behind: set[int] = set()
    for index, (node, before) in enumerate(zip(order.nodes, order.before, strict=True)):
        # What needs a reduced gradient works for the optimizer, and holds no update back.
        if index in waits or not behind.isdisjoint(before):
            behind.add(index)
        if index not in updating and (communicates(node) or (computes(node) and index not in behind)):
            yield places[index]


def _why(order: Order, one: Ready) -> str:
    node = order.nodes[one.joins]
    name = operator_name(node)
    if name.startswith(ON_LISTS) and "norm" not in name:
        return (
            f"one parameter group has parameters of several entries ({node.name} updates them together), so they wait for the "
            'last of their reductions; [optimizer] groups = "entry" gives each entry its own'
        )
    return f"they need the reductions of all of these, of which {node.name} makes one value, as clipping by a global norm does"
