"""The device mesh of a step: its dimensions, and the process groups along them, called the same on every rank.

The last dimension counts fastest: ranks of one ``tp`` group are neighbours. Ranks along ``cp`` have parts of one batch. What is
sharded or copied over data-parallel ranks is so over those, too: ``dp_shard_cp``, ``dp_replicate_cp``.

With experts, ``dp_shard`` is two dimensions, ``dp_shard_mod_ep`` and ``ep``: each expert is on one rank of ``ep`` and sharded
over the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import MeshDim
from pytest_fxbucket.words import nearest, one_or_other, show

_WITH_CP = {"dp_shard_cp": ("dp_shard", "cp"), "dp_replicate_cp": ("dp_replicate", "cp")}
_PARTS = {"dp_shard": ("dp_shard", "dp_shard_mod_ep", "ep"), **_WITH_CP}
"""Dimensions that a name stands for, as far as a mesh has them."""
GROUPED = ("pp", "dp_replicate", "dp_replicate_cp", "dp_shard", "dp_shard_cp", "dp_shard_mod_ep", "ep", "cp", "tp")
"""Dimensions that groups are made along, and that any mesh may be asked for; one that a mesh does not have is of one rank."""
_LONE = tuple(name for name in GROUPED if name not in _WITH_CP)


@dataclass(frozen=True, slots=True)
class Group:
    """A process group along dimensions of a mesh, as one rank sees it."""

    name: str
    """Name under which collectives find the group."""
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Dimensions of more than one rank, the outermost first. Its methods raise CaptureError for a name that is none."""

    dims: tuple[MeshDim, ...]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return prod(dim.size for dim in self.dims)

    def degree(self, name: str) -> int:
        """Ranks along the dimension ``name``; 1 if the mesh does not have it."""
        return prod(dim.size for dim in self._along(name))

    def at(self, rank: int, name: str) -> int:
        """Index of ``rank`` along the dimension ``name``; 0 if the mesh does not have it."""
        along, index = self._along(name), 0
        for dim, place in zip(self.dims, _place(rank, self.dims), strict=True):
            # A name may stand for several dimensions, whose places are the digits of one number.
            if dim in along:
                index = index * dim.size + place
        return index

    @property
    def data_ranks(self) -> int:
        """How many ranks get batches of their own: those of a tp group share one, those of a cp group have parts of one."""
        return self.degree("dp_replicate") * self.degree("dp_shard")

    def data_rank(self, rank: int) -> int:
        """Which of :attr:`data_ranks` batches ``rank`` gets."""
        return self.at(rank, "dp_replicate") * self.degree("dp_shard") + self.at(rank, "dp_shard")

    def data_parallel(self, name: str) -> str:
        """The dimension ``name``, ``dp_shard`` or ``dp_replicate``, with cp as far as the mesh has both."""
        if self.degree("cp") == 1:
            return name
        return f"{name}_cp" if self.degree(name) > 1 else "cp"

    def sharing_batches(self) -> list[list[int]]:
        """Sets of ranks that get the same batch, or the same part of one."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.size):
            found.setdefault((self.data_rank(rank), self.at(rank, "cp")), []).append(rank)
        return [ranks for ranks in found.values() if len(ranks) > 1]

    def group(self, name: str) -> Group:
        """The group along the dimension ``name`` that this process is in; the default one if it spans all ranks.

        A group of one process in a larger mesh is not made: its name is empty.
        """
        from pytest_fxbucket.compat.c10d import DEFAULT

        size = self.degree(name)
        return Group(DEFAULT if size == self.size else f"mesh_{name}" if size > 1 else "", size)

    def ranks(self, rank: int, name: str) -> tuple[int, ...]:
        """Ranks of ``rank``'s group along the dimension ``name``, ascending."""
        along = self._along(name)
        places = _place(rank, self.dims)
        axes = [range(dim.size) if dim in along else (place,) for dim, place in zip(self.dims, places, strict=True)]
        return tuple(self._rank(place) for place in product(*axes))

    def seen_by(self, rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """What a group of ``ranks`` is to ``rank``: moved to its place along the dimensions in which they do not differ.

        Of ``(2, 3)`` in a mesh of 2 x 2 that is ``(0, 1)`` to rank 0.
        """
        places, own = [_place(one, self.dims) for one in ranks], _place(rank, self.dims)
        moved = [own[at] if len({place[at] for place in places}) == 1 else None for at in range(len(self.dims))]
        return tuple(
            self._rank([there if to is None else to for there, to in zip(place, moved, strict=True)]) for place in places
        )

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Ranks of every group but the default one that ``rank`` is in, by the group's name, in one order on all ranks."""
        found: dict[str, tuple[int, ...]] = {}
        for name in GROUPED:
            # A dimension with cp has a group of its own only if the mesh has both parts; else it is one of these.
            is_own = name not in _WITH_CP or self.data_parallel(name.removesuffix("_cp")) == name
            if is_own and 1 < self.degree(name) < self.size:
                found[self.group(name).name] = self.ranks(rank, name)
        return found

    def refuse_unknown(self, name: str) -> None:
        """Raise :class:`CaptureError`, with the nearest of the mesh's own, for a name that is no dimension."""
        if name in GROUPED or any(dim.name == name for dim in self.dims):
            return
        longer = [show(known) for known in _LONE if name and known.startswith(name) and self.degree(known) > 1]
        near = f"; did you mean {one_or_other(longer)}?" if longer else nearest(name, list(GROUPED))
        raise CaptureError(f"the mesh has no dimension {show(name)}{near}")

    def _along(self, name: str) -> tuple[MeshDim, ...]:
        self.refuse_unknown(name)
        return tuple(dim for dim in self.dims if dim.name in _PARTS.get(name, (name,)))

    def _rank(self, place: Sequence[int]) -> int:
        rank = 0
        for dim, at in zip(self.dims, place, strict=True):
            rank = rank * dim.size + at
        return rank


def mesh_with(degrees: Mapping[str, int], ep: int = 1) -> Mesh:
    """The mesh of ``degrees``, the outermost first; ``ep`` ranks of ``dp_shard`` share the experts."""
    sizes = dict(degrees)
    if ep > 1:
        # No plan has cp beside ep, so it has no place in this order.
        shard = sizes.pop("dp_shard")
        order = {"dp_shard_mod_ep": shard // ep, "ep": ep}
        sizes = {"pp": sizes.get("pp", 1), "dp_replicate": sizes.get("dp_replicate", 1), **order, "tp": sizes.get("tp", 1)}
    dims = tuple(MeshDim(name, size) for name, size in sizes.items() if size > 1)
    return Mesh(dims or (MeshDim("dp_shard", 1),))


def shard_mesh(ranks: int) -> Mesh:
    """A mesh of one dimension, ``dp_shard``."""
    return mesh_with({"dp_shard": ranks})


@contextmanager
def fake_mesh(mesh: Mesh, rank: int) -> Iterator[None]:
    """Make this process rank ``rank`` of ``mesh`` on fake process groups, and undo it after.

    Raises :class:`CaptureError` if a default process group exists already.
    """
    from pytest_fxbucket.compat.c10d import fake_world

    with fake_world(rank, mesh.size):
        make_groups(mesh, rank)
        yield


def make_groups(mesh: Mesh, rank: int) -> None:
    """Make the groups along ``mesh`` that ``rank`` is in, where this process has none. All ranks call it alike."""
    from pytest_fxbucket.compat.c10d import make_group

    for name, ranks in mesh.groups(rank).items():
        make_group(name, ranks)


# Process groups as people and goldens name them: by the mesh dimensions that they span, the same on every rank.


def dims_text(ranks: Sequence[int], mesh: Sequence[MeshDim]) -> str:
    """``dp_shard``, ``dp_replicate x dp_shard``; of a group that spans no dimension its size and spacing: ``2 ranks 4 apart``.

    ``ranks`` are global and ascending; of ``mesh`` the last dimension counts fastest.
    """
    places = [_place(rank, mesh) for rank in ranks]
    spanned = [dim for at, dim in enumerate(mesh) if len({place[at] for place in places}) > 1]
    # Ranks that differ along these dimensions fill them only if there are as many of them as the dimensions have together.
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
