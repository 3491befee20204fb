"""What crosses from stage to stage: all that is made before a cut and read behind it, each as a value of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.functionalize import make_functional
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.pipeline.trace import PLACE, Forward

if TYPE_CHECKING:
    from torch import fx


def stage_of_each(graph: fx.Graph, places: Sequence[int]) -> dict[fx.Node, int]:
    """The stage of each node of ``graph``, which has one more than ``places``; in graph order, which they ascend in.

    What was put in anew has the place of what it stands for, and so may be a stage later, where it stands now.
    """
    nodes = list(graph.nodes)
    own = [bisect_right(places, node.meta[PLACE]) for node in nodes]
    return dict(zip(nodes, accumulate(own, max), strict=True))


def crossing(
    stages: Mapping[fx.Node, int], everywhere: Collection[fx.Node], count: int, at_the_end: Collection[fx.Node] = ()
) -> list[list[fx.Node]]:
    """For each cut between ``count`` stages the nodes whose values cross it, in graph order.

    A value crosses all cuts from the stage that makes it to the last that reads it. What is ``everywhere`` crosses none: each
    stage has the model's parameters and buffers that it reads. What is wanted ``at_the_end`` crosses all.
    """
    last = {node: max((stages[user] for user in node.users), default=0) for node in stages}
    last |= dict.fromkeys(at_the_end, count - 1)
    moving = [node for node in stages if node not in everywhere and last[node] > stages[node]]
    return [[node for node in moving if stages[node] <= cut < last[node]] for cut in range(count - 1)]


def write_in_one_stage(forward: Forward, places: Sequence[int]) -> None:
    """Have what is written in another stage than it was made in as values of its own, by functional operators.

    What is written where it was made stays as it is: so it runs as the model runs it. Raises :class:`StageError` for a buffer,
    a parameter or an argument that a second stage could not see written.
    """
    graph = forward.graph_module.graph
    stages, order = stage_of_each(graph, places), order_of(graph)
    writers = {node: {s for arg in args for s in order.storages(arg)} for node in stages if (args := written_arguments(node))}
    if not writers:
        return
    kept = _refuse_kept(forward, stages, order, writers)
    made: dict[int, int] = {}
    for node, stage in stages.items():
        for storage in order.storages(node):
            made.setdefault(storage, stage)
    moved = {s for node, storages in writers.items() for s in storages - kept if stages[node] != made[s]}
    across = {node: storages for node, storages in writers.items() if storages & moved}
    if both := [node for node, storages in across.items() if storages & kept]:
        raise StageError(
            f"{both[0].target} ({both[0].name}) writes at once what its stage has and what another stage made; write one by one"
        )
    make_functional(graph, across)


def _refuse_kept(
    forward: Forward, stages: Mapping[fx.Node, int], order: Order, writers: Mapping[fx.Node, set[int]]
) -> set[int]:
    """Storages of parameters, buffers and arguments; raises :class:`StageError` where one is written and seen elsewhere."""
    names = {**{node: f"argument {path}" for node, path in forward.batch.items()}, **forward.held}
    kept = {storage: node for node in names for storage in order.storages(node)}
    for node, storages in writers.items():
        for storage in sorted(storages & kept.keys()):
            owner = kept[storage]
            seen = {stages[order.nodes[i]] for i in order.readers(storage)} | ({0} if owner in forward.batch else set())
            if others := sorted(seen - {stages[node]}):
                raise StageError(
                    f"{names[owner]} is written in place in stage {stages[node]} ({node.target}) and is in stage {others[0]}, "
                    "too, which has its own; put the cut where one stage has it alone"
                )
    return set(kept)
