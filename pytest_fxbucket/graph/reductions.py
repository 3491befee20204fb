"""The reductions of a graph: whose gradients each brings, and what made those gradients.

A gradient is known by the output that returns it; where the step returns none, by the parameter that is updated with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import REDUCTIONS, launch_kind, waits_of
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.feeds import updates_of
from pytest_fxbucket.graph.follow import Followed, follow
from pytest_fxbucket.graph.gradients import Gradients
from pytest_fxbucket.graph.storages import is_part
from pytest_fxbucket.graph.updates import ancestors, is_scalar

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Value


@dataclass(frozen=True, slots=True)
class Reduction:
    """A launch that reduces gradients."""

    launch: fx.Node
    level: int
    """Through how many reductions its members went before, as in hybrid sharding."""
    fqns: tuple[str, ...]
    """Parameters whose gradients it brings, in byte order; empty for what is no parameter's gradient."""
    makers: tuple[fx.Node, ...]
    """For each what made the gradient, before anything moved or packed it."""


def reductions_of(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Reduction]:
    """All reductions of ``graph``, in order of launch."""
    found = follow(graph, {node for node in graph.nodes if is_result(node)})
    reducing = [node for node, sent in found.sent.items() if sent.launch.kind in REDUCTIONS]
    placeholders = graph.find_nodes(op="placeholder")
    roles = {node: value.role for node, value in zip(placeholders, inputs, strict=True)}
    gradients = Gradients(found, graph.output_node(), outputs, roles)
    _name_by_updates(graph, inputs, outputs, [node for node in reducing if _is_last(node)], gradients)
    return [_reduction(node, [piece.source for piece in found.sent[node].content], found, gradients) for node in reducing]


def _reduction(launch: fx.Node, numbers: Sequence[int], found: Followed, gradients: Gradients) -> Reduction:
    known = [number for number in numbers if found.sources[number] is not None]
    levels = [_level(number, gradients) for number in known]
    fqns = tuple(gradients.names.get(number, "") for number in known)
    return Reduction(launch, max(levels, default=0), fqns, tuple(found.table.known(number).node for number in known))


def is_result(node: fx.Node) -> bool:
    """Whether ``node`` is one of several tensors that an operator computed."""
    if not is_part(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return computes(node.all_input_nodes[0])


def _name_by_updates(
    graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], launches: Sequence[fx.Node], gradients: Gradients
) -> None:
    """Name what ``launches`` bring by the parameter that is updated with it alone, where no output has named it."""
    found = gradients.found
    unnamed = {piece.source for node in launches for piece in found.sent[node].content if piece.source not in gradients.names}
    if not unnamed:
        return
    behind = readers_of(wait for node in launches for wait in waits_of(node))
    labels = {
        (use.reader, use.value): numbers
        for use in found.uses
        if use.reader in behind and (numbers := [str(one.source) for one in use.content if one.source in unnamed])
    }
    updating = behind - ancestors([value for _, value in labels])
    for update in updates_of(graph, updating, inputs, outputs, labels):
        if update.role == "param" and len(update.gradients) == 1:
            (label,) = update.gradients
            if label.isdecimal():
                gradients.name(int(label), update.fqn)


def _is_last(launch: fx.Node) -> bool:
    """Whether nothing is launched of what ``launch`` brings but norms: what an activation's sum leads to is sent again."""
    behind = readers_of(waits_of(launch))
    return not any(launch_kind(node) is not None and not is_scalar(node) for node in behind)


def readers_of(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """``starts`` and everything that is made of them, but for the graph's output."""
    found = set(starts)
    queue = list(found)
    for node in queue:
        fresh = [user for user in node.users if user.op != "output" and user not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found


def _level(number: int, gradients: Gradients) -> int:
    level = 0
    while number in gradients.before:
        level, number = level + 1, gradients.before[number]
    return level
