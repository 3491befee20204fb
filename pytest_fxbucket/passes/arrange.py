"""One order of all nodes, out of where each wishes to stand and what it depends on: only what must move moves.

A node wishes to stand where it stood. It is put there, or right behind the last node that it depends on. What a launch needs
is pulled up with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.targets import MergeTarget


def arranged(edges: Edges, wishes: Sequence[float]) -> list[int]:
    """The items of ``edges``, each behind all that it depends on, and as near to its wish (``wishes``, by item) as that allows.

    Equal wishes stand in order of dependence, then of number. O(edges + items log items), near-linear where most
    wishes ascend. Raises :class:`PassError` for items that form a circle.
    """
    # An item's place is the latest wish among itself and all that it depends on. So no item has an earlier place than what it
    # depends on, and sorting by place is enough. Items of one place keep the order in which they got it, which is one of
    # dependence.
    place: dict[int, float] = {}
    opened: set[int] = set()
    stack = sorted(edges, reverse=True)  # the smallest number on top, to be placed first
    while stack:  # an item behind all that it depends on: depth first, without recursion
        item = stack.pop()
        latest, missing = wishes[item], []
        for source in edges[item]:
            if source not in place:
                missing.append(source)
            elif place[source] > latest:
                latest = place[source]
        if not missing:
            place[item] = latest
        elif item in opened:  # all that it missed stood above it on the stack
            raise PassError("no order can be had: nodes and buckets wait for each other in a circle")
        elif item not in place:
            opened.add(item)
            stack += (item, *sorted(missing, reverse=True))
    return sorted(place, key=place.__getitem__)  # stable: what is equal stays in order of dependence


def pull_up(order: Order, wishes: list[float], starts: Sequence[int], place: float) -> None:
    """Let the nodes ``starts``, and what they need, wish to stand at ``place``, or as early as what may not move allows."""
    blocked = blocker(order, starts, place)
    # Nodes that nobody moves stand at whole numbers, so this is right behind what may not move.
    place = place if blocked is None else blocked + 0.5
    for index in _needs(order, starts, place):
        wishes[index] = min(wishes[index], place)


def blocker(order: Order, starts: Iterable[int], place: float) -> int | None:
    """The last node at or behind ``place`` that ``starts`` need and that may not move; None if there is none."""
    first = set(starts)
    needs = _needs(order, first, place)
    return max((i for i in needs if i not in first and not _may_move(order.nodes[i])), default=None)


def readers_before(after: Sequence[Sequence[int]], start: int, bound: int) -> list[int]:
    """What depends on the node ``start`` and stands before ``bound``, ``start`` first; ``after`` has the readers of each."""
    return reached([start], lambda index: (reader for reader in after[index] if reader < bound))


def readers(order: Order) -> list[list[int]]:
    """For each node those that must stay behind it."""
    after: list[list[int]] = [[] for _ in order.nodes]
    for index, before in enumerate(order.before):
        for earlier in before:
            after[earlier].append(index)
    return after


def _needs(order: Order, starts: Iterable[int], place: float) -> list[int]:
    """``starts`` and what they need at or behind ``place``; what stands behind a needed node that may not move is left out."""
    first = set(starts)

    def onward(index: int) -> Iterable[int]:
        free = index in first or _may_move(order.nodes[index])
        return (earlier for earlier in order.before[index] if earlier >= place) if free else ()

    return reached((index for index in sorted(first) if index >= place), onward)


def relink(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Put the nodes of ``graph`` in the order of ``nodes``, all of them; those that stand right already are not touched."""
    # All nodes before ``at`` stand in the new order already, so a node that is ``at`` itself is right where it is.
    at = next(iter(graph.nodes))
    for node in nodes:
        if node is at:
            at = at.next
        else:
            at.prepend(node)


def _may_move(node: fx.Node) -> bool:
    """Launches, waits, writes, random numbers and barriers have places of their own."""
    return node.op == "call_function" and not collectives.communicates(node) and not effects_of(node).acts


# Buckets that are each free of dependence can still wait for each other in a circle (a1 before b1, b2 before a2).
#
# The strongly connected components of the graph with every bucket drawn together to one launch and one wait are those circles.
# Only buckets that lie on one are split.


Group = tuple["MergeTarget", ...]
Edges = Mapping[int, Collection[int]]
"""For each item the items that it depends on."""


def without_circles(order: Order, groups: Sequence[Group]) -> list[list[tuple[Group, tuple[Group, ...]]]]:
    """The parts of each of ``groups``, so that no circle is left; only what lies on one is parted.

    Each part comes with the other groups on its circles, with none if its group stayed whole. Members of a group must not
    depend on each other.
    """
    edges = drawn_together(order.before, drawn(order, groups))
    if is_acyclic(edges):
        return [[(group, ())] for group in groups]
    import networkx  # type: ignore[import-untyped]  # slow to import, and circles are rare

    circles = networkx.strongly_connected_components(networkx.DiGraph(edges))
    circle_of = {item: number for number, circle in enumerate(circles) if len(circle) > 1 for item in circle}
    # ``drawn`` names nothing of a group of one launch, which cannot be parted: it counts as on no circle.
    on = [{circle_of[head] for head in drawn(order, [group]).values() if head in circle_of} for group in groups]
    # Groups on no circle stay whole. The others join them one by one, and each is split only where it would close a circle with
    # what has joined before. The largest come first, so that the smaller ones are split.
    kept = [group for group, circles in zip(groups, on, strict=True) if not circles]
    parts_of = {number: [group] for number, group in enumerate(groups)}
    for number in sorted(
        (number for number, circles in enumerate(on) if circles),
        key=lambda number: (-sum(t.bytes for t in groups[number]), order.index[groups[number][0].launch]),
    ):
        parts_of[number] = _parted(order, kept, groups[number])
        kept += parts_of[number]

    def others(number: int) -> tuple[Group, ...]:
        if len(parts_of[number]) == 1:
            return ()
        return tuple(group for i, group in enumerate(groups) if i != number and not on[i].isdisjoint(on[number]))

    return [[(part, others(number)) for part in parts] for number, parts in sorted(parts_of.items())]


def _parted(order: Order, others: Sequence[Group], group: Group) -> list[Group]:
    """``group`` in parts that make no circle with ``others``: each member joins the first part that it can."""
    parts: list[list[MergeTarget]] = []
    for target in group:
        for part in parts:
            trial = [*others, *map(tuple, (p for p in parts if p is not part)), (*part, target)]
            if is_acyclic(drawn_together(order.before, drawn(order, trial))):
                part.append(target)
                break
        else:
            parts.append([target])
    return [tuple(part) for part in parts]


def drawn(order: Order, groups: Iterable[Group]) -> dict[int, int]:
    """By index, each launch of a bucket with the index of the bucket's first launch, and each wait with that of its first wait.

    Merging makes one node of these launches, and one of these waits.
    """
    found: dict[int, int] = {}
    for group in groups:
        if len(group) > 1:
            for nodes in ([target.launch for target in group], [wait for target in group for wait in target.waits]):
                indices = sorted(order.index[node] for node in nodes)
                found.update(dict.fromkeys(indices, indices[0]))
    return found


def drawn_together(before: Sequence[Iterable[int]], item_of: Mapping[int, int]) -> Edges:
    """The dependencies with nodes drawn together as ``item_of`` says; a node that it does not name is an item of its own."""
    edges: dict[int, set[int]] = {}
    for index, earlier in enumerate(before):
        item = item_of.get(index, index)
        mine = edges.setdefault(item, set())
        for other in earlier:
            source = item_of.get(other, other)
            if source != item:
                mine.add(source)
    return edges


def is_acyclic(edges: Edges) -> bool:
    """Whether the items can be put in an order: each in turn, and where a source is missing, right behind that.

    (A. B. Kahn, Topological sorting of large networks, 1962, with the items tried in order: most are ready, which makes it ten
    times as quick as :mod:`graphlib` on every graph that a pass is given.)
    """
    done: set[int] = set()
    waiting: dict[int, list[int]] = {}
    for start in edges:
        ready = [start]
        while ready:
            item = ready.pop()
            missing = next((source for source in edges[item] if source not in done), None)
            if missing is None:
                done.add(item)
                ready += waiting.pop(item, ())
            else:
                waiting.setdefault(missing, []).append(item)
    return not waiting
