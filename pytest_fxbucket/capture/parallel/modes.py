"""How parameters travel in each parallel mode: a rank's part, the whole gathered from it, and its gradient reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.step.mesh import Group, Mesh
from pytest_fxbucket.user_frame import naming_user_frame
from pytest_fxbucket.words import show


class ParallelMode(Protocol):
    """A parallel mode. Its methods are traced, but for ``part``, and must be the same on every rank."""

    @property
    def along(self) -> str:
        """Mesh dimension over which parameters are parted; empty if every rank has all of them."""

    def part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """Rank's part of a parameter: a new contiguous tensor, of one shape on all ranks."""

    def gather(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The whole parameter of ``shape`` again, from ``part`` in the dtype that it is gathered in."""

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Rank's part of the gradient, averaged over all ranks of the batch, from the whole one of this rank's batch."""


def modes_of(parallel: Parallel, mesh: Mesh, where: str) -> tuple[ParallelMode, ParallelMode]:
    """The modes of dense parameters and of experts that ``parallel`` asks for on ``mesh``.

    Raises CaptureError or PlanError for a callable that gives none.
    """
    if parallel.mode == "replicate":
        mode: ParallelMode = Replicated(mesh.group(mesh.data_parallel("dp_replicate")))
        return mode, mode
    if parallel.mode in ("fully_shard", "hybrid_shard"):
        replicate = mesh.group("dp_replicate") if parallel.mode == "hybrid_shard" else None
        first = parallel.reduce_order == "scatter_first"
        along = mesh.data_parallel("dp_shard")
        dense = Sharded(along, mesh.group(along), replicate, first)
        if parallel.ep == 1:
            return dense, dense
        # ep takes its ranks out of dp_shard, so experts are sharded over what is left of it. An expert has the tokens of all
        # ranks of ep, so its gradient is already the sum over them, and the average lacks a division by ep.
        inner = "dp_shard_mod_ep"
        return dense, Sharded(inner, mesh.group(inner), replicate, first, mesh.degree("ep"))
    mode = _foreign(parallel.mode, parallel, mesh, where)
    return mode, mode


def _foreign(name: str, parallel: Parallel, mesh: Mesh, where: str) -> ParallelMode:
    make = cast("Callable[[Parallel, Mesh], object]", import_callable(name, where))
    with naming_user_frame(lambda: f"mode {name}"), _naming(f"mode {name}: "):
        made = make(parallel, mesh)
    mode = _checked(name, made)
    if mode.along:
        with _naming(f"mode {name} parts parameters along {show(mode.along)}, but "):
            mesh.refuse_unknown(mode.along)
    return mode


@contextmanager
def _naming(beginning: str) -> Iterator[None]:
    """Put ``beginning``, which says who used a name, before what the mesh says of a name that it does not have."""
    try:
        yield
    except CaptureError as error:
        raise CaptureError(f"{beginning}{error}") from None


def _checked(name: str, made: object) -> ParallelMode:
    if made is None:
        raise CaptureError(f"mode {name} returned None, expected a Mode")
    lacking = [method for method in ("part", "gather", "reduce") if not callable(getattr(made, method, None))]
    if not isinstance(getattr(made, "along", None), str):
        lacking.insert(0, "along")
    if lacking:
        kind, what = type(made).__name__, f"no {'' if lacking[0] == 'along' else 'method '}{lacking[0]}"
        raise CaptureError(f"mode {name} gave a value of type {kind}, which has {what}; expected a Mode")
    return cast("ParallelMode", made)


@dataclass(frozen=True, slots=True)
class Replicated:
    """``mode = "replicate"``."""

    group: Group

    @property
    def along(self) -> str:
        """Nothing is parted."""
        return ""

    def part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """All of it."""
        return whole.clone(memory_format=torch.contiguous_format)

    def gather(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """It is whole already."""
        return part

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """The average over all ranks."""
        if not self.group.name:
            return gradient.contiguous()
        return collective("all_reduce", gradient.contiguous(), "avg", self.group.name)


# Parameters sharded on dimension 0: gathered where they are read, gradients reduced and scattered (arXiv 2411.00284).


@dataclass(frozen=True, slots=True)
class Sharded:
    """``mode = "fully_shard"``; with a group of copies ``"hybrid_shard"``."""

    along: str
    """Mesh dimension that parameters are sharded over."""
    shard: Group
    replicate: Group | None
    scatter_first: bool
    """Whether gradients are scattered before they are averaged over the copies, as FSDP2 does; else after, as SimpleFSDP."""
    divide: float = 1
    """Divides what was reduced: the number of ranks over whose batches a gradient is already summed before it is reduced."""
    ops: tuple[str, str] = ("avg", "avg")
    """Reduction over shards, and over copies."""
    before: float = 1
    """Gradients are multiplied by it before they are reduced."""

    def part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """Rank's shard, padded with zeros; what has no dimension is sharded as one element."""
        return local_shard(whole if whole.dim() else whole.view(1), mesh.at(rank, self.along), self.shard.size)

    def gather(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """All shards in order of ranks, without the padding."""
        if self.shard.size == 1:  # as of experts, where each has one rank
            return part if shape else part.view(shape)
        whole = collective("all_gather_into_tensor", part, self.shard.size, self.shard.name)
        rows = shape[0] if shape else 1
        whole = whole if whole.shape[0] == rows else whole.narrow(0, 0, rows)
        return whole if shape else whole.view(shape)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Rank's shard of the average."""
        gradient = gradient if gradient.dim() else gradient.view(1)
        gradient = gradient if self.before == 1 else gradient * self.before
        # A reduce-scatter cuts equal parts, so rows are padded as those of the shards are.
        padding = shard_rows(gradient.shape[0], self.shard.size) * self.shard.size - gradient.shape[0]
        if padding:
            gradient = torch.nn.functional.pad(gradient, [0, 0] * (gradient.dim() - 1) + [0, padding])
        for step in (self._scattered, self._over_copies) if self.scatter_first else (self._over_copies, self._scattered):
            gradient = step(gradient)
        return gradient / self.divide if self.divide != 1 else gradient

    def _scattered(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            return gradient
        return collective("reduce_scatter_tensor", gradient, self.ops[0], self.shard.size, self.shard.name)

    def _over_copies(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.replicate is None or not self.replicate.name:
            return gradient
        return collective("all_reduce", gradient, self.ops[1], self.replicate.name)


def shard_rows(rows: int, ranks: int) -> int:
    """Rows of a rank's padded shard: ceil(rows / ranks)."""
    return -(-rows // ranks)


def local_shard(tensor: torch.Tensor, index: int, ranks: int) -> torch.Tensor:
    """Shard ``index`` of ``tensor``, dimension 0 padded with zeros to ceil(rows / ranks): a new contiguous tensor."""
    rows = shard_rows(tensor.shape[0], ranks)
    shard = tensor.new_zeros((rows, *tensor.shape[1:]))
    start = min(index * rows, tensor.shape[0])
    stop = min(start + rows, tensor.shape[0])
    shard[: stop - start].copy_(tensor[start:stop])
    return shard
