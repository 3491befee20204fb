"""What packs the members of a launch, and what cuts them out of what arrives."""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph.collectives import tensors_sent
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.mutate.moving import carries

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.mutate.launches import Flight


def pack_of(launch: fx.Node) -> fx.Node | None:
    """The cat of several tensors that ``launch`` sends, cast or seen otherwise; None if it sends no such."""
    for node in tensors_sent(launch):
        while carries(node):
            if operator_name(node) == "aten::cat":
                return node if len(node.all_input_nodes) > 1 else None
            if len(node.all_input_nodes) != 1:
                return None
            node = node.all_input_nodes[0]
    return None


def split_of(flight: Flight) -> fx.Node | None:
    """What cuts what arrives into pieces; None if nothing does."""
    for node in flight.arrived:
        if operator_name(node) == "aten::split_with_sizes" and len(pieces_of(node)) > 1 and sizes_of(node):
            return node
    return None


def members_of(pack: fx.Node) -> list[fx.Node]:
    """What ``pack`` puts one behind the other."""
    members: Any = pack.args[0]
    return list(members)


def pieces_of(split: fx.Node) -> dict[int, fx.Node]:
    """What is taken out of ``split``, by its number."""
    return {int(str(user.args[1])): user for user in split.users if user.target is getitem}


def sizes_of(split: fx.Node) -> list[int]:
    """Elements of each piece of ``split`` along its dimension; empty if any is symbolic."""
    sizes: Any = split.args[1]
    return list(sizes) if all(isinstance(size, int) for size in sizes) else []


def dim_of(split: fx.Node) -> int:
    """The dimension that ``split`` cuts."""
    return int(str(split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)))
