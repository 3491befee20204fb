"""Steps made of graphs written by hand, what a transformation does to them, and whether all ranks still get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.checks.bitwise.job import bits
from pytest_fxbucket.fuzz import lockstep
from pytest_fxbucket.fuzz.program import Program, copied
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.step.roles import StepGraph, Value
from pytest_fxbucket.transforms.merge_duplicates import merge_duplicates

WORLD = 2
Transformation = Callable[..., StepGraph]


def step_of(graph_module: fx.GraphModule, inputs: Sequence[Value] = (), outputs: Sequence[Value] = ()) -> StepGraph:
    """A step of one joint graph; without ``inputs`` or ``outputs`` nothing is known of them."""
    graph = graph_module.graph
    given = list(inputs) or [_value(node) for node in graph.find_nodes(op="placeholder")]
    gives: Any = graph.output_node().args[0]
    made = list(outputs) or [_value(node) for node in gives]
    return StepGraph({"joint": graph_module}, {"joint": tuple(given)}, {"joint": tuple(made)}, (), (), (), 0)


def _value(node: fx.Node) -> Value:
    value = node.meta["val"]
    return Value("value", node.name, tuple(value.shape), value.dtype)


class Changed:
    """A graph before and after a transformation; making it fails unless the graph is whole, and all bits are the same."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Value] = (),
        outputs: Sequence[Value] = (),
        by: Transformation = merge_duplicates,
        world: int = WORLD,
        runs: bool = True,
        seed: int = 0,
        **args: Any,
    ) -> None:
        self.before, self.after = graph_module, copied(graph_module)
        self.step = by(step_of(self.after, inputs, outputs), {}, **args)
        assert self.step.graphs["joint"] is self.after
        self.after.graph.lint()
        (self.transformed,) = self.step.transformed
        if runs:
            different = differences(self.before, self.after, world, seed)
            assert not different, "\n".join([*different, str(self.before.graph), str(self.after.graph)])

    @property
    def launches(self) -> list[str]:
        return launches(self.after)

    @property
    def whys(self) -> list[str]:
        """Why launches were left alone."""
        return [why for _, why in self.transformed.left]

    @property
    def is_same(self) -> bool:
        """Whether the graph is as it was."""
        return str(self.before.graph) == str(self.after.graph)


def changed(made: Program, *nodes: fx.Node, **args: Any) -> Changed:
    """The graph that returns ``nodes``, transformed."""
    return Changed(made.returns(*nodes), world=made.world, **args)


def launches(graph_module: fx.GraphModule) -> list[str]:
    """Names of the launches, in order."""
    return [node.name for node in graph_module.graph.nodes if collectives.launch_kind(node) is not None]


def differences(before: fx.GraphModule, after: fx.GraphModule, world: int, seed: int = 0) -> list[str]:
    """What differs when all ranks run both in this process: outputs, inputs as they are left, which outputs share memory."""
    found = []
    ways = [_ran(one, world, seed) for one in (before, after)]
    for rank in range(world):
        (outputs, inputs), (others, left) = ([part[rank] for part in way] for way in ways)
        for what, a, b in (("output", outputs, others), ("input", inputs, left)):
            found += [
                f"rank {rank}: {what} {i} is {y}, before {x}"
                for i, (x, y) in enumerate(zip(a, b, strict=True))
                if x.shape != y.shape or x.stride() != y.stride() or not torch.equal(bits(x), bits(y))
            ]
        if _sharing(outputs) != _sharing(others):
            found.append(f"rank {rank}: outputs that share memory: {_sharing(others)}, before {_sharing(outputs)}")
    return found


def _ran(graph_module: fx.GraphModule, world: int, seed: int) -> tuple[list[list[Any]], list[list[Any]]]:
    """(outputs, inputs) by rank; inputs are small integers, other ones on each rank, so that sums are exact."""
    given = []
    for rank in range(world):
        draw = torch.Generator().manual_seed(1009 * seed + rank)
        values = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
        given.append([torch.randint(-4, 5, tuple(v.shape), generator=draw).to(v.dtype) for v in values])
    torch.manual_seed(seed)
    env = lockstep.run(graph_module.graph, given)
    return env[graph_module.graph.output_node()], given


def _sharing(outputs: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    keys = [one.untyped_storage()._cdata for one in outputs]
    return [(i, k) for i, a in enumerate(keys) for k, b in enumerate(keys) if i < k and a == b and outputs[i].numel()]
