"""The storage under a node, as far as the graph's operators tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.ops import is_view, operator_name, overload, returns_written, written_arguments

if TYPE_CHECKING:
    from torch import fx


_PARTED = ("aten::split", "aten::unsafe_split", "aten::chunk", "aten::tensor_split", "aten::unbind")
"""What the names of operators begin with whose results have no element in common, be they views or copies."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's result lies: a storage, and which part of it for each list of parts on the way there."""

    storage: fx.Node
    parts: Mapping[fx.Node, object]

    def meets(self, other: Place) -> bool:
        """Whether both may have an element in common."""
        parted = any(other.parts.get(parts, index) != index for parts, index in self.parts.items())
        return self.storage is other.storage and not parted


def place(node: fx.Node) -> Place:
    """Where ``node``'s result lies, back through views, their parts, waits, and results of writes."""
    parts: dict[fx.Node, object] = {}
    while True:
        if node.target is getitem and overload(node.all_input_nodes[0]) is not None:
            if operator_name(node.all_input_nodes[0]).startswith(_PARTED) and _is_from_the_front(node.args[1]):
                parts[node.all_input_nodes[0]] = node.args[1]
            node = node.all_input_nodes[0]
        elif (is_view(node) or collectives.is_wait(node) or node.target is getitem) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        elif returns_written(node) and (written := written_arguments(node)):
            node = written[0]
        else:
            return Place(node, parts)


def _is_from_the_front(index: object) -> bool:
    return isinstance(index, int) and index >= 0


def base(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` shares."""
    return place(node).storage
