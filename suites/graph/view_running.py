"""Runs a graph and a part of it on the same values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from pytest_fxbucket.graph.collectives import argument, is_wait, launch_kind
from pytest_fxbucket.graph.effects import written
from pytest_fxbucket.graph_view import SubGraph

RANKS = 4


class Runner(fx.Interpreter):
    """Runs a graph; collectives are those of ranks that all hold the same."""

    def run_node(self, n: fx.Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        if is_wait(n):
            return args[0]
        kind = launch_kind(n)
        if kind is None:
            return super().run_node(n)
        size = argument(n, "group_size")
        return torch.cat([args[0]] * size) if kind == "all_gather" else args[0].chunk(size)[1].clone()


class Recorder(Runner):
    """Keeps what ``sub`` would be given, where its nodes first read it, and what its nodes make of what it gives."""

    def __init__(self, gm: fx.GraphModule, sub: SubGraph) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.sub, self.given, self.gives = sub, {}, {}
        self.nodes, self.inputs = set(sub.nodes), set(sub.inputs)

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.nodes:
            return super().run_node(n)
        for source in n.all_input_nodes:
            if source in self.inputs and source not in self.given:
                self.given[source] = copied(self.env[source])
        before = {node: copied(self.env[node]) for node in self.gives} if written(n) else {}
        result = super().run_node(n)
        self.gives |= {node: copied(self.env[node]) for node, was in before.items() if not torch.equal(self.env[node], was)}
        if n in self.sub.outputs:
            self.gives[n] = copied(result)
        return result


def check(gm: fx.GraphModule, sub: SubGraph, *, as_module: bool = False) -> None:
    """What ``sub`` gives by itself is, bit for bit, what its nodes give in a run of ``gm``."""
    inputs = [
        drawn(i, node.meta.get("val", node.meta.get("example_value")))
        for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))
    ]
    recorder = Recorder(gm, sub)
    with torch.no_grad():
        recorder.run(*inputs)
        given = [recorder.given[node] for node in sub.inputs]
        gives = sub.graph_module(*given) if as_module else Runner(sub.graph_module).run(*given)
    assert isinstance(gives, tuple)
    assert len(gives) == len(sub.outputs) > 0
    for node, ours, theirs in zip(sub.outputs, gives, map(recorder.gives.__getitem__, sub.outputs), strict=True):
        assert torch.equal(ours, theirs), node.name


def drawn(seed: int, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    generator = torch.Generator().manual_seed(seed)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, tuple(value.shape), generator=generator).to(value.dtype)
    return torch.randn(tuple(value.shape), generator=generator).to(value.dtype)


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
