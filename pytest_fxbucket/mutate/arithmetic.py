"""Sums and scalings in a graph, the numbers in it, and the norms that gradients are clipped by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import tensors_sent, waits_of
from pytest_fxbucket.graph.compute import computes, is_reduced
from pytest_fxbucket.graph.ops import by_operator, operator_name
from pytest_fxbucket.graph.walks import reached, readers_of
from pytest_fxbucket.mutate.values import interchangeable

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.operator import SeenGraph

_SCALINGS = ("aten::mul", "aten::div")
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]")
_CHANCES = ("p", "dropout_p")
"""Arguments by which random numbers are drawn."""


def sides(node: fx.Node) -> list[fx.Node]:
    """The two operands of the addition ``node``, if they are different nodes whose tensors are like the sum; else empty."""
    both = [arg for arg in node.args if isinstance(arg, torch.fx.Node)] if operator_name(node) == "aten::add" else []
    return both if len(set(both)) == 2 and all(interchangeable(side, node) for side in both) else []


def scaled(node: fx.Node) -> fx.Node | None:
    """What ``node`` scales by a number other than 1; None if it does not."""
    if operator_name(node) not in _SCALINGS or len(node.args) != 2:
        return None
    source, factor = node.args
    is_number = isinstance(factor, (int, float)) and factor != 1
    return source if is_number and isinstance(source, torch.fx.Node) and interchangeable(source, node) else None


def numbers(node: fx.Node) -> Iterator[tuple[int | str, int | float]]:
    """(place or name, number) of each number that ``node`` computes with: not sizes, dimensions or indices."""
    if not computes(node) or not node.all_input_nodes:
        return
    given: list[tuple[int | str, object]] = [*enumerate(node.args), *node.kwargs.items()]
    # Functions of Python's operator module have no schema to ask, so each of their numbers counts.
    of_python = getattr(node.target, "__module__", "") == "_operator" and node.target is not getitem
    for key, value in given:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and (of_python or key in _numeric(node)):
            yield key, value


_NONE: frozenset[int | str] = frozenset()
_numeric = by_operator(
    lambda op: frozenset(
        key
        for place, argument in enumerate(op._schema.arguments)
        if str(argument.type) in _NUMBERS and argument.name not in _CHANCES
        for key in (place, argument.name)
    ),
    _NONE,
)


def another(number: int | float) -> int | float:
    """A different number of the type of ``number``, to put in its place."""
    if isinstance(number, int):
        return number + 1
    # Twice the -inf of a mask would be the same number.
    return 1.0 if number == 0 else number * 2 if math.isfinite(number) else 0.0


# Norms: their sums over ranks, among all other all-reduces.


def other_sums(seen: SeenGraph) -> Iterator[tuple[fx.Node, bool]]:
    """(launch, whether it sums norms for an update) of every all-reduce of one tensor that is no gradient."""
    updating = {seen.nodes[name] for name in seen.reading.updating_names}
    for bucket in seen.reading.buckets:
        launch = seen.nodes[bucket.node]
        if bucket.kind == "all_reduce" and not any(bucket.fqns) and len(tensors_sent(launch)) == 1 and waits_of(launch):
            yield launch, _is_of_norms(launch) and not updating.isdisjoint(readers_of([launch]))


def _is_of_norms(launch: fx.Node) -> bool:
    """Whether all that ``launch`` sends is made of numbers that tensors were reduced to."""
    # The walk back stops at each reduction. A node without inputs that it meets was not reduced from anything.
    made = reached(tensors_sent(launch), lambda node: () if is_reduced(node) else node.all_input_nodes)
    return all(is_reduced(node) or node.all_input_nodes for node in made)


def is_norm(node: fx.Node) -> bool:
    """Whether ``node`` is one number that a tensor was reduced to, one of a list of them too."""
    return is_reduced(node.all_input_nodes[0] if node.target is getitem else node)
