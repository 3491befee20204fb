"""A user's sub-graph, traced forward and backward, and put into a graph in the places of its two anchors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.override.asked import Overridden, Subgraph
from pytest_fxbucket.capture.override.call import Call
from pytest_fxbucket.capture.override.looking import run_subgraph
from pytest_fxbucket.capture.override.structure import written
from pytest_fxbucket.compat import trace
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.hazards import base
from pytest_fxbucket.graph.ops import written_arguments

Hold = Callable[[torch.Tensor], str]
"""Keeps a constant beside the graph and gives its name there."""
NAMES = ("nn_module_stack", "fwd_nn_module_stack", "autograd_backward")
"""What a node's meta says of where it comes from."""


@dataclass
class Inlining:
    """One sub-graph on its way into a graph: first what forward computes, then the rest."""

    made: fx.GraphModule
    forward: set[fx.Node]
    """Nodes of ``made`` that its forward computes."""
    results: Sequence[Any]
    """What ``made`` returns."""
    fake_mode: FakeTensorMode
    hold: Hold
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def given(self, nodes: Sequence[fx.Node]) -> None:
        """The first inputs of the sub-graph are ``nodes``: held and inputs."""
        self.copies.update(zip(self.made.graph.find_nodes(op="placeholder"), nodes, strict=False))

    def given_gradients(self, nodes: Sequence[fx.Node]) -> None:
        """The last ones are ``nodes``; to be said right before the backward is placed, since other anchors may give them."""
        placeholders = self.made.graph.find_nodes(op="placeholder")
        self.copies.update(zip(placeholders[len(placeholders) - len(nodes) :], nodes, strict=True))

    def place(self, anchor: fx.Node, *, forward: bool) -> None:
        """Copy forward's nodes, or the rest of them, to stand before ``anchor``."""
        with anchor.graph.inserting_before(anchor), self.fake_mode, torch.no_grad():
            for node in self.made.graph.nodes:
                if node.op in ("placeholder", "output") or node in self.copies or (forward and node not in self.forward):
                    continue
                copy = anchor.graph.node_copy(node, self.copies.__getitem__)
                copy.meta = {key: anchor.meta[key] for key in NAMES if key in anchor.meta}
                copy.meta["val"] = self._value(node, copy)
                self.copies[node] = copy

    def result(self, number: int) -> fx.Node:
        """The node in the graph that is the sub-graph's result ``number``."""
        return self.copies[self.results[number]]

    def _value(self, node: fx.Node, copy: fx.Node) -> Any:
        if node.op == "get_attr":
            value = getattr(self.made, str(node.target))
            copy.target = self.hold(value)
            return self.fake_mode.from_tensor(value)
        target: Any = copy.target
        args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), lambda arg: arg.meta["val"])
        return target(*args, **kwargs)


def traced(
    one: Overridden,
    subgraph: Subgraph,
    call: Call,
    nodes: Sequence[fx.Node],
    grads: Mapping[int, fx.Node],
    wanted: Sequence[int],
    fake_mode: FakeTensorMode,
    hold: Hold,
) -> Inlining:
    """Trace ``subgraph`` of the call's ``nodes`` (held, then inputs) and, where there are ``grads`` (by result), its backward.

    Its results are those of the call, new state, and gradients of ``wanted``. Raises :class:`CaptureError` for what cannot be
    traced.
    """
    before: list[fx.Node] = []

    def function(*flat: torch.Tensor) -> list[torch.Tensor]:
        held = dict(zip(call.held, flat, strict=False))
        output, new = run_subgraph(one, subgraph, held, call.given, flat[len(held) : len(nodes)])
        results: list[torch.Tensor] = []
        written(output, results, f"the sub-graph of module {one.fqn} gives")
        before.extend(trace.current_graph().nodes)
        asked = [flat[i] for i in wanted]
        pairs = [(results[i], grad) for i, grad in zip(grads, flat[len(nodes) :], strict=True) if results[i].requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(asked)
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, asked, given, allow_unused=True)
        made = [torch.zeros_like(t) if g is None else g for t, g in zip(asked, found, strict=True)]
        return [*results, *new.values(), *made]

    asks = set(call.asks)
    with fake_mode:
        fakes = [_like(node, i in asks) for i, node in enumerate(nodes)] + [_like(node, False) for node in grads.values()]
        made = trace.trace(function, fakes)
    _refuse_constants(one, made)
    _refuse_writes(one, made, call)
    returned: Any = made.graph.output_node().args[0]
    inlining = Inlining(made, set(before), list(returned), fake_mode, hold)
    inlining.given(nodes)
    return inlining


def _like(node: fx.Node, requires_grad: bool) -> torch.Tensor:
    value = node.meta["val"]
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fake.requires_grad_(requires_grad)


def _refuse_constants(one: Overridden, made: fx.GraphModule) -> None:
    for node in made.graph.find_nodes(op="get_attr"):
        if trace.is_fake(getattr(made, str(node.target))):
            raise CaptureError(
                f"the sub-graph {one.by} of module {one.fqn} uses a tensor that is neither given to it nor state; it is to "
                "read the "
                "module's tensors by name from its first argument"
            )


def _refuse_writes(one: Overridden, made: fx.GraphModule, call: Call) -> None:
    places = {node: i for i, node in enumerate(made.graph.find_nodes(op="placeholder"))}
    for node in made.graph.nodes:
        for target in written_arguments(node):
            place = places.get(base(target))
            if place is not None:
                what = call.held[place] if place < len(call.held) else f"its input {place - len(call.held)}"
                raise CaptureError(
                    f"the sub-graph {one.by} of module {one.fqn} writes {what} in place; keep what changes in state, and "
                    "give its "
                    "new value back"
                )
