"""Graphs with more calls in them: copies of a graph to which something is added where marks begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from pytest_fxbucket.errors import BenchmarkError

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Mark


class Opened(NamedTuple):
    """A copy of a graph without its output."""

    graph: fx.Graph
    first: list[fx.Node]
    """Of each mark the node at which it begins."""
    returned: Any
    """What the output is to have."""


def opened(graph_module: fx.GraphModule, marks: Sequence[Mark]) -> Opened:
    """A copy of the graph, to add calls to. Raises :class:`BenchmarkError` if the graph lacks a marked node."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(graph_module.graph, copies)
    by_name = {node.name: copies[node] for node in graph_module.graph.nodes if node in copies}
    for mark in marks:
        if mark.node not in by_name:
            raise BenchmarkError(
                f"the graph that was sent has no node {mark.node}, at which {mark.kind} {mark.label} begins; "
                "the rank runs another graph than the one that was read"
            )
    return Opened(graph, [by_name[mark.node] for mark in marks], returned)
