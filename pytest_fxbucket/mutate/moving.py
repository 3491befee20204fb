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

    from pytest_fxbucket.mutate.operator import Broken, Seen


class Move(NamedTuple):
    """Nodes that go, in their order, to right before another."""

    names: tuple[str, ...]
    before: str


def make_moves(moves: Sequence[Move], broken: Broken) -> None:
    """Move what ``moves`` say, one after the other."""
    for move in moves:
        for name in move.names:
            broken[move.before].prepend(broken[name])


def carries(node: fx.Node) -> bool:
    """Whether ``node`` gives only what it is given, moved, cast, or put behind something else; it writes nothing."""
    return node.target is after or (moves_data(node) and not effects_of(node).acts)


def passed_on(node: fx.Node) -> list[fx.Node]:
    """``node``, and all that only carry what it gives."""
    return reached([node], lambda one: filter(carries, one.users))


def brought_by(node: fx.Node) -> list[fx.Node]:
    """``node``, and all that only carry something to it: the pack of a launch."""
    return reached([node], lambda one: filter(carries, one.all_input_nodes))


def earlier(seen: Seen, node: fx.Node) -> Move | None:
    """``node`` as early as all that it needs allows, its pack with it; None if it stands there already."""
    own = set(brought_by(node))
    last = max((seen.place[source] for one in own for source in one.all_input_nodes if source not in own), default=-1)
    behind = (one for one in list(seen.graph.nodes)[last + 1 :] if one not in own and one.op not in ("placeholder", "get_attr"))
    return lifted(seen, node, next(behind))


def later(seen: Seen, node: fx.Node) -> Move | None:
    """``node`` with what carries what it gives to right before who first reads that; None if it stands there already."""
    own = set(passed_on(node))
    readers = [user for one in own for user in one.users if user not in own]
    return sunk(seen, node, min(readers, key=seen.place.__getitem__)) if readers else None


def lifted(seen: Seen, node: fx.Node, before: fx.Node) -> Move | None:
    """``node`` with its pack right before ``before``; None if it needs what comes later, or moves over nothing."""
    own, place = set(brought_by(node)), seen.place[before]
    if any(seen.place[source] >= place for one in own for source in one.all_input_nodes if source not in own):
        return None
    return _move(seen, own, lambda one: seen.place[one] > place, before, place, seen.place[node])


def sunk(seen: Seen, node: fx.Node, before: fx.Node) -> Move | None:
    """``node`` with what carries what it gives right before ``before``; None if it is read before, or moves over nothing."""
    own, place = set(passed_on(node)), seen.place[before]
    if any(seen.place[user] < place for one in own for user in one.users if user not in own):
        return None
    return _move(seen, own, lambda one: seen.place[one] < place, before, seen.place[node], place)


def _move(seen: Seen, own: set[fx.Node], goes: Callable[[fx.Node], bool], before: fx.Node, begin: int, end: int) -> Move | None:
    """What of ``own`` goes to ``before``, if something that matters to a schedule stands between ``begin`` and ``end``."""
    between = list(seen.graph.nodes)[begin:end]
    if before in own or not any(
        one not in own and one.target is not after and (computes(one) or not carries(one)) for one in between
    ):
        return None
    names = tuple(one.name for one in sorted(own, key=seen.place.__getitem__) if goes(one))
    return Move(names, before.name) if names else None
