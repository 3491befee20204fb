"""Writes in place near what a pass moves. FX edges carry no order between them, so a pass must not guess."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import is_view, written_arguments

if TYPE_CHECKING:
    from torch import fx


def refuse_writes(graph: fx.Graph, launches: Sequence[fx.Node]) -> None:
    """Raise :class:`PassError` if any storage that ``launches`` read, or whose results they bring, is written in place."""
    written = {base(target): node for node in graph.nodes for target in written_arguments(node)}
    if not written:
        return
    for launch in launches:
        for node in [*_packed(launch), *_arrived(launch)]:
            writer = written.get(base(node))
            if writer is not None and writer is not launch:
                raise PassError(
                    f"{launch.name} cannot be moved safely: {writer.target} ({writer.name}) writes in place to "
                    f"{base(node).name}, which it reads or brings"
                )


def base(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` shares, back through views, their parts, and waits."""
    while (is_view(node) or collectives.is_wait(node) or node.target is getitem) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _packed(launch: fx.Node) -> list[fx.Node]:
    """The launch's inputs, back through what only moves data."""
    return _closure(launch.all_input_nodes, lambda node: node.all_input_nodes if moves_data(node) else [])


def _arrived(launch: fx.Node) -> list[fx.Node]:
    """The launch and what shares its result's storage."""
    return _closure([launch], lambda node: [user for user in node.users if is_view(user) or collectives.is_wait(user)])


def _closure(start: Sequence[fx.Node], more: object) -> list[fx.Node]:
    found = dict.fromkeys(start)
    queue = list(found)
    for node in queue:
        fresh = [other for other in more(node) if other not in found]  # type: ignore[operator]
        found.update(dict.fromkeys(fresh))
        queue.extend(fresh)
    return queue
