"""Experts parted over ep in eager steps; it shares no code with captured experts.

Each rank of ``ep`` has some of a module's experts, and tokens travel by ``all_to_all_single`` of torch.distributed. FSDP2
shards the experts over the ranks of ``dp_shard`` that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def part_experts(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Leave this rank of ``group`` its rows of the parameters of ``modules``, and have their tokens travel; in place."""
    rows: dict[int, nn.Parameter] = {}
    for module in modules:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                own = parameter.detach().chunk(group.size())[group.rank()].clone()
                kept = rows.setdefault(id(parameter), nn.Parameter(own, parameter.requires_grad))
                rows[id(kept)] = kept  # a module within a module is met twice
                setattr(owner, name, kept)
        module.forward = partial(_with_tokens_of_all, module.forward, group)


def _with_tokens_of_all(experts: Callable[[Tensor], Tensor], group: dist.ProcessGroup, tokens: Tensor) -> Tensor:
    """What the experts of all ranks make of this rank's ``tokens``, (experts, capacity, ...)."""
    arrived = torch.cat(_Exchanged.apply(tokens, group).chunk(group.size()), 1)
    made = experts(arrived).split(tokens.shape[1], 1)
    back: Tensor = _Exchanged.apply(torch.cat(made), group)
    return back


class _Exchanged(torch.autograd.Function):
    """The i-th part of dimension 0 goes to rank i. Gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        arrived = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, tokens.contiguous(), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        arrived = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(arrived, gradient.contiguous(), group=ctx.group)
        return arrived, None


def divide_over(parameters: Iterable[nn.Parameter], ranks: int, dtype: torch.dtype | None) -> None:
    """Divide the gradients of ``parameters``, averages of sums over the tokens of ``ranks``, by ``ranks``; in place.

    ``dtype`` is the one that they were reduced in, in which the captured step divides.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            parameter.grad = (gradient.to(dtype or gradient.dtype) / ranks).to(gradient.dtype)
