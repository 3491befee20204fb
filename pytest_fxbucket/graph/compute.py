"""Which nodes compute, that is, neither communicate nor move data; which reduce or multiply; and rounds of microbatches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.collectives import communicates
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import by_operator, operator_name
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx


def computes(node: fx.Node) -> bool:
    """Whether ``node`` calls something that neither communicates nor moves data."""
    return node.op == "call_function" and not communicates(node) and not moves_data(node)


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"})
_CALLS = frozenset({"fxbucket::call_forward", "fxbucket::call_backward"})
_ATTENTION = "_scaled_dot_product_"


def multiplies(node: fx.Node) -> bool:
    """Whether ``node`` multiplies matrices, convolves, attends, or calls a whole module; such nodes take most of the time."""
    name = operator_name(node).removeprefix("aten::") if node.op == "call_function" else ""
    return name in _PRODUCTS or name in _CALLS or name.startswith(_ATTENTION)


def computed_before(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node how many of those before it compute."""
    found: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        found[node] = count
        count += computes(node)
    return found


_REDUCTION = getattr(torch.Tag, "reduction", None)  # not in every torch that is supported
_ON_LISTS = frozenset({"aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum"})
"""Reductions of each item of a list to one element; torch tags none of them."""


def is_reduced(node: fx.Node) -> bool:
    """Whether ``node`` reduces its inputs to one element, or each item of its lists to one element.

    If name and tag of the operator do not tell, shapes do: an elementwise operator never gives fewer elements, or fewer
    dimensions, than an input has.
    """
    if not computes(node) or _is_on_lists(node):
        return _is_on_lists(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return False
    given = [one for source in node.all_input_nodes if isinstance(one := source.meta.get("val"), torch.Tensor)]
    return _is_reduction(node) or any(one.numel() != 1 or one.ndim > value.ndim for one in given)


_is_on_lists = by_operator(lambda op: op._schema.name in _ON_LISTS, False)
_is_reduction = by_operator(lambda op: op._schema.name.endswith("norm") or _REDUCTION in op.tags, False)


def direct_reads(parameters: Mapping[fx.Node, str]) -> Iterator[tuple[fx.Node, str]]:
    """(compute, FQN) of each node that reads one of ``parameters``, through what only moves or casts its data."""
    for parameter, fqn in parameters.items():
        through = reached([parameter], lambda node: (user for user in node.users if not computes(user) and moves_data(user)))
        yield from ((user, fqn) for node in through for user in node.users if computes(user))


def in_round(places: Sequence[int], others: Sequence[int], number: int | None) -> list[int]:
    """The round ``number`` of ``places``, which are of one direction; the last round if there is none of that number.

    ``number`` None means the last round. A new round begins wherever one of ``others``, places of the other direction, stands
    between. Both ascend. Without places the result is empty.
    """
    rounds: list[list[int]] = []
    # Places of one round have equally many of the other direction before them.
    turn = -1
    for place in places:
        now = bisect_right(others, place)
        if now != turn or not rounds:
            rounds.append([])
        rounds[-1].append(place)
        turn = now
    if not rounds:
        return []
    return rounds[-1] if number is None else rounds[min(number, len(rounds) - 1)]
