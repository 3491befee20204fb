"""``[optimizer] schedule``: the learning rates that steps have, in a graph and in the trainer's own step."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, OneCycleLR

from pytest_fxbucket.capture.optimizers.learning_rates import scheduled_rates, without_memory
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema_model import Optimizer as Table

HERE = "suites.capture.test_rate_schedule"


def constant(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ConstantLR(optimizer, 0.5, total_iters=1)


def cycled(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=10)


def raising(optimizer: torch.optim.Optimizer) -> LRScheduler:
    raise ValueError("no such curve")


def rates(schedule: str, taken: int) -> dict[str, float]:
    parameter = without_memory((2,), torch.float32)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    return scheduled_rates([Table(factory="torch.optim:SGD", schedule=schedule)], [optimizer], taken)


def test_rates_are_those_behind_as_many_steps() -> None:
    found = [rates(f"{HERE}:constant", taken)["optimizers.0.groups.0.lr"] for taken in range(3)]
    assert found == [0.05, 0.1, 0.1]
    assert rates("", 2) == {}


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("builtins:id", "gave a value of type int, expected a torch.optim.lr_scheduler.LRScheduler"),
        (f"{HERE}:raising", "raised ValueError: no such curve"),
        (f"{HERE}:cycled", "changes momentum, which a graph has as a number; only learning rates are its inputs"),
    ],
)
def test_a_schedule_that_no_graph_follows_is_refused(schedule: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        rates(schedule, 3)
    assert str(refused.value) == f"[optimizer] schedule {schedule} {says}"
