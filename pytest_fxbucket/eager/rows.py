"""A rank's part of a tensor without what pads it: torch pads no shard, a graph pads those whose rows do not divide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_fxbucket.checks.bitwise_job import Task


def own_rows(tensor: torch.Tensor, fqn: str, rank: int, task: Task) -> torch.Tensor:
    """``tensor``, the parameter ``fqn``, its gradient or its state, without rows that pad it: as torch.chunk deals them."""
    of = {parameter.fqn: parameter for parameter in task.parameters}
    owner = of.get(fqn) or of.get(fqn.rpartition(".")[0])
    if owner is None or task.parallel.mode == "replicate" or tuple(tensor.shape) != owner.shard_shape or not tensor.dim():
        return tensor
    rows = owner.local_shape[0] if owner.local_shape else 1
    chunks = torch.empty(rows, 0).chunk(task.mesh.degree("dp_shard"))
    at = task.mesh.at(rank, "dp_shard")
    return tensor[: len(chunks[at]) if at < len(chunks) else 0]
