"""Clipping of sharded gradients by their global norm, in the operations of ``torch.nn.utils.clip_grad_norm_`` on DTensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.compat.fake_tensors import grouped


@dataclass(frozen=True, slots=True)
class NormDim:
    """A dimension of the mesh over which gradients may be sharded."""

    name: str
    group: str
    """Name of its process group."""
    size: int


@dataclass(frozen=True)
class Clip:
    """Clipping by the norm of all gradients together."""

    max_norm: float
    dims: tuple[NormDim, ...] = ()
    """Outermost first."""
    sharded: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By FQN the names of the dimensions over which a gradient is sharded; over all others each rank has the same."""


def clip_(grads: Mapping[str, torch.Tensor], clip: Clip) -> None:
    """Scale the local gradients in place so that the norm of all, over all ranks, is ``clip.max_norm`` at most.

    Norms are taken per tensor and stacked; the stack, one number a gradient, is squared, summed over each dimension that shards
    any, and rooted. What is not sharded there is divided first, so that it counts once. Zeros that pad an uneven shard do not
    change the norm, but can change the order of its sum, and so its last bit.
    """
    groups = grouped(list(grads.values()))
    fqns = {id(grad): fqn for fqn, grad in grads.items()}
    names = [fqns[id(grad)] for group in groups for grad in group]
    norms = [norm for group in groups for norm in torch._foreach_norm(group, 2.0)]
    dims = [dim for dim in clip.dims if any(dim.name in clip.sharded.get(fqn, ()) for fqn in names)]
    shares = []  # what this rank adds to the sum of a norm that others have too
    for fqn, norm in zip(names, norms, strict=True):
        for dim in dims:
            if dim.name not in clip.sharded.get(fqn, ()):
                norm = norm / math.pow(dim.size, 1 / 2.0)
        shares.append(norm)
    stacked = torch.stack(shares)
    for dim in dims:
        stacked = collective("all_reduce", stacked**2.0, "sum", dim.group) ** (1.0 / 2.0)
    total = torch.linalg.vector_norm(stacked, 2.0)
    factor = torch.clamp(clip.max_norm / (total + 1e-6), max=1.0)
    for group in groups:
        torch._foreach_mul_(group, factor)
