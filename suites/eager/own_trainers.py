"""Trainers of the model in eager_net that are not what ``[eager] factory`` should give, and one whose step is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fixtures.trainers.schedules import warmed
from suites.eager.eager_net import Net, loss


class Right:
    """The step of eager_net's plan, but for clipping, microbatches and groups, which those tests leave out."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.model = Net()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        devices = init_device_mesh("cpu", (mesh["dp_shard"],))
        for layer in self.model.layers:
            fully_shard(layer, mesh=devices, mp_policy=policy)
        fully_shard(self.model, mesh=devices, mp_policy=policy)
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.03125)]

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        value = loss(self.model(batch["tokens"]), batch)
        value.backward()
        return value.detach()

    def update(self) -> None:
        self.optimizers[0].step()


class OfAnotherRate(Right):
    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__(mesh)
        self.optimizers[0].param_groups[0]["lr"] = 0.5


class WithItsOwnSchedule(Right):
    """Begins with the schedule's first rate."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        super().__init__(mesh)
        self.schedule = warmed(self.optimizers[0])

    def update(self) -> None:
        super().update()
        self.schedule.step()


class AnotherLoss(Right):
    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        value = 2 * loss(self.model(batch["tokens"]), batch)
        value.backward()
        return value.detach()


class Raises(Right):
    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        raise ValueError("no such batch")


class OtherClass(Right):
    """Puts another class in the place of the model's while it steps."""

    def update(self) -> None:
        super().update()
        self.model.__class__ = type("Stepped", (type(self.model),), {})


def nothing(mesh: Mapping[str, int]) -> Any:
    return nn.Linear(1, 1)
