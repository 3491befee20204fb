"""Forward and backward, and the update that follows, as one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_fxbucket.capture.optimizers.update import trace_update
from pytest_fxbucket.capture.roles import Value

if TYPE_CHECKING:
    from pytest_fxbucket.capture.joint import Joint
    from pytest_fxbucket.capture.optimizers.optimizing import Optimizing
    from pytest_fxbucket.capture.optimizers.update import Update
    from pytest_fxbucket.capture.parallel.parts import Parts

Key = tuple[str, str]
"""Role and name of an input or output."""


def join(joint: Joint, update: Update) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
    """The whole step: its graph, inputs (parameters, buffers, state, learning rates, batch) and outputs (loss, gradients,
    new parameters, new state).

    Each gradient that ``joint`` gives is what ``update`` takes under that name; parameters are inputs of both.
    """
    graph, root = fx.Graph(), _Root()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [*_ordered(_placeholders(joint.graph, joint.inputs), _new(update))]
    for node, _ in inputs:
        copies[node] = graph.node_copy(node)
    for node in joint.graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            root.copy(graph, joint.graph, node, copies)
    known = {(value.role, value.fqn): copies[node] for node, value in inputs}
    given = _returned(joint.graph, copies)
    known |= {(value.role, value.fqn): node for value, node in zip(joint.outputs, given, strict=True)}
    for node, value in _placeholders(update.graph_module, update.inputs):
        copies[node] = known[value.role, value.fqn]
    for node in update.graph_module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            root.copy(graph, update.graph_module, node, copies)
    graph.output([*given, *_returned(update.graph_module, copies)])
    return fx.GraphModule(root.values, graph), tuple(value for _, value in inputs), (*joint.outputs, *update.outputs)


def _placeholders(graph_module: fx.GraphModule, values: Sequence[Value]) -> list[tuple[fx.Node, Value]]:
    return list(zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True))


def _new(update: Update) -> list[tuple[fx.Node, Value]]:
    """Inputs of ``update`` that are inputs of the whole step, and of nothing before it."""
    return [pair for pair in _placeholders(update.graph_module, update.inputs) if pair[1].role in ("state", "hyper")]


def _ordered(before: Sequence[tuple[fx.Node, Value]], new: Sequence[tuple[fx.Node, Value]]) -> Iterator[tuple[fx.Node, Value]]:
    yield from (pair for pair in before if pair[1].role != "batch")
    yield from new
    yield from (pair for pair in before if pair[1].role == "batch")


def _returned(graph_module: fx.GraphModule, copies: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    returned: Any = graph_module.graph.output_node().args[0]
    return [copies[node] for node in returned]


class _Root:
    """Constants of both graphs, each under a name of its own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """By the name that the joined graph uses."""

    def copy(self, graph: fx.Graph, source: fx.GraphModule, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
        """Copy ``node`` of ``source`` to the end of ``graph``, with the constant that it names."""
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        if node.op != "get_attr":
            return
        value = getattr(source, str(node.target))
        name, number = str(node.target), 1
        while name in self.values and self.values[name] is not value:
            name, number = f"{node.target}_{number}", number + 1
        self.values[name] = value
        copy.target = name


def update_of(joint: Joint, optimizing: Optimizing, parts: Parts, clip_norm: float) -> Update:
    """The update that follows ``joint``, clipped to ``clip_norm`` if that is not 0. Raises what :func:`trace_update` does."""
    values = [value for value in joint.inputs if value.role == "param"]
    clip = parts.clip(clip_norm, joint.parameters) if clip_norm else None
    grads = {value.fqn for value in joint.outputs if value.role == "grad"}
    parted = any(parts.parted_along(parameter) for parameter in joint.parameters)
    return trace_update(optimizing.build, values, grads, clip, parted)
