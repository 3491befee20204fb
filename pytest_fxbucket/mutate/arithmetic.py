"""Sums and scalings in a graph, and the numbers in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import getitem
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.ops import by_operator, operator_name
from pytest_fxbucket.mutate.values import alike

if TYPE_CHECKING:
    from torch import fx

_SCALINGS = ("aten::mul", "aten::div")
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]")
_CHANCES = ("p", "dropout_p")
"""Arguments by which random numbers are drawn."""


def sides(node: fx.Node) -> list[fx.Node]:
    """What ``node`` adds, if these are two different tensors like the sum."""
    both = [arg for arg in node.args if isinstance(arg, torch.fx.Node)] if operator_name(node) == "aten::add" else []
    return both if len(set(both)) == 2 and all(alike(side, node) for side in both) else []


def scaled(node: fx.Node) -> fx.Node | None:
    """What ``node`` scales by a number other than 1; None if it does not."""
    if operator_name(node) not in _SCALINGS or len(node.args) != 2:
        return None
    source, factor = node.args
    is_number = isinstance(factor, (int, float)) and factor != 1
    return source if is_number and isinstance(source, torch.fx.Node) and alike(source, node) else None


def numbers(node: fx.Node) -> Iterator[tuple[int | str, int | float]]:
    """(place or name, number) of each number that ``node`` computes with: not sizes, dimensions or indices."""
    if not computes(node) or not node.all_input_nodes:
        return
    given: list[tuple[int | str, object]] = [*enumerate(node.args), *node.kwargs.items()]
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
    """A number like ``number``."""
    if isinstance(number, int):
        return number + 1
    return 1.0 if number == 0 else number * 2 if math.isfinite(number) else 0.0
