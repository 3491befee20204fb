"""Tied parameters: their gradients are summed over the stages that read them, from the last to the first, as backward does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pytest_fxbucket.pipeline.schedules import owners_of
from pytest_fxbucket.pipeline.stages import Stages
from pytest_fxbucket.pipeline.targets.registry import Setup


def sum_tied_gradients(stages: Stages, setup: Setup) -> None:
    """Sum gradients of tied parameters, once a step, behind its last backward; every rank of the pipeline calls it.

    Not with DeepSpeed, which sums them itself. Each sum is made on the rank of the tie's first stage. Stages of one rank share
    the parameter, so that rank has the sum of their gradients already.
    """
    count = len(stages)
    owners = owners_of(setup.schedule, count, setup.pp, setup.microbatches) if count != setup.pp else range(count)
    for tie in stages.ties:
        ranks = list(dict.fromkeys(owners[stage] for stage in tie.stages))
        if setup.rank not in ranks or len(ranks) == 1:
            continue
        own = next(stage for stage in tie.stages if owners[stage] == setup.rank)
        if tie.fqn in stages[own].summary.parameters:
            _summed(stages[own].get_parameter(tie.fqn), ranks, setup)


def _summed(parameter: nn.Parameter, ranks: list[int], setup: Setup) -> None:
    first, *others = ranks
    if setup.rank != first:
        _send(parameter.grad, parameter, first, setup)
        parameter.grad = _received(parameter, first, setup)
        return
    gradients = [parameter.grad, *(_received(parameter, rank, setup) for rank in others)]
    # From the last stage on, as autograd adds them in the whole model: of three or more another order rounds otherwise.
    there = [grad for grad in reversed(gradients) if grad is not None]
    total = sum(there[1:], there[0]) if there else None
    # The sum is sent back, not made on each rank, so all have the same bits. Sends block, but all ranks go through the ties in
    # one order, so each send meets its receive.
    parameter.grad = total
    for rank in others:
        _send(total, parameter, rank, setup)


def _send(grad: torch.Tensor | None, parameter: nn.Parameter, rank: int, setup: Setup) -> None:
    """``grad`` behind a number that says whether there is one."""
    dist.send(torch.tensor([grad is not None], dtype=torch.uint8, device=parameter.device), group=setup.group, group_dst=rank)
    if grad is not None:
        dist.send(grad.contiguous(), group=setup.group, group_dst=rank)


def _received(parameter: nn.Parameter, rank: int, setup: Setup) -> torch.Tensor | None:
    there = torch.empty(1, dtype=torch.uint8, device=parameter.device)
    dist.recv(there, group=setup.group, group_src=rank)
    if not there.item():
        return None
    grad = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    dist.recv(grad, group=setup.group, group_src=rank)
    return grad
