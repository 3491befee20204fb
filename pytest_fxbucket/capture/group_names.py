"""Process groups that somebody's tracing made, under the names that the plan's mesh gives groups of the same ranks.

torch numbers groups as they are made, and ranks make other ones than a tracer did: a graph is to mean the same on all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat.c10d import DEFAULT, group_ranks
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.collectives import read_launch

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.mesh import Mesh


def name_as_the_mesh_does(module: fx.GraphModule, mesh: Mesh, rank: int, where: str) -> fx.GraphModule:
    """``module``, or a copy of it in which groups of ranks along ``mesh`` have the mesh's names for them.

    A group that this process does not know keeps its name. Raises :class:`CaptureError`, beginning with ``where``, for ranks
    that are along no dimension of the mesh.
    """
    known = _known(mesh, rank)
    names: dict[str, str] = {}
    for node in module.graph.nodes:
        launch = read_launch(node)
        if launch is None or launch.group in names or launch.group in known.values():
            continue
        try:
            ranks = group_ranks(launch.group)
        except KeyError:
            continue
        if len(ranks) > 1 and ranks not in known:
            raise CaptureError(f"{where} launches {launch.kind} ({node.name}) on {_ranks(ranks)}, {_no_dimension(mesh)}")
        if ranks in known:
            names[launch.group] = known[ranks]
    return _renamed(module, names) if names else module


def refuse_other_mesh(dims: Mapping[str, Sequence[int]], mesh: Mesh, rank: int, where: str) -> None:
    """Raise :class:`CaptureError` if ranks of one of ``dims``, by its name, are along no dimension of ``mesh``."""
    known = _known(mesh, rank)
    for name, ranks in dims.items():
        if len(ranks) > 1 and tuple(ranks) not in known:
            raise CaptureError(f"{where}: dimension {name} of its mesh has {_ranks(ranks)}, {_no_dimension(mesh)}")


def _known(mesh: Mesh, rank: int) -> dict[tuple[int, ...], str]:
    """Names of groups by their ranks."""
    return {tuple(range(mesh.size)): DEFAULT} | {ranks: name for name, ranks in mesh.groups(rank).items()}


def _no_dimension(mesh: Mesh) -> str:
    dims = ", ".join(f"{dim.name} = {dim.size}" for dim in mesh.dims)
    return f"which are along no dimension of [parallel]'s mesh ({dims}); let both meshes have the same sizes in the same order"


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _renamed(module: fx.GraphModule, names: dict[str, str]) -> fx.GraphModule:
    from torch import fx

    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        launch = read_launch(node)
        if launch is not None and launch.group in names:
            old, new = launch.group, names[launch.group]

            def other(argument: Any, old: str = old, new: str = new) -> Any:
                return new if argument == old and isinstance(argument, str) else argument

            node.args = tuple(other(argument) for argument in node.args)
            node.kwargs = {key: other(argument) for key, argument in node.kwargs.items()}
    return fx.GraphModule(module, graph)
