"""The process groups that a graph names, as this process knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.compat.groups import group_ranks
from pytest_fxbucket.graph.collectives import read_launch

if TYPE_CHECKING:
    from torch import fx


def members_of_groups(graph: fx.Graph) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group that ``graph`` names and this process knows."""
    names = {launch.group for node in graph.nodes if (launch := read_launch(node)) is not None}
    found = {}
    for name in sorted(names):
        try:
            found[name] = group_ranks(name)
        except KeyError:
            continue
    return found
