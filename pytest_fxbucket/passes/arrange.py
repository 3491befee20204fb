"""One order of all nodes, out of where each wishes to stand and what it depends on: only what must move moves.

A node wishes to stand where it stood. It is put there, or right behind the last node that it depends on. What a launch needs
is pulled up with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.circles import Edges


def arranged(edges: Edges, wishes: Sequence[float]) -> list[int]:
    """The items of ``edges`` in an order that keeps them, as near to ``wishes`` (by item) as that lets them.

    Equal wishes stand in order of dependence, then of number. O(edges + items log items), near-linear where most
    wishes ascend. Raises :class:`PassError` for items that form a circle.
    """
    place: dict[int, float] = {}
    opened: set[int] = set()
    stack = sorted(edges, reverse=True)
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
    found = {start: None}
    queue = [start]
    for index in queue:
        fresh = [reader for reader in after[index] if reader < bound and reader not in found]
        found.update(dict.fromkeys(fresh))
        queue.extend(fresh)
    return queue


def readers(order: Order) -> list[list[int]]:
    """For each node those that must stay behind it."""
    after: list[list[int]] = [[] for _ in order.nodes]
    for index, before in enumerate(order.before):
        for earlier in before:
            after[earlier].append(index)
    return after


def _needs(order: Order, starts: Iterable[int], place: float) -> list[int]:
    """``starts`` and what they need, as far as it stands at or behind ``place``; what may not move is not looked behind."""
    first = set(starts)
    queue = [index for index in sorted(first) if index >= place]
    seen = set(queue)
    for index in queue:
        if index in first or _may_move(order.nodes[index]):
            fresh = [earlier for earlier in order.before[index] if earlier >= place and earlier not in seen]
            seen.update(fresh)
            queue.extend(fresh)
    return queue


def relink(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Put the nodes of ``graph`` in the order of ``nodes``, all of them; those that stand right already are not touched."""
    at = next(iter(graph.nodes))
    for node in nodes:
        if node is at:
            at = at.next
        else:
            at.prepend(node)


def _may_move(node: fx.Node) -> bool:
    """Launches, waits, writes, random numbers and barriers have places of their own."""
    if node.op != "call_function" or collectives.is_wait(node) or collectives.launch_kind(node) is not None:
        return False
    does = effects_of(node)
    return not (does.writes or does.everything or does.random or does.chained or does.barrier)
