"""Which nodes compute: those that neither communicate nor move data. What a pass may make anew is not among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import is_waiting, launching
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import by_operator, operator_name

if TYPE_CHECKING:
    from torch import fx


def computes(node: fx.Node) -> bool:
    """Whether ``node`` calls something that neither communicates nor moves data."""
    return node.op == "call_function" and not _communicates(node) and not moves_data(node)


_communicates = by_operator(lambda op: is_waiting(op) or launching(op) is not None, False)


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"})
_CALLS = frozenset({"fxbucket::call_forward", "fxbucket::call_backward"})
_ATTENTION = "_scaled_dot_product_"


def multiplies(node: fx.Node) -> bool:
    """Whether ``node`` multiplies matrices, convolves, attends, or calls a module as a whole: what takes most of the time."""
    name = operator_name(node).removeprefix("aten::") if node.op == "call_function" else ""
    return name in _PRODUCTS or name in _CALLS or name.startswith(_ATTENTION)


def computed_before(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node how many of those before it compute."""
    found: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        found[node] = count
        count += computes(node)
    return found
