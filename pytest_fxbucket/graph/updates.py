"""The optimizer's part of a graph: which nodes update parameters, and how early they could stand."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import REDUCTIONS, communicates, launch_kind, waits_of
from pytest_fxbucket.graph.movement import moves_or_pads
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.walks import ancestors, made_of, writers_in

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.step.roles import Value

UPDATED = ("param", "state")
"""Roles of values that an optimizer makes anew or writes in place."""


def update_nodes(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> set[fx.Node]:
    """Nodes that write a parameter or optimizer state in place or return it anew, and nodes that are computed for that alone.

    What the loss needs is left out, and what collectives that bring gradients need. Reducing norms to clip by is part of the
    update. So is an update for the call before that comes first, though loss and gradients are made from its results.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    parameters = {value.fqn for value in inputs if value.role == "param"}
    held = {node for node, value in zip(placeholders, inputs, strict=True) if is_updated(value, parameters)}
    values = [(n, v) for n, v in zip(returned(graph.output_node()), outputs, strict=True) if hasattr(n, "users")]
    results = [(node, value.role) for node, value in values]
    # An update shows in one of two ways: as a new value among the outputs, or as writes to the storage of an input.
    made = [node for node, value in values if is_updated(value, parameters) and node not in held]
    writers = writers_in(graph)
    made += [node for storage in held for node in writers.get(storage, ())]
    if not made:
        return set()
    _, new = of_call_before(graph, inputs, outputs)
    has_scalars = any(value.role == "param" and prod(value.shape) == 1 for value in inputs)
    needed = [node for node, role in results if role in ("loss", "grad")]
    gradients = {node for node, role in results if role == "grad"}
    needed += _bringing_gradients(graph, gradients, new, _last_reductions(graph, new) if has_scalars else set())
    before = made_of(needed, writers, new)
    # The wait of a launch in ``before`` may have no reader but the update; it still is not part of the update.
    waits = {user for node in before if launch_kind(node) is not None for user in (*node.users, *waits_of(node))}
    return made_of(made, writers) - before - waits - set(placeholders)


def is_updated(value: Value, parameters: Set[str]) -> bool:
    """Whether an optimizer makes ``value`` anew: a parameter, or state named after one (a module's own state is not)."""
    return value.role == "param" or (value.role == "state" and value.fqn.rpartition(".")[0] in parameters)


def of_call_before(
    graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]
) -> tuple[set[fx.Node], dict[fx.Node, Value]]:
    """(nodes of ``graph`` that finish the call before, the new parameters and state among them with their values).

    Those nodes are made from carried inputs. What reads the new parameters and state belongs to this call again.
    """
    placeholders = graph.find_nodes(op="placeholder")
    late = {node for node, value in zip(placeholders, inputs, strict=True) if value.role == "carried"}
    if not late:
        return set(), {}
    results = zip(returned(graph.output_node()), outputs, strict=True)
    new = {n: v for n, v in results if v.role in UPDATED and hasattr(n, "users") and n.op != "placeholder"}
    # In graph order lateness is handed on to readers; it ends at the new values, which this call begins with.
    for node in graph.nodes:
        if node.op != "output" and any(source in late and source not in new for source in node.all_input_nodes):
            late.add(node)
    return late.difference(placeholders), {node: value for node, value in new.items() if node in late}


def _bringing_gradients(
    graph: fx.Graph, gradients: set[fx.Node], new: Collection[fx.Node], last: set[fx.Node]
) -> Iterator[fx.Node]:
    """Launches that may bring gradients: all but those of norms.

    A launch is of norms if it sends something made from ``gradients``, which the graph returns, or one element. Where ``last``
    reductions are given, one element may be the gradient of a parameter, too: norms are computed from what these bring. The
    walk stops at ``new`` parameters and state: what is made from these is not behind the gradients of this call.
    """
    may_be_scalar = bool(last)
    brought = set(last)  # and what moves it: hybrid sharding sends that on, and it may be one element then
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node in new:
            continue
        sources = node.all_input_nodes
        if not behind.isdisjoint(sources) or not gradients.isdisjoint(sources):
            behind.add(node)
        elif not brought.isdisjoint(sources):
            (brought if communicates(node) or moves_or_pads(node) else behind).add(node)
        if launch_kind(node) is not None and node not in behind and (may_be_scalar or not is_scalar(node)):
            yield node


def _last_reductions(graph: fx.Graph, new: Collection[fx.Node]) -> set[fx.Node]:
    """Reductions of more than one element that lead to no other such: they bring gradients or norms, no activations."""
    larger = {node for node in graph.nodes if launch_kind(node) in REDUCTIONS and not is_scalar(node)}
    return larger - ancestors([source for node in larger for source in node.all_input_nodes], new)


def is_scalar(launch: fx.Node) -> bool:
    """Whether ``launch`` sends one element. Its result does not tell: a shard of a parameter may have one element, too."""
    values = [source.meta.get("val") for source in launch.all_input_nodes]
    return all(value is not None and hasattr(value, "numel") and value.numel() == 1 for value in values)


# How early each node of the optimizer could stand: right behind the last node that it needs outside the optimizer.


@dataclass(frozen=True, slots=True)
class Ready:
    """What a node of the optimizer waits for."""

    place: float
    """Place of the last node that it needs outside the optimizer."""
    entries: frozenset[str]
    """Entries whose reductions it needs, directly or not."""
    joins: int
    """The first node on the way to it, or itself, that needs the reductions of several entries; -1 if none does."""


def readiness(
    order: Order, updating: Set[int], waits: Mapping[int, str], places: Sequence[float] | None = None
) -> dict[int, Ready]:
    """What each node of ``updating`` that needs a reduction waits for; one walk, with a bit for each entry.

    ``waits`` has the waits for reductions with their entries. ``places`` says where nodes will stand; left out, they stay.
    """
    names = list(dict.fromkeys(waits.values()))
    bit = {name: 1 << number for number, name in enumerate(names)}
    bits, joins = [0] * len(order.nodes), [-1] * len(order.nodes)
    place = [float(index) for index in range(len(order.nodes))] if places is None else list(places)
    sets: dict[int, frozenset[str]] = {0: frozenset()}
    found: dict[int, Ready] = {}
    for index, before in enumerate(order.before):
        known = bit[waits[index]] if index in waits else 0
        for source in before:
            known |= bits[source]
        bits[index] = known
        if index not in updating:
            continue
        # Nodes outside the optimizer keep their places; one of the optimizer could follow what it needs last, where that goes.
        place[index] = max((place[source] for source in before), default=-1.0)
        if known & (known - 1):  # More than one bit is set.
            joins[index] = next((joins[source] for source in before if joins[source] >= 0), index)
        if known:
            if known not in sets:
                sets[known] = frozenset(name for name in names if known & bit[name])
            found[index] = Ready(place[index], sets[known], joins[index])
    return found


def updates_between(found: Mapping[int, Ready], spans: Sequence[tuple[int, int, str]]) -> list[tuple[str, ...]]:
    """For each (begin, end, entry) of ``spans`` the other entries that updates between begin and end wait for, in order."""
    places = sorted(found)
    return [
        tuple(
            dict.fromkeys(
                name
                for place in places[bisect_right(places, begin) : bisect_left(places, end)]
                for name in sorted(found[place].entries - {own})
            )
        )
        for begin, end, own in spans
    ]
