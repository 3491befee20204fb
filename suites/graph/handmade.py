"""Graphs written by hand, node by node, with fake values; and what follow and reading say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.follow import FollowedValues, follow
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.step.roles import Role, Value

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
RANKS = 2
GROUP = "0"


class Handmade:
    """A graph in the making. Inputs and outputs get roles; every node gets the fake value that its operator gives."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.graph, self.ranks, self.mode = fx.Graph(), ranks, FakeTensorMode()
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.returned: list[fx.Node] = []

    def given(self, role: Role, fqn: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"arg{len(self.inputs)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.inputs.append(Value(role, fqn, shape, dtype))
        return node

    def param(self, fqn: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A parameter's shard."""
        return self.given("param", fqn, *shape, dtype=dtype)

    def batch(self, *shape: int) -> fx.Node:
        return self.given("batch", f"[{len(self.inputs)}]", *shape)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, keywords = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*values, **keywords)
        return node

    def part(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(getitem, node, index)

    def gather(self, node: fx.Node, ranks: int | None = None, group: str = GROUP) -> fx.Node:
        return self.call(c10d.all_gather_into_tensor.default, node, ranks or self.ranks, group)

    def reduce(self, node: fx.Node, op: str = "avg") -> fx.Node:
        return self.call(c10d.reduce_scatter_tensor.default, node, op, self.ranks, GROUP)

    def summed(self, node: fx.Node, group: str = GROUP) -> fx.Node:
        return self.wait(self.call(c10d.all_reduce.default, node, "sum", group))

    def wait(self, node: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, node)

    def gathered(self, node: fx.Node) -> fx.Node:
        return self.wait(self.gather(node))

    def reduced(self, node: fx.Node) -> fx.Node:
        return self.wait(self.reduce(node))

    def compute(self, *nodes: fx.Node) -> fx.Node:
        """Something that is no data movement, of each node's own shape: the first one's."""
        for node in nodes[1:]:
            self.call(aten.neg.default, node)
        return self.call(aten.neg.default, nodes[0])

    def returns(self, node: fx.Node, role: Role = "grad", fqn: str = "") -> None:
        value = node.meta["val"]
        self.outputs.append(Value(role, fqn, tuple(value.shape), value.dtype))
        self.returned.append(node)

    def finish(self) -> fx.Graph:
        if not any(node.op == "output" for node in self.graph.nodes):
            self.graph.output(list(self.returned))
            self.graph.lint()
        return self.graph

    def follow(self) -> FollowedValues:
        return follow(self.finish())

    def read(self) -> GraphAnalysis:
        return read_graph(self.finish(), self.inputs, self.outputs)

    def loss(self, *nodes: fx.Node) -> fx.Node:
        """A loss that reads ``nodes``, each by a neg of its own."""
        total = self.call(aten.sum.default, self.call(aten.neg.default, nodes[0]))
        for node in nodes[1:]:
            total = self.call(aten.add.Tensor, total, self.call(aten.sum.default, self.call(aten.neg.default, node)))
        self.returns(total, "loss")
        return total


def gathered_rows(made: Handmade, shards: Sequence[fx.Node]) -> fx.Node:
    """The shards in one gather, as a matrix of (ranks, elements of a rank)."""
    packed = made.call(aten.flatten_dense_tensors.default, list(shards))
    return made.call(aten.view.default, made.gathered(packed), [made.ranks, -1])


def unpacked(made: Handmade, rows: fx.Node, sizes: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[fx.Node]:
    """Columns of ``rows`` cut into ``sizes``, each put into a shape."""
    pieces = made.call(aten.split_with_sizes_copy.default, rows, list(sizes), 1)
    return [made.call(aten.view.default, made.part(pieces, i), list(shape)) for i, shape in enumerate(shapes)]
