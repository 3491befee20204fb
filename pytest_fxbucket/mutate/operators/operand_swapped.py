"""Two operands of equal shape change places where that makes a difference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.ops import operator_name, overload
from pytest_fxbucket.mutate.operator import SeenGraph, Site
from pytest_fxbucket.mutate.values import expressions, tensor, trade

if TYPE_CHECKING:
    from torch import fx

_COMMUTE = frozenset({"add", "mul", "eq", "ne", "maximum", "minimum", "logical_and", "logical_or", "logical_xor"})


def sites(seen: SeenGraph) -> Iterator[Site]:
    """The first two operands alike of every operator that computes and does not commute."""
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
