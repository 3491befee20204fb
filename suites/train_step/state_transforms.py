"""Transformations of a captured step, for tests: one that adds state, one that removes it, others that leave it unpaired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.step.roles import Value

State = dict[str, torch.Tensor]
WEIGHT = "5.weight"
AVERAGE = f"{WEIGHT}.average"


def averaging(step: StepGraph, state: State) -> StepGraph:
    """Keep half of the running average of one weight, and half of its new value, as state."""
    weight = value(step.outputs["joint"], "param", WEIGHT)
    state[AVERAGE] = torch.zeros(weight.shape)
    added = Value("state", AVERAGE, weight.shape, weight.dtype)
    graph = step.graphs["joint"].graph
    with graph.inserting_before(next(iter(graph.nodes))):
        average = graph.placeholder("average")
    average.meta["val"] = results(step)[weight].meta["val"]
    with graph.inserting_before(graph.output_node()):
        new = graph.call_function(torch.ops.aten.add.Tensor, (average, results(step)[weight]))
        new = graph.call_function(torch.ops.aten.mul.Tensor, (new, 0.5))
    return with_outputs(given(step, [added, *step.inputs["joint"]]), {**results(step), added: new})


def without_momentum(step: StepGraph, state: State) -> StepGraph:
    """Take momentum out: what is multiplied with it counts as zero, and is not kept."""
    graph = step.graphs["joint"].graph
    gone = [v for v in step.inputs["joint"] if v.role == "state" and v.fqn.endswith(("momentum_buffer", "exp_avg"))]
    for node, one in zip(inputs(graph), step.inputs["joint"], strict=True):
        if one in gone:
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                zero = graph.call_function(torch.ops.aten.zeros.default, (list(one.shape),))
            node.replace_all_uses_with(zero)
            graph.erase_node(node)
            del state[one.fqn]
    kept = {v: node for v, node in results(step).items() if v not in gone}
    return with_outputs(given(step, [v for v in step.inputs["joint"] if v not in gone]), kept)


def value(values: Sequence[Value], role: str, fqn: str) -> Value:
    return next(v for v in values if (v.role, v.fqn) == (role, fqn))


def inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(step: StepGraph) -> dict[Value, Any]:
    """Output nodes by value."""
    return dict(zip(step.outputs["joint"], step.graphs["joint"].graph.output_node().args[0], strict=True))  # type: ignore[arg-type]


def given(step: StepGraph, values: Sequence[Value]) -> StepGraph:
    return replace(step, inputs={"joint": tuple(values)})


def with_outputs(step: StepGraph, outputs: dict[Value, Any]) -> StepGraph:
    step.graphs["joint"].graph.output_node().args = (list(outputs.values()),)
    return replace(step, outputs={"joint": tuple(outputs)})


def broken(change: Callable[[StepGraph, State], StepGraph]) -> Callable[[StepGraph, State], StepGraph]:
    """:func:`averaging`, and then something wrong."""

    def broken_transform(step: StepGraph, state: State) -> StepGraph:
        return change(averaging(step, state), state)

    return broken_transform
