"""What the order of a graph written by hand says, and a write to put into one."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.graph.order import Order, order_of
from suites.graph.handmade import Handmade, aten

FAKE = pytest.mark.parametrize("fake", [True, False], ids=["fake values", "no fake values"])


def ordered(made: Handmade, fake: bool = True) -> Order:
    graph = made.finish()
    for node in () if fake else graph.nodes:
        node.meta.pop("val", None)
    return order_of(graph)


def stays_before(order: Order, first: fx.Node, second: fx.Node) -> bool:
    """Whether ``before`` keeps ``first`` before ``second``, by whatever path."""
    needed, queue = set(), [order.index[second]]
    while queue:
        fresh = [i for i in order.before[queue.pop()] if i not in needed]
        needed.update(fresh)
        queue.extend(fresh)
    return order.index[first] in needed


def added(order: Order) -> list[tuple[str, str]]:
    """Pairs that no edge of the graph orders."""
    nodes = order.nodes
    return [
        (nodes[i].name, node.name)
        for node, before in zip(nodes, order.before, strict=True)
        for i in before
        if nodes[i] not in node.all_input_nodes
    ]


def directly(made: Handmade, node: fx.Node) -> fx.Node:
    """Writes ``node`` in place."""
    return made.call(aten.add_.Tensor, node, 1.0)
