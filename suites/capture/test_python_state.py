"""Python state that forward changes: where the next step would be another one, the step is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan_on_mesh import mesh_of
from suites.capture.steps import plan_of

HERE = "suites.capture.test_python_state"


class Deletes(nn.Linear):
    """Doubles what the first call gives, and that one alone."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.is_new = True

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "is_new"):
            del self.is_new
            x = x * 2
        return super().forward(x)


class Alternates(nn.Module):
    """Keeps in a set which of two modules comes first in the next call; both have one repr."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.begins = {self.first}

    def forward(self, x: Tensor) -> Tensor:
        (now,) = self.begins
        then = self.second if now is self.first else self.first
        self.begins = {then}
        return then(now(x).tanh())


@pytest.mark.parametrize(
    ("factory", "said"),
    [(Deletes, "attribute is_new of the root module is deleted"), (Alternates, "attribute begins of the root module is set")],
)
def test_a_forward_whose_next_step_is_another_one_is_refused(factory: Callable[[], nn.Module], said: str) -> None:
    plan = plan_of(factory.__name__, of=HERE, batch="batch", loss="loss")
    with pytest.raises(CaptureError, match=f"^{said} in forward and read in the next one"):
        capture_plan(plan, mesh_of(plan), 0)


def batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.ones(4, 8),)


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return output.square().mean()
