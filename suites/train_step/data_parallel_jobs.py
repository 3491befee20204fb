"""Runs in the ranks: data-parallel steps with functional collectives, by eager and as a captured step that is bucketed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.passes import manual_overlap_bucketing
from suites.train_step.step_twins import Optimizers, Step, Twins, adamw, batch

c10d = torch.ops._c10d_functional


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(3)))


class Gathered(torch.autograd.Function):
    """A parameter sharded by rows, as SimpleFSDP has it: gathered in forward, its gradient reduced in backward."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, ranks, "0"))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(grad.contiguous(), "avg", ctx.ranks, "0")), None


class Sharded(nn.Module):
    """A linear layer of which each rank has some rows."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        whole = nn.Linear(6, 6)
        self.world = world
        self.weight = nn.Parameter(whole.weight.detach().chunk(world)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(world)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (Gathered.apply(p, self.world) for p in (self.weight, self.bias))
        return functional.linear(x, weight, bias).tanh()


def replicated(model: nn.Module, optimizers: Optimizers) -> Step:
    """Data parallelism by hand: gradients are averaged once all are there."""
    group: Any = torch.distributed.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = collectives.wait_tensor(collectives.all_reduce(parameter.grad, "avg", group))
        optimizers[0].step()
        return loss.detach()

    return step


def sharded(model: nn.Module, optimizers: Optimizers) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    return step


def bucketed(step: StepGraph, state: dict[str, torch.Tensor]) -> StepGraph:
    manual_overlap_bucketing(step.graphs["joint"], ["0", ["1", "2"]])
    return step


def _launches(twins: Twins) -> dict[str, int]:
    (step,) = twins.step.graphs
    names = [str(node.target) for node in step.graphs["joint"].graph.nodes]
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return {kind: sum(f"_c10d_functional.{kind}" in name for name in names) for kind in kinds}


def steps(rank: int, world: int, payload: None) -> dict[str, dict[str, int]]:
    """Launches of the captured and bucketed step by way and kind; fails where a bit is another than eager's."""
    ways = {
        "replicated": Twins(adamw, replicated, layers, (bucketed,)),
        "sharded": Twins(adamw, sharded, lambda: _sharded(rank, world), (bucketed,)),
    }
    for twins in ways.values():
        for i in range(2):
            twins.same(batch(10 * i + rank)[0])
        assert twins.step.traces == 1
    return {name: _launches(twins) for name, twins in ways.items()}


def _sharded(rank: int, world: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Sharded(rank, world) for _ in range(3)))
