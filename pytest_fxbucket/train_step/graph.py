"""From a recorded step to a functional graph: its outputs are what the function gave, then new values of what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import fx

from pytest_fxbucket.capture.functionalize import make_functional, without_passing_through
from pytest_fxbucket.capture.override.expand import expand
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.compat.live_numbers import node_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import Role, Value
from pytest_fxbucket.train_step.guards import PLAIN

if TYPE_CHECKING:
    from pytest_fxbucket.capture.override.anchors import Anchors
    from pytest_fxbucket.train_step.recorder import StepRecorder

_ORDER: tuple[Role, ...] = ("param", "buffer", "grad", "state", "hyper", "batch")
assert set(_ORDER) < set(get_args(Role))


@dataclass(frozen=True)
class Leaf:
    """One leaf of what the function gave."""

    kind: str
    """"output" of the graph, "input" that is given back as it is, or "plain" value."""
    value: Any
    """FQN of the output, the :class:`Value` of the input, or the value itself."""


@dataclass(frozen=True)
class Made:
    """A step as a functional graph."""

    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    spec: Any
    leaves: tuple[Leaf, ...]


class Reply:
    """What the function returned, as leaves with their paths. Raises :class:`CaptureError` for what a graph cannot give."""

    def __init__(self, paths: Sequence[str], leaves: Sequence[Any], spec: Any, losses: Sequence[torch.Tensor]) -> None:
        self.paths, self.leaves, self.spec = paths, leaves, spec
        self._losses = {storage_key(loss) for loss in losses}

    @classmethod
    def of(cls, result: Any, losses: Sequence[torch.Tensor]) -> Reply:
        """Take ``result`` apart; ``losses`` are the tensors whose backward was run, by which the role "loss" is known."""
        paths, spec = pytree.tree_flatten_with_path(result)
        leaves = [leaf.trigger_wait() if hasattr(leaf, "trigger_wait") else leaf for _, leaf in paths]
        for (path, _), leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, (torch.Tensor, torch.SymFloat, *PLAIN)):
                raise CaptureError(
                    f"the step gives a value of type {type(leaf).__name__} at result{pytree.keystr(path)}; it can give "
                    "tensors, plain values, and tuples, lists and dicts of them"
                )
        return cls([f"result{pytree.keystr(path)}" for path, _ in paths], leaves, spec, losses)

    def value(self, path: str, leaf: Any) -> Value:
        """Describe ``leaf``, an output at ``path``, by role and name."""
        if not isinstance(leaf, torch.Tensor):
            return Value("value", path, (), None)
        is_loss = leaf.dim() == 0 and storage_key(leaf) in self._losses
        return Value("loss" if is_loss else "value", path, tuple(leaf.shape), leaf.dtype)


def finish(
    recorder: StepRecorder,
    inputs: Sequence[tuple[Value, torch.Tensor]],
    reply: Reply,
    results: Sequence[tuple[Value, torch.Tensor]],
    anchors: Anchors,
) -> Made:
    """Make the recorded graph functional, with ``inputs`` in the order of their roles.

    ``results`` are what stands in the inputs' places after the step, and gradients that it made: outputs behind the ``reply``,
    but for what the step did not change. ``anchors`` are expanded into what overrides put there.
    """
    graph = recorder.graph
    inputs = sorted(inputs, key=lambda pair: _ORDER.index(pair[0].role))
    nodes = [recorder.node(fake) for _, fake in inputs]
    _in_order(graph, nodes)
    leaves, outputs, out_nodes = _reply(recorder, inputs, reply)
    outputs += [value for value, _ in results]
    out_nodes += [recorder.node(fake) for _, fake in results]
    _detached(graph)
    graph.output(out_nodes)
    expand(graph, anchors, recorder.hold)
    make_functional(graph)
    without_passing_through(graph)
    unchanged = {(value, node) for (value, _), node in zip(inputs, nodes, strict=True)}
    (final,) = graph.output_node().args
    pairs = list(zip(outputs, final, strict=True))  # type: ignore[arg-type]
    kept = [pair for pair in pairs if pair not in unchanged]
    graph.output_node().args = ([node for _, node in kept],)
    graph.eliminate_dead_code()
    used = [(value, node) for (value, _), node in zip(inputs, nodes, strict=True) if value.role != "grad" or node.users]
    for node in set(nodes) - {node for _, node in used}:
        graph.erase_node(node)
    root = torch.nn.Module()
    for name, constant in recorder.constants.items():
        root.register_buffer(name, constant)
    graph_module = fx.GraphModule(root, graph)
    return Made(graph_module, tuple(v for v, _ in used), tuple(v for v, _ in kept), reply.spec, tuple(leaves))


def _reply(
    recorder: StepRecorder, inputs: Sequence[tuple[Value, torch.Tensor]], reply: Reply
) -> tuple[list[Leaf], list[Value], list[fx.Node]]:
    given = {id(fake): value for value, fake in inputs}
    leaves: list[Leaf] = []
    outputs: list[Value] = []
    nodes: list[fx.Node] = []
    for path, leaf in zip(reply.paths, reply.leaves, strict=True):
        if id(leaf) in given:
            leaves.append(Leaf("input", given[id(leaf)]))
        elif isinstance(leaf, PLAIN):
            leaves.append(Leaf("plain", leaf))
        else:
            leaves.append(Leaf("output", path))
            outputs.append(reply.value(path, leaf))
            nodes.append(node_of(leaf) if isinstance(leaf, torch.SymFloat) else recorder.node(leaf))
    return leaves, outputs, nodes


def _in_order(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    """Move the nodes of ``inputs`` to the front, in their order."""
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in inputs:
        if first is not None:
            first.prepend(node)


def _detached(graph: fx.Graph) -> None:
    """Detach the nodes' fake values from autograd; their storages stay."""
    with torch.no_grad():
        for node in graph.nodes:
            node.meta["val"] = pytree.tree_map(
                lambda value: value.detach() if isinstance(value, torch.Tensor) else value, node.meta.get("val")
            )
