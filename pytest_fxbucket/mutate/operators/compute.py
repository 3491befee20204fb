"""Compute moved, left out, doubled, or with other operands and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import communicates
from pytest_fxbucket.graph.compute import computes, multiplies
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.ops import is_view, operator_name, overload
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.mutate.arithmetic import another, numbers, scaled, sides
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import expressions, put_behind, read_instead, tensor, trade

if TYPE_CHECKING:
    from torch import fx

_COMMUTE = frozenset({"add", "mul", "eq", "ne", "maximum", "minimum", "logical_and", "logical_or", "logical_xor"})


def compute_displaced(seen: SeenGraph) -> Iterator[Site]:
    """A product of matrices stands as far up or down as its operands and readers let it, behind or before a launch or a wait.

    Every product that can pass a launch or a wait, with the views that only it reads, or that are of it.
    """
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


def compute_doubled(seen: SeenGraph) -> Iterator[Site]:
    """A side of a sum is added twice, or a scaling by a number is done twice.

    Every sum of two tensors, every product with a number.
    """
    for node in seen.graph.nodes:
        if sides(node):
            first, second = sides(node)
            yield Site(node.name, f"adds {second.name} twice", partial(_again, node.name, first.name))
        if (source := scaled(node)) is not None:
            yield Site(node.name, "is done twice", partial(_again, node.name, source.name))


def _again(name: str, instead: str, broken: BrokenGraph) -> None:
    node = broken[name]
    assert callable(node.target)
    args = [node if arg is broken[instead] else arg for arg in node.args]
    put_behind(node, broken.behind(node, node.target, *args, **node.kwargs))


def compute_dropped(seen: SeenGraph) -> Iterator[Site]:
    """A sum is one of its sides, or a scaling by a number is left out.

    Every side of every sum of two tensors, every product with a number.
    """
    for node in seen.graph.nodes:
        for side in sides(node):
            yield Site(node.name, f"is only {side.name}", partial(read_instead, node.name, side.name))
        if (source := scaled(node)) is not None:
            yield Site(node.name, "is left out", partial(read_instead, node.name, source.name))


def constant_changed(seen: SeenGraph) -> Iterator[Site]:
    """A number that is computed with, an epsilon or a scale, is another one.

    Every number.
    """
    for node in seen.graph.nodes:
        for key, number in numbers(node):
            how = f"computes with {another(number)} for {number}"
            yield Site(node.name, how, partial(_change, node.name, key, another(number)))


def _change(name: str, key: int | str, number: int | float, broken: BrokenGraph) -> None:
    node = broken[name]
    if isinstance(key, int):
        node.update_arg(key, number)
    else:
        node.update_kwarg(key, number)


def operand_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two operands of equal shape change places where that makes a difference.

    The first two operands alike of every operator that computes and does not commute.
    """
    number = expressions(seen.graph)
    for node in seen.graph.nodes:
        name = operator_name(node).removeprefix("aten::")
        if (
            overload(node) is None
            or not computes(node)
            or effects_of(node).acts
            or name in _COMMUTE
            or name.startswith("bitwise")
        ):
            continue
        given = [arg for arg in node.args if isinstance(arg, torch.fx.Node)]
        pairs = ((a, b) for a, b in pairwise(given) if _fit(a, b) and number[a] != number[b])
        if (pair := next(pairs, None)) is not None:
            first, second = pair
            yield Site(node.name, f"has {second.name} for {first.name}", partial(trade, first.name, second.name, (node.name,)))


def _fit(first: fx.Node, second: fx.Node) -> bool:
    one, other = tensor(first), tensor(second)
    return one is not None and other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)
