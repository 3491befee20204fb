"""Parameters whole on every rank, gradients averaged, as DistributedDataParallel does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.collectives import c10d_functional

if TYPE_CHECKING:
    from pytest_fxbucket.capture.mesh import Group, Mesh


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
        c10d = c10d_functional()
        averaged: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(gradient.contiguous(), "avg", self.group.name))
        return averaged
