"""A pass that is not ours: what it did besides bucketing, and whether its nodes' metadata is right.

Such a pass may add nodes, compute some again, take some out, and split launches of activations. No plan speaks of these
changes, so audit names them and leaves them out. It checks all the rest: every launch of parameters and gradients, and what the
nodes that stayed read and make. Compilers and people rely on the metadata of nodes; our own checks do not.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from pytest_fxbucket.cost.memory import liveness_of
from pytest_fxbucket.graph.collectives import communicates, is_wait, launch_kind
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.passes.fake_values import fill_in, said_and_given, value_text
from pytest_fxbucket.words import counted, some

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.step.roles import Value

MOST_KEPT = 1.25
"""Of the bytes of computed values that lived at once before a pass that is not ours, where modules are checkpointed."""
NodeKey: TypeAlias = tuple[str, object]
"""Name and target of a node: one with the same key before and after the pass is taken to have stayed."""


@dataclass(frozen=True, slots=True)
class ChangesOutsideBuckets:
    """The changes of a pass to nodes that belong to no bucket."""

    stayed: frozenset[NodeKey]
    added: tuple[str, ...]
    """Operators of added nodes, with the modules that their metadata names."""
    again: tuple[str, ...]
    """The same for added nodes that compute what a node that stayed computes."""
    gone: tuple[str, ...]

    def left_out_clauses(self) -> Iterator[str]:
        """A clause for each kind of thing that is left out, by name."""
        for what, names in (("computed again", self.again), ("added", self.added), ("taken out", self.gone)):
            if names:
                yield f"{what} {some([_times(name, count) for name, count in Counter(names).items()], 6)}"


def done_beside(captured: GraphAnalysis, passed: GraphAnalysis) -> ChangesOutsideBuckets | None:
    """The changes from the graph ``captured`` to ``passed``; None if half of the compute nodes or fewer stayed.

    In a graph whose nodes mostly have new names nothing tells which of them stayed, so nothing is left out of the audit.
    """
    if captured.order is None or passed.order is None:
        return None
    before, after = captured.order.nodes, passed.order.nodes
    stayed = frozenset(map(_key, before)) & frozenset(map(_key, after))
    computing = [node for node in before if computes(node)]
    if 2 * sum(_key(node) in stayed for node in computing) <= len(computing):
        return None
    new = [node for node in after if node.op == "call_function" and _key(node) not in stayed and not _is_of_bucket(node)]
    known = {_call(node) for node in after if _key(node) in stayed}
    again = [node for node in new if computes(node) and _call(node) in known]
    gone = [node for node in before if _key(node) not in stayed and not _is_of_bucket(node)]
    return ChangesOutsideBuckets(stayed, _named(node for node in new if node not in again), _named(again), _named(gone))


def stayed_computes(reading: GraphAnalysis, beside: ChangesOutsideBuckets | None) -> list[tuple[str, str, NodeKey | None]]:
    """(direction, FQN, node) of compute that reads a parameter or makes a gradient, in order.

    ``beside``: of nodes that stayed. Without it nothing tells which did, and the node is None.
    """
    nodes = reading.order.nodes if reading.order is not None else ()
    keys = [(direction, fqn, _key(nodes[place]) if beside else None) for place, direction, fqn in reading.computes]
    return [one for one in keys if beside is None or one[2] in beside.stayed]


def checkpoint_problems(before: fx.Graph, after: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> Iterator[str]:
    """A sentence if computed values hold much more memory in ``after``, where modules are checkpointed to hold less.

    Told by memory and not by what is computed again: a pass may fuse that, or compute it by operators of its own.
    """
    was, now = (_computed_peak(graph, inputs, outputs) for graph in (before, after))
    if now > MOST_KEPT * was:
        yield (
            f"computed values hold up to {now:,} bytes at once, {was:,} before the pass: what [step] checkpoint computes again "
            "is kept from forward on"
        )


def _computed_peak(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> int:
    """Most bytes that live at once of what compute makes for compute; gradients on their way to a launch do not count."""
    if any(node.op == "call_function" and "val" not in node.meta for node in graph.nodes):
        graph = copy.deepcopy(graph)  # else what a pass does not say would hold nothing
        fill_in(graph)
    changes: Counter[int] = Counter()
    for one in liveness_of(graph, inputs, outputs).storages:
        if one.value is None and computes(one.maker) and _is_read_by_compute(one.maker):
            changes[one.first] += one.bytes
            changes[one.last + 1] -= one.bytes
    return max(accumulate(change for _, change in sorted(changes.items())), default=0)


def _is_read_by_compute(node: fx.Node) -> bool:
    return any(map(computes, reached([node], lambda one: one.users if one is node or moves_data(one) else ())[1:]))


def _is_of_bucket(node: fx.Node) -> bool:
    """Whether ``node`` is a launch or a wait, or only moves data between a wait and its readers, or on the way to a launch."""
    if communicates(node):
        return True
    if not moves_data(node):
        return False
    before = reached([node], lambda one: one.all_input_nodes if moves_data(one) else ())
    behind = reached([node], lambda one: one.users if moves_data(one) else ())
    return any(map(is_wait, before)) or any(launch_kind(one) is not None for one in behind)


def _key(node: fx.Node) -> NodeKey:
    return node.name, node.target


def _call(node: fx.Node) -> tuple[object, str]:
    return node.target, f"{node.args} {node.kwargs}"


def _named(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(_name(node) for node in nodes)


def _name(node: fx.Node) -> str:
    module = module_of(node)
    name = operator_name(node).removeprefix("aten::") or getattr(node.target, "__name__", str(node.target))
    return f"{name} of {module}" if module else name


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{count} {name}"


# Is the metadata of nodes right?


def metadata_problems(before: fx.Graph, after: fx.Graph) -> list[str]:
    """A sentence for each kind of metadata that is wrong at nodes of ``after``, the graph that the pass made of ``before``.

    A node that stayed must keep its metadata. In one that is new, or that says otherwise than before in ``meta["val"]``,
    shape and dtype must be those that its operator gives for its inputs. Metadata that is missing is no problem.
    """
    known = {_key(node): node for node in before.nodes}
    kept = {node: known[_key(node)] for node in after.nodes if _key(node) in known}
    changed = {node for node, old in kept.items() if _value(node) and _value(node) != _value(old)}
    same = kept.keys() - changed
    # Also one that says what it said, if what it reads has changed.
    asked = [node for node in after.nodes if node not in same or not same.issuperset(node.all_input_nodes)]
    found = list(said_and_given(node for node in asked if node.op == "call_function" or node in changed))
    said = {
        "module": _other(kept, module_of),
        "direction": _other(kept, _backward),
        'meta["val"]': [
            f"{name} says {value}, and "
            + (f"{node.target} gives {given}" if given else f"{_value(kept[node]) or 'nothing'} before")
            for node, name, value, given in found
            if value and (value != given if given else node in changed)
        ],
    }
    return [line for what, lines in said.items() for line in _first_of(what, lines)]


def _other(kept: Mapping[fx.Node, fx.Node], said: Callable[[fx.Node], str]) -> list[str]:
    pairs = ((node, said(old), said(node)) for node, old in kept.items())
    return [f"{node.name} says {now}, and {was or 'nothing'} before" for node, was, now in pairs if now and was != now]


def _backward(node: fx.Node) -> str:
    """The direction as far as it is marked: tracers mark backward only."""
    return "backward" if direction_of(node) == "backward" else ""


def _value(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


def _first_of(what: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = f" (and {counted(len(lines) - 1, 'other node')})" if lines[1:] else ""
    return [f"what nodes say of their {what} is wrong, which compilers and readers go by: {lines[0]}{more}"]
