"""Writes in place near what a pass moves. FX edges carry no order between them, so a pass must not guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import is_view, returns_written, written_arguments

if TYPE_CHECKING:
    from torch import fx


def refuse_writes(graph: fx.Graph, launches: Sequence[fx.Node]) -> None:
    """Raise :class:`PassError` if any storage that ``launches`` read, or whose results they bring, is written in place.

    A write whose result a launch reads is ordered by that edge, and harmless.
    """
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            writers.setdefault(base(target), []).append(node)
    if not writers:
        return
    for launch in launches:
        for node in [*_packed(launch), *_arrived(launch)]:
            writer = _unordered(writers.get(base(node), ()), launch)
            if writer is not None:
                raise PassError(
                    f"{launch.name} cannot be moved safely: {writer.target} ({writer.name}) writes in place to "
                    f"{base(node).name}, which it reads or brings"
                )


def base(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` shares, back through views, their parts, waits, and results of writes."""
    while True:
        if (is_view(node) or collectives.is_wait(node) or node.target is getitem) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        elif returns_written(node) and (written := written_arguments(node)):
            node = written[0]
        else:
            return node


def _unordered(writers: Sequence[fx.Node], launch: fx.Node) -> fx.Node | None:
    """A writer, other than ``launch``, on whose result ``launch`` does not depend; None if there is none."""
    needed = set(_closure([launch], lambda node: node.all_input_nodes)) if writers else set()
    return next((writer for writer in writers if writer not in needed), None)


def _packed(launch: fx.Node) -> list[fx.Node]:
    """The launch's inputs, back through what only moves data."""
    return _closure(launch.all_input_nodes, lambda node: node.all_input_nodes if moves_data(node) else [])


def _arrived(launch: fx.Node) -> list[fx.Node]:
    """The launch and what shares its result's storage."""
    return _closure([launch], lambda node: [user for user in node.users if is_view(user) or collectives.is_wait(user)])


def _closure(start: Sequence[fx.Node], more: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    found = dict.fromkeys(start)
    queue = list(found)
    for node in queue:
        fresh = [other for other in more(node) if other not in found]
        found.update(dict.fromkeys(fresh))
        queue.extend(fresh)
    return queue
