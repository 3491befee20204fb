"""Graphs written by hand: parameters, gathers, reductions, and whatever stands between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.graph import collectives

ROWS, COLUMNS, RANKS = 2, 3, 4
aten, c10d = torch.ops.aten, c10d_functional()


class HandMade:
    """A graph under construction; each node carries its fake value, and the module it was made for."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.results: list[fx.Node] = []

    def placeholder(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape or (ROWS, COLUMNS))
        return node

    def call(self, target: Any, *args: Any, module: str = "", **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values, **torch.fx.node.map_arg(kwargs, lambda n: n.meta["val"]))
        node.meta["nn_module_stack"] = {"": ("", torch.nn.Module), module: (module, torch.nn.Module)}
        return node

    def gather(self, shard: fx.Node, module: str = "a") -> fx.Node:
        """Launch and wait; gives the wait."""
        launch = self.call(c10d.all_gather_into_tensor.default, shard, RANKS, "0", module=module)
        return self.call(c10d.wait_tensor.default, launch, module=module)

    def reduce(self, full: fx.Node, module: str = "a") -> fx.Node:
        """Launch and wait; gives the wait, which the graph returns as a gradient."""
        launch = self.call(c10d.reduce_scatter_tensor.default, full, "avg", RANKS, "0", module=module)
        wait = self.call(c10d.wait_tensor.default, launch, module=module)
        self.results.append(wait)
        return wait

    def returns(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output([*results, *self.results])
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def chain(modules: Sequence[str] = ("a", "b", "c"), *, backward: bool = False) -> fx.GraphModule:
    """Two parameters in each of ``modules``, gathered one after the other, read, and reduced again if ``backward``."""
    made = HandMade()
    pairs = [[f"{module}_{name}".replace(".", "_") for name in ("weight", "scale")] for module in modules]
    shards = [(made.placeholder(weight, ROWS, COLUMNS), made.placeholder(scale, ROWS, COLUMNS)) for weight, scale in pairs]
    x = made.placeholder("x", ROWS * RANKS, COLUMNS)
    for module, (weight, scale) in zip(modules, shards, strict=True):
        x = made.call(aten.mul.Tensor, x, made.gather(weight, module), module=module)
        x = made.call(aten.mul.Tensor, x, made.gather(scale, module), module=module)
    for module in reversed(modules) if backward else ():
        for _ in range(2):
            x = made.call(aten.neg.default, x, module=module)
            made.reduce(x, module)
    return made.returns(x)


def launch_names(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if collectives.launch_kind(node)]


def value(node: fx.Node) -> Tensor:
    found = node.meta["val"]
    assert isinstance(found, Tensor)
    return found
