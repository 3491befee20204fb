"""Nodes moved up or down in a graph, as far as what they read and who reads them allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph


class NodeMove(NamedTuple):
    """Nodes that move, in their order, to right before the node ``before``."""

    names: tuple[str, ...]
    before: str


def make_moves(moves: Sequence[NodeMove], broken: BrokenGraph) -> None:
    """Make ``moves``, one after the other."""
    for move in moves:
        # fx takes a node that is prepended out of its old place. All go before the same node, so they keep their order.
        for name in move.names:
            broken[move.before].prepend(broken[name])


def carries(node: fx.Node) -> bool:
    """Whether ``node`` only hands its input on (moved, cast, or ordered behind another node) and writes nothing."""
    return node.target is after or (moves_data(node) and not effects_of(node).acts)


def passed_on(node: fx.Node) -> list[fx.Node]:
    """``node``, and all nodes behind it that only carry its result on."""
    return reached([node], lambda one: filter(carries, one.users))


def brought_by(node: fx.Node) -> list[fx.Node]:
    """``node``, and all nodes before it that only carry something to it: the pack of a launch."""
    return reached([node], lambda one: filter(carries, one.all_input_nodes))


def earlier(seen: SeenGraph, node: fx.Node) -> NodeMove | None:
    """The move of ``node`` with its pack to as early as their inputs allow; None if they are there already."""
    own = set(brought_by(node))
    # Right behind the last source, but not among the placeholders and constants at the head of a graph.
    last = max((seen.place[source] for one in own for source in one.all_input_nodes if source not in own), default=-1)
    behind = (one for one in list(seen.graph.nodes)[last + 1 :] if one not in own and one.op not in ("placeholder", "get_attr"))
    return lifted(seen, node, next(behind))


def later(seen: SeenGraph, node: fx.Node) -> NodeMove | None:
    """The move of ``node``, with the nodes that carry its result on, to right before its first reader; None if it is there."""
    own = set(passed_on(node))
    readers = [user for one in own for user in one.users if user not in own]
    return sunk(seen, node, min(readers, key=seen.place.__getitem__)) if readers else None


def lifted(seen: SeenGraph, node: fx.Node, before: fx.Node) -> NodeMove | None:
    """The move of ``node`` with its pack to before ``before``; None if an input comes later, or if it moves over nothing."""
    own, place = set(brought_by(node)), seen.place[before]
    if any(seen.place[source] >= place for one in own for source in one.all_input_nodes if source not in own):
        return None
    # What of the pack stands before ``place`` already stays there.
    return _move(seen, own, lambda one: seen.place[one] > place, before, place, seen.place[node])


def sunk(seen: SeenGraph, node: fx.Node, before: fx.Node) -> NodeMove | None:
    """The move of ``node``, with the nodes that carry its result on, to before ``before``.

    None if the result is read before that, or if the move is over nothing.
    """
    own, place = set(passed_on(node)), seen.place[before]
    if any(seen.place[user] < place for one in own for user in one.users if user not in own):
        return None
    return _move(seen, own, lambda one: seen.place[one] < place, before, seen.place[node], place)


def _move(
    seen: SeenGraph, own: set[fx.Node], goes: Callable[[fx.Node], bool], before: fx.Node, begin: int, end: int
) -> NodeMove | None:
    """The move to ``before`` of the nodes in ``own`` for which ``goes`` is true; None if it would not change the schedule.

    ``begin`` and ``end`` are the places between which it moves.
    """
    # A schedule is the order of launches, waits and compute. To pass only nodes that carry data or keep order changes nothing,
    # and a mutant that changes nothing says nothing about the checks.
    between = list(seen.graph.nodes)[begin:end]
    if before in own or not any(
        one not in own and one.target is not after and (computes(one) or not carries(one)) for one in between
    ):
        return None
    names = tuple(one.name for one in sorted(own, key=seen.place.__getitem__) if goes(one))
    return NodeMove(names, before.name) if names else None
