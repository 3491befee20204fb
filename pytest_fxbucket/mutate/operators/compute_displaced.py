"""A product of matrices stands as far up or down as its operands and readers let it, behind or before a launch or a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.collectives import communicates
from pytest_fxbucket.graph.compute import multiplies
from pytest_fxbucket.graph.ops import is_view
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site

if TYPE_CHECKING:
    from torch import fx


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every product that can pass a launch or a wait, with the views that only it reads, or that are of it."""
    order = order_of(seen.graph)
    # Edges alone would let a product pass a write to what it reads; the order has such dependences, too.
    nodes, index, before = order.nodes, order.index, order.before
    behind: list[list[int]] = [[] for _ in nodes]
    for at, sources in enumerate(before):
        for source in sources:
            behind[source].append(at)

    def passes(begin: int, end: int) -> bool:
        return any(communicates(node) for node in nodes[begin:end])

    for node in filter(multiplies, nodes):
        up = _with_views(node, lambda one: (view for view in one.all_input_nodes if len(view.users) == 1))
        top = max((at for one in up for at in before[index[one]] if nodes[at] not in up), default=-1)
        if top >= 0 and passes(top + 1, index[node]):
            names = sorted((one.name for one in up), key=lambda name: index[seen.nodes[name]])
            yield Site(node.name, f"stands right behind {nodes[top].name}", partial(_up, names, nodes[top].name))
        down = _with_views(node, lambda one: one.users)
        # Of a product that nobody reads, 0 leaves nothing to pass.
        bottom = min((at for one in down for at in behind[index[one]] if nodes[at] not in down), default=0)
        if passes(index[node], bottom):
            names = sorted((one.name for one in down), key=lambda name: index[seen.nodes[name]])
            yield Site(node.name, f"stands right before {nodes[bottom].name}", partial(_down, names, nodes[bottom].name))


def _with_views(node: fx.Node, onward: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    return reached([node], lambda one: (other for other in onward(one) if is_view(other)))


def _up(names: list[str], behind: str, broken: BrokenGraph) -> None:
    place = broken[behind]
    # Inputs stay together at the head of a graph, so behind one of them is behind the last.
    if place.op == "placeholder":
        place = broken.graph.find_nodes(op="placeholder")[-1]
    for name in names:
        place.append(broken[name])
        place = broken[name]


def _down(names: list[str], before: str, broken: BrokenGraph) -> None:
    for name in names:
        broken[before].prepend(broken[name])
