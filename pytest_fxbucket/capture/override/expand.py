"""Turns every anchor of a traced graph into what it stands for: a call of the real module, or the user's sub-graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from pytest_fxbucket.capture.functional_operators import value_of_new
from pytest_fxbucket.capture.names import STAGE
from pytest_fxbucket.capture.override.anchors import ANCHOR_BACKWARD, ANCHOR_FORWARD, Anchors, fake_like, run_subgraph
from pytest_fxbucket.capture.override.call_text import ModuleCall, call_of, written
from pytest_fxbucket.capture.override.calls import CALL_BACKWARD, CALL_FORWARD, empty_digest, fqn_of, gradients
from pytest_fxbucket.capture.override.overrides import OverriddenModule, Subgraph
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.storages import base

Hold = Callable[[torch.Tensor], str]
"""Keeps a constant beside the graph and gives its name there."""
_ANCHORS = (ANCHOR_FORWARD, ANCHOR_BACKWARD)
_NAMES = ("nn_module_stack", "fwd_nn_module_stack", "autograd_backward", STAGE)
"""What a node's meta says of where it comes from."""


def expand(graph: fx.Graph, anchors: Anchors, hold: Hold) -> None:
    """Replace every anchor of ``graph``, in place. Where the graph gives out state that it was given, it gives the new values.

    ``hold`` keeps a constant of a sub-graph. Raises :class:`CaptureError` for a module that is never called, for a sub-graph
    that cannot be traced, and for an anchor that is left over. Nothing is recompiled.
    """
    anchors.refuse_uncalled()
    found = [_Anchor(node) for node in graph.nodes if node.target in _ANCHORS]
    expansion = _Expansion(graph, anchors, hold, _paired(found))
    for anchor in found:
        one = anchors.by_key[anchor.key]
        if one.subgraph is None:
            expansion.by_call(anchor)
        elif anchor.is_forward:
            expansion.forward(anchor, one, one.subgraph)
        else:
            expansion.backward(anchor, one, one.subgraph)
    expansion.give_out_state()
    refuse_left_over(graph)


def refuse_left_over(graph: fx.Graph) -> None:
    """Raise :class:`CaptureError` for an anchor in ``graph``."""
    for node in graph.nodes:
        if node.target in _ANCHORS:
            raise CaptureError(
                f"the anchor of module {fqn_of(str(node.args[0]))} is left over ({node.name}), and an anchor cannot run; "
                'override the module by "call" or by a sub-graph, in the capture that made the anchor'
            )


class _Anchor:
    """An anchor's node, and what its arguments say. Its nodes are read late, as they change when other anchors are expanded."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.is_forward, self.again = node, node.target is ANCHOR_FORWARD, bool(node.meta.get("autograd_backward"))
        self.key, self.text, self.number = str(node.args[0]), str(node.args[1]), cast(int, node.args[-1])
        self.call = call_of(self.text)
        self.wanted: Sequence[int] = () if self.is_forward else cast(Any, node.args[6])

    @property
    def tensors(self) -> list[fx.Node]:
        """Held, then inputs."""
        args: Any = self.node.args
        return [*args[2], *args[3]]

    @property
    def grads(self) -> dict[int, fx.Node]:
        """Gradients that a backward is given, by the number of the result."""
        args: Any = self.node.args
        return dict(zip(args[5], args[4], strict=True))


def _paired(anchors: Sequence[_Anchor]) -> dict[_Anchor, _Anchor]:
    """Map each forward to the backward that begins from the same tensors, if there is one."""
    pairs: dict[_Anchor, _Anchor] = {}
    forwards: dict[tuple[Any, ...], list[_Anchor]] = {}
    for anchor in anchors:
        same = forwards.setdefault((anchor.key, anchor.text, *anchor.tensors), [])
        if anchor.is_forward:
            same.append(anchor)
        elif free := [forward for forward in same if forward not in pairs]:
            # Under a checkpoint a call's forward stands twice: the one that was computed again, the last, is this backward's.
            # A second backward of one call finds no forward free, and computes it once more.
            pairs[free[-1]] = anchor
    return pairs


@dataclass
class _Expansion:
    graph: fx.Graph
    anchors: Anchors
    hold: Hold
    backward_of: dict[_Anchor, _Anchor]
    begun: dict[_Anchor, _Inlining] = field(default_factory=dict)
    """Sub-graphs whose forward is in its place, by the anchor of their backward."""
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    """State as the graph gets it, by FQN."""
    now: dict[str, fx.Node] = field(default_factory=dict)
    """State behind the calls so far, by FQN."""
    at: dict[int, dict[str, fx.Node]] = field(default_factory=dict)
    """State as a call of forward found it, by the call's number."""
    digests: dict[int, fx.Node] = field(default_factory=dict)
    """Digest of what a forward gave, by the number of its call: the backward has that number, too."""

    def by_call(self, anchor: _Anchor) -> None:
        node = anchor.node
        if not anchor.is_forward:
            node.target, node.args = CALL_BACKWARD, (*node.args[:7], self.digests.get(anchor.number))
            return
        node.target, node.args = CALL_FORWARD, node.args[:4]
        if anchor.call.asks:  # behind its results a call gives their digest
            results = node.meta["val"]
            with self.graph.inserting_after(node), self.anchors.fake_mode:
                digest = self.graph.call_function(getitem, (node, len(results)))
                digest.meta = _origin(node) | {"val": empty_digest(results)}
            node.meta["val"] = [*results, digest.meta["val"]]
            self.digests[anchor.number] = digest

    def forward(self, anchor: _Anchor, one: OverriddenModule, subgraph: Subgraph) -> None:
        back = self.backward_of.get(anchor)
        number = back.number if back is not None and anchor.again else anchor.number
        inlining = self._traced(one, subgraph, anchor, back, number)
        inlining.place_forward(anchor.node)
        count = len(anchor.call.promise)
        # State goes on from call to call once: a forward that is computed again found the old state, and its new one is
        # dropped.
        if not anchor.again:
            self.now.update(zip(one.state, inlining.placed(count, count + len(one.state)), strict=True))
        if back is not None:
            self.begun[back] = inlining
        _replace(anchor.node, inlining.placed(0, count))

    def backward(self, anchor: _Anchor, one: OverriddenModule, subgraph: Subgraph) -> None:
        inlining = self.begun.get(anchor) or self._traced(one, subgraph, anchor, anchor, anchor.number)
        inlining.place_backward(anchor.node, [*anchor.grads.values()])
        _replace(anchor.node, inlining.placed(len(anchor.call.promise) + len(one.state)))

    def give_out_state(self) -> None:
        """Give out new state where the graph gave out what it got."""
        output = self.graph.output_node()
        new = {self.inputs[name]: node for name, node in self.now.items()}
        output.args = fx.node.map_arg(output.args, lambda node: new.get(node, node))

    def _traced(
        self, one: OverriddenModule, subgraph: Subgraph, anchor: _Anchor, back: _Anchor | None, number: int
    ) -> _Inlining:
        """Trace the sub-graph that ``anchor`` stands for and, where there is a ``back``, its backward.

        State is what the call ``number`` found; the first of all found the inputs. Results are those of the call, new state,
        and gradients as ``back`` wants them. Raises :class:`CaptureError` for what cannot be traced.
        """
        call, nodes, before = anchor.call, anchor.tensors, list[fx.Node]()
        places = {f"{one.fqn}.{name}": i for i, name in enumerate(call.state_names) if f"{one.fqn}.{name}" in one.state}
        for name, i in places.items():
            self.inputs.setdefault(name, nodes[i])
        # The first forward of a call number notes the state that it finds; one computed again, and the backward, use the same.
        state = self.at.setdefault(number, {name: self.now.get(name, self.inputs[name]) for name in places})
        for name, i in places.items():
            nodes[i] = state[name]
        grads, wanted = (back.grads, back.wanted) if back is not None else ({}, ())

        def function(*flat: torch.Tensor) -> list[torch.Tensor]:
            held = dict(zip(call.state_names, flat, strict=False))
            output, new = run_subgraph(one, subgraph, held, call.arguments, flat[len(held) : len(nodes)])
            results: list[torch.Tensor] = []
            written(output, results, f"the sub-graph of module {one.fqn} gives")
            # Nodes so far are the forward's, what follows is the backward's: they go to different places in the graph.
            before.extend(tracing.current_graph().nodes)
            asked = [flat[i] for i in wanted]
            found = gradients(results, asked, dict(zip(grads, flat[len(nodes) :], strict=True)))
            made = [torch.zeros_like(t) if g is None else g for t, g in zip(asked, found, strict=True)]
            return [*results, *new.values(), *made]

        with self.anchors.fake_mode:
            fakes = [fake_like(node.meta["val"], requires_grad=i in call.asks) for i, node in enumerate(nodes)]
            made = tracing.trace(function, [*fakes, *(fake_like(node.meta["val"]) for node in grads.values())])
        _refuse_strange(one, made, call)
        copies = dict(zip(made.graph.find_nodes(op="placeholder"), nodes, strict=False))
        (returned,) = made.graph.output_node().args
        return _Inlining(made, set(before), cast(list[fx.Node], returned), self.anchors.fake_mode, self.hold, copies)


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _NAMES if key in node.meta}


def _replace(anchor: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let those who read parts of what ``anchor`` gives read ``results``."""
    for part in list(anchor.users):
        assert part.target is getitem
        part.replace_all_uses_with(results[part.args[1]])  # type: ignore[index]  # its place
        anchor.graph.erase_node(part)
    anchor.graph.erase_node(anchor)


@dataclass
class _Inlining:
    """A sub-graph, traced forward and backward at once, on its way into a graph: forward is put in first, then the rest."""

    joint: fx.GraphModule
    forward: set[fx.Node]
    """Nodes of ``made`` that its forward computes."""
    results: Sequence[fx.Node]
    """What ``made`` returns."""
    fake_mode: FakeTensorMode
    hold: Hold
    copies: dict[fx.Node, fx.Node]
    """The graph's nodes by the nodes of ``made`` that they stand for; to begin with those of held and inputs."""

    def place_forward(self, anchor: fx.Node) -> None:
        """Copy the nodes that forward computes, to stand before ``anchor``."""
        self._place(anchor, [node for node in self.joint.graph.nodes if node in self.forward])

    def place_backward(self, anchor: fx.Node, grads: Sequence[fx.Node]) -> None:
        """Copy the nodes that are not placed yet. ``grads`` are known only now, as other anchors may have given them."""
        placeholders = self.joint.graph.find_nodes(op="placeholder")
        self.copies.update(zip(placeholders[len(placeholders) - len(grads) :], grads, strict=True))
        self._place(anchor, self.joint.graph.nodes)

    def _place(self, anchor: fx.Node, nodes: Iterable[fx.Node]) -> None:
        with anchor.graph.inserting_before(anchor), self.fake_mode, torch.no_grad():
            for node in nodes:
                if node.op not in ("placeholder", "output") and node not in self.copies:
                    self.copies[node] = copy = anchor.graph.node_copy(node, self.copies.__getitem__)
                    copy.meta = _origin(anchor)
                    if node.op == "get_attr":
                        constant = getattr(self.joint, str(node.target))
                        copy.target, copy.meta["val"] = self.hold(constant), self.fake_mode.from_tensor(constant)
                    else:
                        copy.meta["val"] = value_of_new(copy)

    def placed(self, first: int, last: int | None = None) -> list[fx.Node]:
        """Nodes in the graph that are the sub-graph's results from ``first`` to before ``last``."""
        return [self.copies[node] for node in self.results[first:last]]


def _refuse_strange(one: OverriddenModule, made: fx.GraphModule, call: ModuleCall) -> None:
    """Raise :class:`CaptureError` for tensors that are none of the sub-graph's own, and for writes to what it is given."""
    places = {node: i for i, node in enumerate(made.graph.find_nodes(op="placeholder"))}
    for node in made.graph.nodes:
        if node.op == "get_attr" and tracing.is_fake(getattr(made, str(node.target))):
            raise CaptureError(
                f"the sub-graph {one.by} of module {one.fqn} uses a tensor that is neither given to it nor state; it is to "
                "read the module's tensors by name from its first argument"
            )
        for place in (places[base(target)] for target in written_arguments(node) if base(target) in places):
            raise CaptureError(
                f"the sub-graph {one.by} of module {one.fqn} writes {call.name_of(place)} in place; keep what changes in "
                "state, and give its new value back"
            )
