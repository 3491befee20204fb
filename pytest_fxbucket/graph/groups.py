"""The process groups that a graph names, as this process knows them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.c10d import group_ranks, make_twin, twin_name
from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph.collectives import read_launch

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.mesh import Mesh


def members_of_groups(graph: fx.Graph) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group that ``graph`` names and this process knows."""
    found = {}
    for name in _names(graph):
        try:
            found[name] = group_ranks(name)
        except KeyError:
            continue
    return found


def join(graph: fx.Graph, mesh: Mesh | None, what: str) -> None:
    """Make the process groups that ``graph`` names and ``mesh`` knows, if this process lacks them; all ranks call it alike.

    Raises :class:`GraphError`, whose message calls the graph ``what``, if it cannot.
    """
    import torch.distributed as dist

    from pytest_fxbucket.step.mesh import make_groups

    names = _names(graph)
    if not names:
        return
    if not dist.is_initialized():
        world = mesh.size if mesh is not None else "..."
        raise GraphError(
            f"{what} launches collectives, and this process is no rank; call it in the body of a test marked "
            f"fxbucket_ranks({world}), which gets it from a fixture"
        )
    if mesh is not None and mesh.size != dist.get_world_size():
        raise GraphError(f"{what} launches collectives on {mesh.size} ranks, and is called on {dist.get_world_size()}")
    if mesh is not None:
        make_groups(mesh, dist.get_rank())
    with suppress(KeyError):  # The error below names the group.
        ensure_twins(graph)
    if unknown := [name for name in names if name not in members_of_groups(graph)]:
        raise GraphError(f"{what} launches collectives on process group {unknown[0]!r}, which this process does not have")


def ensure_twins(graph: fx.Graph) -> None:
    """Make the twins of process groups that ``graph`` names, if this process lacks them.

    All ranks call it alike before they run the graph. Raises KeyError if this process lacks the group of a twin.
    """
    said = (read_launch(node) for node in graph.nodes)
    names = {launch.group for launch in said if launch is not None and launch.group == twin_name(launch.group)}
    # One order on all ranks: ranks of two groups that overlap would wait for each other, and names may differ between ranks.
    for name in sorted(names, key=lambda name: (group_ranks(name), name)):
        make_twin(name)


def _names(graph: fx.Graph) -> list[str]:
    return sorted({launch.group for node in graph.nodes if (launch := read_launch(node)) is not None})
