"""Which nodes lead to a node, and where it leads: along edges, and through writes in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.storages import base

if TYPE_CHECKING:
    from torch import fx

Item = TypeVar("Item")


def walked(starts: Iterable[Item], onward: Callable[[Item], Iterable[Item]]) -> Iterator[Item]:
    """``starts`` and all that ``onward`` leads to from them, each once, nearer ones first, for walks that may end early."""
    queue = list(dict.fromkeys(starts))
    seen = set(queue)
    for item in queue:  # The list grows while it is walked, which makes it the queue of a breadth-first search.
        yield item
        for other in onward(item):
            if other not in seen:
                seen.add(other)
                queue.append(other)


def reached(starts: Iterable[Item], onward: Callable[[Item], Iterable[Item]]) -> list[Item]:
    """All of :func:`walked`."""
    return list(walked(starts, onward))


def ancestors(nodes: Iterable[fx.Node], given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """``nodes`` and all nodes that lead to them; the walk stops at the nodes ``given``, which are left out."""
    return set(reached(nodes, lambda node: (source for source in node.all_input_nodes if source not in given)))


def readers_of(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """``starts`` and all nodes that they lead to, without the graph's output."""
    return set(reached(starts, lambda node: (user for user in node.users if user.op != "output")))


def writers_in(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By storage (:func:`~pytest_fxbucket.graph.storages.base`) the nodes that write it in place, in order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in dict.fromkeys(base(target) for target in written_arguments(node)):
            found.setdefault(storage, []).append(node)
    return found


def made_of(
    nodes: Iterable[fx.Node], writers: Mapping[fx.Node, Sequence[fx.Node]], given: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Like :func:`ancestors`, but through writes in place, too (``out[:, t] = x``).

    Whoever reads a storage is led to by its input and by all ``writers`` of that storage that stand before the reader.
    """
    if not writers:
        return ancestors(nodes, given)

    def sources(node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            for one in (source, *(writer for writer in writers.get(base(source), ()) if writer < node)):
                if one not in given:
                    yield one

    return set(reached(nodes, sources))
