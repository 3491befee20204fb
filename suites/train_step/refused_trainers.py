"""Runs in the ranks: trainers that no graph takes over, and ranks that use modules in other orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.train_step.sharded_trainers import batch, ddp, fsdp, net, trainer
from suites.train_step.step_twins import Optimizers, Step, sgd


class TwoHeads(nn.Module):
    """Two heads of one size, whose losses are added in the order of ``heads``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        x = self.body(x)
        return torch.stack([self.heads[head](x).square().mean() * (1 + head) for head in heads]).sum()


def in_another_order(rank: int, world: int, payload: str) -> None:
    """Two calls of a step whose heads, from call to call, are used as ``payload`` says: alike, or in an order of each rank."""
    model = TwoHeads()
    parallel: Any = DistributedDataParallel(model) if payload != "fsdp" else fully_shard(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)

    def train(x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = parallel(x, heads)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = capture_step(train, model=parallel, optimizers=optimizer)
    for heads in ([0, 1], [1, 0]):
        step(torch.randn(6, 8), heads if payload == "alike" or rank == 0 else heads[::-1])


class Normed(torch.optim.SGD):
    """Looks at the norm of each gradient, of which a rank has a part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm())


def columns() -> nn.Module:
    model, mesh = net(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Shard(one.dim() - 1))
    return model


def with_buffers() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))


def with_hook() -> nn.Module:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    return model


class OverShortNumbers:
    """A reduce-scatter that sends gradients in bfloat16."""

    def __call__(self, output: torch.Tensor, given: torch.Tensor, **rest: Any) -> None:
        raise AssertionError("called")


def with_a_collective_of_its_own() -> nn.Module:
    model: Any = fsdp()
    model.set_custom_reduce_scatter(OverShortNumbers())
    return model  # type: ignore[no-any-return]  # fully_shard gives another class to it


def parted_state(model: nn.Module) -> torch.optim.Optimizer:
    """ZeRO-1: each rank steps a part of the parameters, and sends it to the others in the optimizer's step."""
    made: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return made


def of_two_forwards_behind_one(model: Any, optimizers: Optimizers) -> Step:
    """A step whose first backward does not reduce, and whose last one is of two forwards."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        model(x).mean().backward()
        model.set_requires_gradient_sync(True)
        loss = model(x).mean() + model(-x).mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


def gathering_in_place(model: Any, optimizers: Optimizers) -> Step:
    """A step that gathers what the model gives by the call that works in place."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, out.detach())
        return torch.cat(parts).sum()

    return step


def never_reduced() -> nn.Module:
    model: Any = fsdp()
    model.set_requires_gradient_sync(False)
    return model


def left_told(model: Any, optimizers: Optimizers) -> Step:
    """A step that leaves its model told otherwise."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = trainer(clip=False)(model, optimizers)(x, y)
        model.set_requires_gradient_sync(False)
        return loss

    return step


def delayed() -> nn.Module:
    model = net()
    *_, last = model.named_parameters()
    return DistributedDataParallel(model, delay_all_reduce_named_params=[last], param_to_hook_all_reduce=model[0].weight)


def vmapped(model: Any, optimizers: Optimizers) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.vmap(model)(x[:, None]).square().mean()
        loss.backward()
        return loss.detach()

    return step


def looking_for_anomalies(model: Any, optimizers: Optimizers) -> Step:
    train = trainer(clip=False)(model, optimizers)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return train(x, y)

    return step


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "columns": (columns, sgd, trainer(clip=False)),
    "buffers": (with_buffers, sgd, trainer(clip=False)),
    "hook": (with_hook, sgd, trainer(clip=False)),
    "gathered in place": (fsdp, sgd, gathering_in_place),
    "collective of its own": (with_a_collective_of_its_own, sgd, trainer(clip=False)),
    "sent by the optimizer": (ddp, parted_state, trainer(clip=False)),
    "two forwards behind one": (fsdp, sgd, of_two_forwards_behind_one),
    "never reduced": (never_reduced, sgd, trainer(clip=False)),
    "norms": (fsdp, lambda model: Normed(model.parameters()), trainer(clip=False)),
    "left told": (fsdp, sgd, left_told),
    "delayed": (delayed, sgd, trainer(clip=False)),
    "composable": (lambda: replicate(net()), sgd, trainer(clip=False)),
    "vmapped": (fsdp, sgd, vmapped),
    "anomalies": (fsdp, sgd, looking_for_anomalies),
}


def refusals(rank: int, world: int, payload: None) -> dict[str, str]:
    """What is said of each of :data:`REFUSED`; fails unless the model is as it was."""
    found = {}
    for name, (make_model, make_optimizer, make_step) in REFUSED.items():
        model = make_model()
        optimizer = make_optimizer(model)
        before = [(fqn, id(one), one.grad) for fqn, one in model.named_parameters()]
        step = capture_step(make_step(model, [optimizer]), model=model, optimizers=optimizer)
        try:
            step(*batch(rank, 0, name))
        except CaptureError as error:
            found[name] = str(error)
        assert before == [(fqn, id(one), one.grad) for fqn, one in model.named_parameters()]
        assert not optimizer.state
    return found
