"""Parameters sharded on dimension 0: gathered where they are read, gradients reduced and scattered (arXiv 2411.00284)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.collectives import c10d_functional

if TYPE_CHECKING:
    from pytest_fxbucket.capture.mesh import Group, Mesh


@dataclass(frozen=True, slots=True)
class Sharded:
    """``mode = "fully_shard"``; with a group of copies ``"hybrid_shard"``."""

    along: str
    """Mesh dimension that parameters are sharded over."""
    shard: Group
    replicate: Group | None
    scatter_first: bool
    """Whether gradients are scattered before they are averaged over the copies, as FSDP2 does; else after, as SimpleFSDP."""
    divide: int = 1
    """Gradients are divided by it: how many ranks' batches each of them is already the sum of."""

    def part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """Rank's shard, padded with zeros; what has no dimension is sharded as one element."""
        return local_shard(whole if whole.dim() else whole.view(1), mesh.at(rank, self.along), self.shard.size)

    def gather(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """All shards in order of ranks, without the padding."""
        if self.shard.size == 1:  # as of experts, where each has one rank
            return part if shape else part.view(shape)
        c10d = c10d_functional()
        whole: torch.Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(part, self.shard.size, self.shard.name))
        rows = shape[0] if shape else 1
        whole = whole if whole.shape[0] == rows else whole.narrow(0, 0, rows)
        return whole if shape else whole.view(shape)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Rank's shard of the average."""
        gradient = gradient if gradient.dim() else gradient.view(1)
        padding = shard_rows(gradient.shape[0], self.shard.size) * self.shard.size - gradient.shape[0]
        if padding:
            gradient = torch.nn.functional.pad(gradient, [0, 0] * (gradient.dim() - 1) + [0, padding])
        if not self.scatter_first:
            gradient = self._over_copies(gradient)
        gradient = self._scattered(gradient)
        if self.scatter_first:
            gradient = self._over_copies(gradient)
        return gradient / self.divide if self.divide > 1 else gradient

    def _scattered(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            return gradient
        c10d = c10d_functional()
        mine: torch.Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(gradient, "avg", self.shard.size, self.shard.name))
        return mine

    def _over_copies(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.replicate is None:
            return gradient
        c10d = c10d_functional()
        averaged: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(gradient, "avg", self.replicate.name))
        return averaged


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
