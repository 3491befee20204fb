"""Turns every anchor of a traced graph into what it stands for: a call of the real module, or the user's sub-graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_fxbucket.capture.override import ops
from pytest_fxbucket.capture.override.call import call_of
from pytest_fxbucket.capture.override.digest import fake_digest
from pytest_fxbucket.capture.override.inline import NAMES, Hold, Inlining, traced
from pytest_fxbucket.capture.override.live import fqn_of
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from pytest_fxbucket.capture.override.anchors import Anchors
    from pytest_fxbucket.capture.override.asked import Overridden, Subgraph

_ANCHORS = ("fxbucket.anchor_forward.default", "fxbucket.anchor_backward.default")


def expand(graph: fx.Graph, anchors: Anchors, hold: Hold) -> None:
    """Turn every anchor of ``graph``, in place; inputs of state among its outputs become their new values.

    ``hold`` keeps a constant of a sub-graph. Raises :class:`CaptureError` for a module that is never called, for a sub-graph
    that cannot be traced, and for an anchor that is left over. Nothing is recompiled.
    """
    anchors.refuse_uncalled()
    expansion = _Expansion(graph, anchors, hold)
    for node in list(graph.nodes):
        if node.target is ops.ANCHOR_FORWARD:
            expansion.forward(node)
        elif node.target is ops.ANCHOR_BACKWARD:
            expansion.backward(node)
    expansion.finish()
    refuse_left_over(graph)


def refuse_left_over(graph: fx.Graph) -> None:
    """Raise :class:`CaptureError` for an anchor in ``graph``."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) in _ANCHORS:
            raise CaptureError(
                f"the anchor of module {fqn_of(str(node.args[0]))} is left over ({node.name}), and an anchor cannot run; "
                "override the "
                'module by "call" or by a sub-graph, in the capture that made the anchor'
            )


@dataclass
class _Expansion:
    graph: fx.Graph
    anchors: Anchors
    hold: Hold
    pairs: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """From forward to backward."""
    begun: dict[fx.Node, Inlining] = field(default_factory=dict)
    """Sub-graphs whose forward is in its place, by the anchor of their backward."""
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    """State as the graph gets it, by FQN."""
    now: dict[str, fx.Node] = field(default_factory=dict)
    """State as it is behind the calls so far."""
    at: dict[int, dict[str, fx.Node]] = field(default_factory=dict)
    """State as a call of forward found it, by the call's number."""
    digests: dict[int, fx.Node] = field(default_factory=dict)
    """Of what a call of forward gave, by the call's number, which its backward has too, whatever was computed again."""

    def __post_init__(self) -> None:
        forwards: dict[tuple[Any, ...], list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.target is ops.ANCHOR_FORWARD:
                forwards.setdefault(_same(node), []).append(node)
            elif node.target is ops.ANCHOR_BACKWARD:
                # What was computed again for this backward stands last; of two backwards of one call the second begins anew.
                found = next((one for one in reversed(forwards.get(_same(node), [])) if one not in self.pairs), None)
                if found is not None:
                    self.pairs[found] = node

    def forward(self, node: fx.Node) -> None:
        one = self.anchors.by_key[str(node.args[0])]
        if one.subgraph is None:
            if call_of(str(node.args[1])).asks:
                self._add_digest(node, _number(node))
            node.target, node.args = ops.CALL_FORWARD, node.args[:4]
            return
        back = self.pairs.get(node)
        again = bool(node.meta.get("autograd_backward"))
        number = _number(node if back is None or not again else back)
        inlining = self._traced(one, one.subgraph, node, back, number)
        inlining.place(node, forward=True)
        count = len(call_of(str(node.args[1])).promise)
        if not again:
            for place, name in enumerate(one.state, count):
                self.now[name] = inlining.result(place)
        if back is not None:
            self.begun[back] = inlining
        _replace(node, [inlining.result(i) for i in range(count)])

    def backward(self, node: fx.Node) -> None:
        one = self.anchors.by_key[str(node.args[0])]
        if one.subgraph is None:
            node.target, node.args = ops.CALL_BACKWARD, (*node.args[:7], self.digests.get(_number(node)))
            return
        inlining = self.begun.get(node) or self._traced(one, one.subgraph, node, node, _number(node))
        inlining.given_gradients(_nodes(node.args[4]))
        inlining.place(node, forward=False)
        before = len(call_of(str(node.args[1])).promise) + len(one.state)
        _replace(node, [inlining.result(i) for i in range(before, len(inlining.results))])

    def _add_digest(self, call: fx.Node, number: int) -> None:
        """Take what a call gives behind its results."""
        results = call.meta["val"]
        with self.graph.inserting_after(call), self.anchors.fake_mode:
            digest = self.graph.call_function(getitem, (call, len(results)))
            digest.meta = {key: call.meta[key] for key in NAMES if key in call.meta}
            digest.meta["val"] = fake_digest(results)
        call.meta["val"] = [*results, digest.meta["val"]]
        self.digests[number] = digest

    def finish(self) -> None:
        """Give out new state where the graph gave out what it got."""
        output = self.graph.output_node()
        new = {self.inputs[name]: node for name, node in self.now.items()}
        output.args = fx.node.map_arg(output.args, lambda node: new.get(node, node))

    def _traced(self, one: Overridden, subgraph: Subgraph, node: fx.Node, back: fx.Node | None, number: int) -> Inlining:
        call = call_of(str(node.args[1]))
        held, inputs = _nodes(node.args[2]), _nodes(node.args[3])
        held = self._with_state(one, call.held, held, number)
        grads: dict[int, fx.Node] = {}
        wanted: Sequence[Any] = ()
        if back is not None:
            grads = dict(zip(back.args[5], _nodes(back.args[4]), strict=True))  # type: ignore[arg-type]  # a list of int
            wanted = back.args[6]  # type: ignore[assignment]  # a list of int
        return traced(one, subgraph, call, [*held, *inputs], grads, wanted, self.anchors.fake_mode, self.hold)

    def _with_state(self, one: Overridden, names: Sequence[str], held: list[fx.Node], number: int) -> list[fx.Node]:
        """``held`` with the state that the call ``number`` finds; the first call of all finds the graph's inputs."""
        places = {f"{one.fqn}.{name}": i for i, name in enumerate(names) if f"{one.fqn}.{name}" in one.state}
        for name, i in places.items():
            self.inputs.setdefault(name, held[i])
        found = self.at.setdefault(number, {name: self.now.get(name, self.inputs[name]) for name in places})
        for name, i in places.items():
            held[i] = found[name]
        return held


def _same(node: fx.Node) -> tuple[Any, ...]:
    """Equal for a forward and the backward that begins from the same tensors."""
    return (*node.args[:2], tuple(_nodes(node.args[2])), tuple(_nodes(node.args[3])))


def _number(node: fx.Node) -> int:
    number = node.args[-1]
    assert isinstance(number, int)
    return number


def _nodes(value: Any) -> list[fx.Node]:
    return list(value)


def _replace(anchor: fx.Node, results: Sequence[fx.Node]) -> None:
    """Let those who read parts of what ``anchor`` gives read ``results``."""
    for part in list(anchor.users):
        assert part.target is getitem
        part.replace_all_uses_with(results[part.args[1]])  # type: ignore[index]  # its place
        anchor.graph.erase_node(part)
    anchor.graph.erase_node(anchor)
