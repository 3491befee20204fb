"""Parallel modes of one's own, right and wrong ones, as plans name them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.step.mesh import Mesh


class LastDimension:
    """A parallel mode: parameters sharded on their last dimension."""

    along = of = "dp_shard"

    def __init__(self, parallel: Parallel, mesh: Mesh) -> None:
        group = mesh.group(self.of)
        self.size, self.name = group.size, group.name

    def part(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        return whole.chunk(self.size, -1)[mesh.at(rank, self.along)].clone(memory_format=torch.contiguous_format)

    def gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        c10d = torch.ops._c10d_functional
        return torch.cat(c10d.wait_tensor(c10d.all_gather_into_tensor(part, self.size, self.name)).chunk(self.size), -1)

    def reduce(self, gradient: Tensor) -> Tensor:
        c10d = torch.ops._c10d_functional
        below = torch.cat(gradient.chunk(self.size, -1))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(below, "avg", self.size, self.name))


class HalfAMode:
    along = "dp_shard"

    def __init__(self, parallel: Parallel, mesh: Mesh) -> None:
        pass

    def part(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        return whole


def raising_mode(parallel: Parallel, mesh: Mesh) -> object:
    raise LookupError("no such mesh")


class RaisingPart(LastDimension):
    def part(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        if whole.shape[-1] % self.size:
            raise ValueError(f"{self.size} ranks do not divide {whole.shape[-1]}")
        return super().part(whole, mesh, rank)

    def gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        raise RuntimeError("no way back")


class Rowwise(LastDimension):
    """Sharded on dimension 0, padded so that ranks divide it."""

    def padded(self, whole: Tensor) -> Tensor:
        missing = -whole.shape[0] % self.size
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])

    def part(self, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
        return self.padded(whole).chunk(self.size)[mesh.at(rank, self.along)].clone()

    def gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.all_gather_into_tensor(part, self.size, self.name))[: shape[0]]

    def reduce(self, gradient: Tensor) -> Tensor:
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(self.padded(gradient), "avg", self.size, self.name))


class LeavesPadding(Rowwise):
    def gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        return super().gather(part, torch.Size([part.shape[0] * self.size]))


class GathersAPart(Rowwise):
    def gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        return part.clone()


class GathersNothing(Rowwise):
    def gather(self, part: Tensor, shape: torch.Size) -> Any:
        super().gather(part, shape)


class ReducesWhole(Rowwise):
    def reduce(self, gradient: Tensor) -> Tensor:
        return gradient * 2


class NoWayBack(LastDimension):
    gather = None


class AlongDp(LastDimension):
    along = "dp"


class GroupOfDp(LastDimension):
    of = "dp"


def forgotten(parallel: Parallel, mesh: Mesh) -> None:
    LastDimension(parallel, mesh)
