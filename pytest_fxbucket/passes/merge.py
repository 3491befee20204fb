"""Puts the launches of each bucket together: one launch and one wait in the place of many, everything else where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.passes.arrange import arranged, drawn, drawn_together, pull_up, relink
from pytest_fxbucket.passes.pack import Merged, build

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.grouping import Group


def merge(graph: fx.Graph, order: Order, groups: Sequence[Group], packer: str = "default") -> list[Merged]:
    """Merge each of ``groups`` that has several launches. ``order`` is of ``graph`` as it is; members must be independent.

    A merged all-gather stands where its first member stood, with what it needs; a merged reduction where its last one did. If a
    bucket cannot be built (:class:`PassError`), ``graph`` is as it was.
    """
    edges = drawn_together(order.before, drawn(order, groups))
    merging = [group for group in groups if len(group) > 1]
    items = arranged(edges, _wishes(order, merging))
    made: dict[int, list[fx.Node]] = {}
    try:
        packed = {id(group): _build(graph, order, group, packer, made) for group in merging}
    except BaseException:
        for node in [node for node in reversed(graph.nodes) if node not in order.index]:
            graph.erase_node(node)
        raise
    _replace({wait: result for group in merging for wait, result in _results(group, packed[id(group)])})
    gone = {node for group in merging for node in _gone(group, packed[id(group)])}
    for node in sorted(gone, key=order.index.__getitem__, reverse=True):
        graph.erase_node(node)
    relink(graph, [node for item in items for node in made.get(item, [order.nodes[item]]) if node not in gone])
    return [packed.get(id(group)) or _alone(group) for group in groups]


def _wishes(order: Order, merging: Sequence[Group]) -> list[float]:
    """Where each node, and each bucket's launch and wait (by their first node), wishes to stand."""
    wishes = [float(index) for index in range(len(order.nodes))]
    for group in merging:
        launches = sorted(order.index[target.launch] for target in group)
        if group[0].kind == "all_gather":
            pull_up(order, wishes, launches, launches[0])
        else:
            wishes[launches[0]] = launches[-1]
    return wishes


def _build(graph: fx.Graph, order: Order, group: Group, packer: str, made: dict[int, list[fx.Node]]) -> Merged:
    """Make the bucket's nodes; ``made`` says what stands in the place of its launches, and of its waits."""

    def foldable(cast: fx.Node) -> bool:
        return not any(order.writing(source) for source in cast.all_input_nodes)

    with graph.inserting_before(graph.output_node()):
        packed = build(graph, group, packer=packer, foldable=foldable)
    made[min(order.index[target.launch] for target in group)] = [*packed.pack, packed.launch]
    made[min(order.index[wait] for target in group for wait in target.waits)] = [*packed.waits, *packed.unpack]
    return packed


def _results(group: Group, packed: Merged) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(wait, what its readers get instead)."""
    parts = (part for target in group for part in target.parts)
    for part, result in zip(parts, packed.results, strict=True):
        for wait in part.waits:
            yield wait, result


def _replace(results: Mapping[fx.Node, fx.Node]) -> None:
    """Let the readers of each key read its value. Each reader once: the output may read thousands."""

    def result(node: fx.Node) -> fx.Node:
        return results.get(node, node)

    for reader in dict.fromkeys(reader for wait in results for reader in wait.users):
        reader.args = torch.fx.map_arg(reader.args, result)
        if reader.kwargs:
            reader.kwargs = torch.fx.map_arg(reader.kwargs, result)


def _gone(group: Group, packed: Merged) -> list[fx.Node]:
    nodes = [node for target in group for node in (*target.waits, *target.dropped, target.launch)]
    return [*nodes, *packed.absorbed]


def _alone(group: Group) -> Merged:
    """The one launch of ``group``, as it is."""
    waits = tuple(group[0].waits)
    return Merged(group[0].launch, waits, waits, group)
