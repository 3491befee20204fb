"""What nodes lead to and what leads to them: by edges, and through what is written in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.storages import base

if TYPE_CHECKING:
    from torch import fx

Item = TypeVar("Item")


def reached(starts: Iterable[Item], onward: Callable[[Item], Iterable[Item]]) -> list[Item]:
    """``starts`` and all that ``onward`` leads to from them, each once, what is nearer first."""
    queue = list(dict.fromkeys(starts))
    seen = set(queue)
    for item in queue:
        for other in onward(item):
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return queue


def ancestors(nodes: Iterable[fx.Node], given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """``nodes`` and everything that they are made of, up to what is ``given``, and without that."""
    return set(reached(nodes, lambda node: (source for source in node.all_input_nodes if source not in given)))


def readers_of(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """``starts`` and everything that is made of them, but for the graph's output."""
    return set(reached(starts, lambda node: (user for user in node.users if user.op != "output")))


def writers_in(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By storage those that write it in place, in order."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in dict.fromkeys(base(target) for target in written_arguments(node)):
            found.setdefault(storage, []).append(node)
    return found


def made_of(
    nodes: Iterable[fx.Node], writers: Mapping[fx.Node, Sequence[fx.Node]], given: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """As :func:`ancestors`, through what ``writers`` wrote before into what they are made of, too (``out[:, t] = x``)."""
    if not writers:
        return ancestors(nodes, given)

    def sources(node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            for one in (source, *(writer for writer in writers.get(base(source), ()) if writer < node)):
                if one not in given:
                    yield one

    return set(reached(nodes, sources))
