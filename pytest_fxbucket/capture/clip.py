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
    """Name of its process group; empty for one of this rank alone, over which torch computes the same."""
    size: int


@dataclass(frozen=True)
class AcrossStages:
    """Gradients that ranks of several pipeline stages have. Their norms are stacked in the order that one rank would have."""

    group: str
    """Name of the process group along ``pp``."""
    fqns_of_ranks: tuple[tuple[str, ...], ...]
    """For each of its ranks the FQNs of its gradients, in the order of its stack."""
    order: tuple[str, ...]
    """FQNs of all gradients, in the order that one rank with all of them would stack."""

    dtype: torch.dtype
    """dtype of the whole stack: torch promotes the norms of narrower gradients to it."""

    def gathered(self, stacked: torch.Tensor) -> torch.Tensor:
        """The norms of all gradients, in ``order``, from this rank's."""
        # An all-gather takes equally much of every rank, so norms are padded to the most that one has.
        longest = max(map(len, self.fqns_of_ranks))
        padded = torch.nn.functional.pad(stacked.to(self.dtype), [0, longest - stacked.shape[0]]).unsqueeze(0)
        everything = collective("all_gather_into_tensor", padded, len(self.fqns_of_ranks), self.group)
        where: dict[str, tuple[int, int]] = {}
        for place, names in enumerate(self.fqns_of_ranks):
            for index, name in enumerate(names):
                # Of a gradient that several stages have the first one counts.
                where.setdefault(name, (place, index))
        # Norms that lie side by side in what was gathered, and follow one another in ``order``, are taken by one slice.
        runs: list[list[int]] = []  # place, begin, end
        for place, index in map(where.__getitem__, self.order):
            if runs and runs[-1][0] == place and runs[-1][2] == index:
                runs[-1][2] += 1
            else:
                runs.append([place, index, index + 1])
        return torch.cat([everything.select(0, place).narrow(0, begin, end - begin) for place, begin, end in runs])


@dataclass(frozen=True)
class Clip:
    """Clipping by the norm of all gradients together."""

    max_norm: float
    dims: tuple[NormDim, ...] = ()
    """Outermost first."""
    sharded: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By FQN the names of the dimensions over which a gradient is sharded; over all others each rank has the same."""
    across: AcrossStages | None = None
    """None: this rank has all gradients."""


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
    everyone = clip.across.order if clip.across else names
    dims = [dim for dim in clip.dims if any(dim.name in clip.sharded.get(fqn, ()) for fqn in everyone)]
    shares = []  # what this rank adds to the sum of a norm that others have too
    for fqn, norm in zip(names, norms, strict=True):
        for dim in dims:
            if dim.name not in clip.sharded.get(fqn, ()):
                norm = norm / math.pow(dim.size, 1 / 2.0)
        shares.append(norm)
    stacked = torch.stack(shares)
    if clip.across is not None:
        stacked = clip.across.gathered(stacked)
    for dim in dims:
        squared = stacked**2.0
        stacked = (collective("all_reduce", squared, "sum", dim.group) if dim.group else squared) ** (1.0 / 2.0)
    total = torch.linalg.vector_norm(stacked, 2.0)
    factor = torch.clamp(clip.max_norm / (total + 1e-6), max=1.0)
    for group in groups:
        torch._foreach_mul_(group, factor)
