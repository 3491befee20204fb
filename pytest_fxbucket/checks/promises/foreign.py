"""What another's pass is held to: what it did beside buckets, and whether what its nodes say of themselves holds.

Beside buckets it may add nodes, compute some again, take some out, and part launches of activations. No plan speaks of them,
so audit leaves them out, and names them. It is held to all that is left: every launch of parameters and gradients, and what
the nodes that stayed read and make. What nodes say compilers go by, and readers; our checks believe none of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pytest_fxbucket.graph.collectives import communicates, is_wait, launch_kind
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.passes.fake_values import value_text, wrong_values
from pytest_fxbucket.words import counted, some

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis

NodeKey: TypeAlias = tuple[str, object]
"""Name and operator of a node, by which it is known where it stayed."""


@dataclass(frozen=True, slots=True)
class ChangesOutsideBuckets:
    """What a pass did to nodes that are of no bucket."""

    stayed: frozenset[NodeKey]
    added: tuple[str, ...]
    """Operators, with the modules that they say they are of."""
    again: tuple[str, ...]
    """The same of nodes that compute what one that stayed does."""
    gone: tuple[str, ...]

    def told(self) -> Iterator[str]:
        """A clause for each kind of thing that is left out, by name."""
        for what, names in (("computed again", self.again), ("added", self.added), ("taken out", self.gone)):
            if names:
                yield f"{what} {some([_times(name, count) for name, count in Counter(names).items()], 6)}"


def done_beside(captured: GraphAnalysis, passed: GraphAnalysis) -> ChangesOutsideBuckets | None:
    """What was done to the graph ``captured`` to make ``passed``; None if too little of it stayed to tell.

    A pass that names most nodes anew is asked for all that it was asked before: nothing tells what it left alone.
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


def stayed_computes(reading: GraphAnalysis, beside: ChangesOutsideBuckets | None) -> list[tuple[str, str]]:
    """(direction, FQN) of compute that reads a parameter or makes a gradient, in order; of nodes that stayed alone."""
    nodes = reading.order.nodes if reading.order is not None else ()
    return [
        (direction, fqn) for place, direction, fqn in reading.computes if beside is None or _key(nodes[place]) in beside.stayed
    ]


def _is_of_bucket(node: fx.Node) -> bool:
    """Whether it is a launch or a wait, or moves data on the way to one or from one."""
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


# Does what nodes say of themselves hold?


def metadata_problems(before: fx.Graph, after: fx.Graph) -> list[str]:
    """A sentence for each kind of thing that nodes of ``after``, made of ``before``, say wrongly.

    A node that was there before says what it said; of a new one the shape and dtype of ``meta["val"]`` are what its operator
    gives for those of its inputs. What a node does not say is no problem.
    """
    known = {(node.name, node.target): node for node in before.nodes}
    kept = [(known[node.name, node.target], node) for node in after.nodes if (node.name, node.target) in known]
    new = [node for node in after.nodes if node.op == "call_function" and (node.name, node.target) not in known]
    said = {"module": _other(kept, module_of), "direction": _other(kept, _backward)}
    said['meta["val"]'] = [*_other(kept, _value), *wrong_values(new)]
    return [line for what, lines in said.items() for line in _told(what, lines)]


def _other(kept: list[tuple[fx.Node, fx.Node]], said: Callable[[fx.Node], str]) -> list[str]:
    pairs = ((node, said(old), said(node)) for old, node in kept)
    return [f"{node.name} says {now}, and {was or 'nothing'} before" for node, was, now in pairs if now and was != now]


def _backward(node: fx.Node) -> str:
    """Of the two directions the one that has marks."""
    return "backward" if direction_of(node) == "backward" else ""


def _value(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


def _told(what: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    more = f" (and {counted(len(lines) - 1, 'other node')})" if lines[1:] else ""
    return [f"what nodes say of their {what} is wrong, which compilers and readers go by: {lines[0]}{more}"]
