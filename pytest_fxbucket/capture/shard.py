"""Parameters sharded on dimension 0, gathered where a module first reads them, as SimpleFSDP does (arXiv 2411.00284)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.collectives import c10d_functional

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.capture.names import NodeNamer


@dataclass(frozen=True, slots=True)
class ShardPolicy:
    """How parameters travel."""

    ranks: int
    group: str
    param_dtype: torch.dtype | None
    """dtype of the all-gather; None: the parameter's own."""
    reduce_dtype: torch.dtype | None
    """dtype of the reduce-scatter; None: the gradient's own."""


def _read_for(read: Callable[[str], torch.Tensor], fqn: str, module: nn.Module) -> torch.Tensor:
    return read(fqn)


def shard_rows(rows: int, ranks: int) -> int:
    """Rows of a rank's padded shard: ceil(rows / ranks)."""
    return -(-rows // ranks)


def local_shard(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Rank's shard of ``tensor``, dimension 0 padded with zeros to ceil(rows / ranks): a new contiguous tensor."""
    rows = shard_rows(tensor.shape[0], ranks)
    shard = tensor.new_zeros((rows, *tensor.shape[1:]))
    start = min(rank * rows, tensor.shape[0])
    stop = min(start + rows, tensor.shape[0])
    shard[: stop - start].copy_(tensor[start:stop])
    return shard


class _Unshard(torch.autograd.Function):
    """Shard to full parameter; in backward full gradient to the averaged, sharded one."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, rows: int, policy: ShardPolicy) -> torch.Tensor:
        ctx.policy, ctx.dtype, ctx.rows = policy, shard.dtype, rows
        ctx.padded_rows = shard.shape[0] * policy.ranks
        c10d = c10d_functional()
        sent = shard.to(policy.param_dtype or shard.dtype)
        full: torch.Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(sent, policy.ranks, policy.group))
        return full if rows == ctx.padded_rows else full.narrow(0, 0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        policy: ShardPolicy = ctx.policy
        c10d = c10d_functional()
        if ctx.rows != ctx.padded_rows:
            padding = [0, 0] * (grad.dim() - 1) + [0, ctx.padded_rows - ctx.rows]
            grad = torch.nn.functional.pad(grad, padding)
        grad = grad.to(policy.reduce_dtype or grad.dtype)
        reduced = c10d.wait_tensor(c10d.reduce_scatter_tensor(grad, "avg", policy.ranks, policy.group))
        return reduced.to(ctx.dtype), None, None


@contextmanager
def gathered_on_read(
    model: nn.Module, shards: Mapping[str, torch.Tensor], policy: ShardPolicy, namer: NodeNamer
) -> Iterator[None]:
    """While inside, reading a parameter of ``model`` gives the full tensor, gathered from ``shards`` at its first read.

    ``shards`` maps canonical FQNs to local shards. A tied parameter is gathered once and has one gradient. Each module gets a
    class of its own for the time being, so nothing leaks into other models of the process.
    """
    gathered: dict[str, torch.Tensor] = {}
    canonical = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    classes = [(module, type(module)) for module in model.modules()]
    rows = {fqn: parameter.shape[0] for fqn, parameter in model.named_parameters()}

    def read(fqn: str) -> torch.Tensor:
        if fqn not in gathered:
            with namer.inside(fqn.rpartition(".")[0]):
                gathered[fqn] = _Unshard.apply(shards[fqn], rows[fqn], policy)  # type: ignore[no-untyped-call]
        return gathered[fqn]

    try:
        for module, cls in classes:
            names = {name: canonical[id(p)] for name, p in module.named_parameters(recurse=False, remove_duplicate=False)}
            if names:
                readers = {name: property(partial(_read_for, read, fqn)) for name, fqn in names.items()}
                module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **readers})
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls
