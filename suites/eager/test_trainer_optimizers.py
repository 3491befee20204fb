"""What a trainer's optimizers leave to torch, which decides otherwise on a GPU, is decided as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.eager.trainer import EagerStep


class Trains:
    """As much of a trainer as is looked at: it has no ``backward`` and no ``update``, which no test here calls."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizers = [optimizer(self.model.parameters(), **options)]


@pytest.mark.parametrize(
    ("options", "foreach"), [({}, False), ({"foreach": True}, True), ({"foreach": False}, False), ({"fused": True}, None)]
)
def test_one_parameter_after_another_unless_it_says_otherwise(options: dict[str, Any], foreach: bool | None) -> None:
    trainer = Trains(torch.optim.AdamW, **options)
    EagerStep(trainer, updates=True)  # type: ignore[arg-type]
    (group,) = trainer.optimizers[0].param_groups
    assert (group["foreach"], bool(group["fused"])) == (foreach, "fused" in options)


def test_an_optimizer_that_knows_of_no_such_thing_is_left_alone() -> None:
    trainer = Trains(torch.optim.LBFGS)
    before = dict(trainer.optimizers[0].param_groups[0])
    EagerStep(trainer, updates=True)  # type: ignore[arg-type]
    assert trainer.optimizers[0].param_groups[0] == before
