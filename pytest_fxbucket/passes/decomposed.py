"""Breaks operators down to those that a compiler has code for: behind its own decompositions, nobody else does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.trace import trace
from pytest_fxbucket.graph.ops import overload

if TYPE_CHECKING:
    from torch import fx


def decompose(graph: fx.Graph, nodes: Iterable[fx.Node], table: Mapping[Any, Any]) -> None:
    """Replace each of ``nodes`` whose operator is in ``table``, or is made of others for every device, by what it is made of.

    ``table`` maps operators to functions, as ``torch._decomp`` has them.
    """
    for node in nodes:
        op = overload(node)
        if op is not None and (op in table or op._can_decompose()):
            _replace(graph, node, trace(_call_of(node), [n.meta["val"] for n in node.all_input_nodes], table))


def _call_of(node: fx.Node) -> Any:
    """What ``node`` computes, as a function of its inputs in order."""

    def call(*values: Any) -> Any:
        value_of = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    return call


def _replace(graph: fx.Graph, node: fx.Node, parts: fx.GraphModule) -> None:
    made = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for part in parts.graph.nodes:
            if part.op == "call_function":
                made[part] = graph.node_copy(part, made.__getitem__)
                made[part].meta = {**node.meta, "val": part.meta["val"]}
    result: Any = torch.fx.node.map_arg(parts.graph.output_node().args[0], made.__getitem__)
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        assert user.target is getitem, user
        user.replace_all_uses_with(result[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
