"""Gradients that a fused update gives back as they came."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import TYPE_CHECKING

from pytest_fxbucket.graph.ops import operator_name

if TYPE_CHECKING:
    from torch import fx

_GRADIENTS = 1
"""Place of the gradients, among arguments as among results."""


def without_passing_through(graph: fx.Graph) -> None:
    """Let readers of gradients that a fused update gives read those that it was given.

    By its schema it writes them, but only to unscale them: without ``grad_scale`` they stay as they were.
    """
    for node in list(graph.nodes):
        if operator_name(node).startswith("aten::_fused_") and node.kwargs.get("grad_scale") is None:
            given = node.args[_GRADIENTS]
            for place, item in list(_items(node)):
                if isinstance(given, (list, tuple)):
                    item.replace_all_uses_with(given[place])


def _items(update: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    for part in update.users:
        if part.target is getitem and part.args[1] == _GRADIENTS:
            for item in part.users:
                if item.target is getitem and isinstance(item.args[1], int):
                    yield item.args[1], item
