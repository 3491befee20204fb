"""Two graphs compared by ``same`` without a plan; a sentence for each problem."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from pytest_fxbucket.graph.ops import order_arguments, returned
from pytest_fxbucket.same.check import difference_text, waste_text
from pytest_fxbucket.same.step import GraphSide, compared
from pytest_fxbucket.same.table import ExpressionTable
from pytest_fxbucket.step.roles import Value

Members = Mapping[str, tuple[int, ...]]


def problems(before: fx.GraphModule, after: fx.GraphModule, members: Members) -> list[str]:
    """Where ``after`` is not the same as ``before``, a sentence each; ``members`` has the ranks of each process group."""
    table = ExpressionTable()
    found = compared(table, _side(before, members), _side(after, members), {})
    return [
        *(difference_text(table, one) for one in found.differences),
        *map(waste_text, found.waste),
        *(f"left: {name}, {why}" for name, why in found.left.items()),
    ]


def _side(module: fx.GraphModule, members: Members) -> GraphSide:
    graph = order_arguments(copy.deepcopy(module.graph))
    return GraphSide(graph, module, *ends(graph), members)


def ends(graph: fx.Graph) -> tuple[list[Value], list[Value]]:
    """Inputs and outputs of ``graph``, named by number: nothing is known of them but their fake values."""
    return _values(graph.find_nodes(op="placeholder")), _values(returned(graph.output_node()))


def _values(nodes: Iterable[object]) -> list[Value]:
    found = []
    for number, node in enumerate(nodes):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        found.append(Value("value", str(number), shape, getattr(value, "dtype", None)))
    return found
