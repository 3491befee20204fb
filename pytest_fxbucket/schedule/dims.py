"""Process groups as people and goldens name them: by the mesh dimensions that they span, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import MeshDim


def dims_text(ranks: Sequence[int], mesh: Sequence[MeshDim]) -> str:
    """``dp_shard``, ``dp_replicate x dp_shard``; of a group that spans no dimension its size and spacing: ``2 ranks 4 apart``.

    ``ranks`` are global and ascending; of ``mesh`` the last dimension counts fastest.
    """
    places = [_place(rank, mesh) for rank in ranks]
    spanned = [dim for at, dim in enumerate(mesh) if len({place[at] for place in places}) > 1]
    if ranks and ranks[-1] < prod(dim.size for dim in mesh) and prod(dim.size for dim in spanned) == len(ranks) > 1:
        return " x ".join(dim.name for dim in spanned)
    if len(ranks) < 2:
        return "1 rank"
    gaps = {after - before for before, after in pairwise(ranks)}
    if len(gaps) == 1:
        return f"{len(ranks)} ranks {gaps.pop()} apart"
    return "ranks " + " ".join(f"+{rank - ranks[0]}" for rank in ranks)


def _place(rank: int, mesh: Sequence[MeshDim]) -> tuple[int, ...]:
    """Coordinates of a rank."""
    found: list[int] = []
    for dim in reversed(mesh):
        rank, at = divmod(rank, dim.size)
        found.append(at)
    return tuple(reversed(found))
