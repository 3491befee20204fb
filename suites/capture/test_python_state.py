"""Python state and generators that forward changes: where the next step would be another one, the step is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.train_step import capture_step
from suites.capture.steps import plan_of
from suites.train_step.step_twins import Twins, sgd

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


class Draws(nn.Linear):
    """Draws by a generator, or does something else with it; None: with torch's own."""

    def __init__(self, draw: Callable[[torch.Generator], Tensor], own: torch.Generator | None = None) -> None:
        super().__init__(8, 8)
        self.draw, self.own = draw, own

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.draw(self.own or torch.default_generator)


def seeded(draw: torch.Generator) -> Tensor:
    draw.manual_seed(3)
    return torch.rand(8)


def again(draw: torch.Generator) -> Tensor:
    state = draw.get_state()
    first = torch.rand(8)
    draw.set_state(state)
    return first - torch.rand(8)


def set_elsewhere(draw: torch.Generator) -> Tensor:
    draw.set_state(torch.Generator().get_state())
    return torch.rand(8)


def given(draw: torch.Generator) -> Tensor:
    return torch.rand(8, generator=draw)


def seed_of(draw: torch.Generator) -> Tensor:
    return torch.full((8,), draw.initial_seed() % 1000)


BY_GENERATOR = "the step draws by a generator that it names (generator = ...), which no graph holds"
DRAWS = {
    "seeded": (lambda: Draws(seeded), "the step calls torch.manual_seed, which seeds"),
    "set": (lambda: Draws(set_elsewhere), "the step sets torch's random generator to a state that it did not take itself"),
    "by torch's own": (lambda: Draws(given), BY_GENERATOR),
    "by one's own": (lambda: Draws(given, torch.Generator()), BY_GENERATOR),
}


def total(model: nn.Module, optimizers: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        found = model(x).sum()
        found.backward()
        return found.detach()

    return step


@pytest.mark.parametrize(("make", "said"), DRAWS.values(), ids=DRAWS)
def test_a_generator_that_forward_seeds_sets_or_names_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    model = make()
    before = torch.get_rng_state()
    step = capture_step(total(model, ()), model=model)
    with pytest.raises(CaptureError, match=re.escape(said)):
        step(torch.ones(4, 8))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("draw", [again, seed_of])
def test_what_forward_asks_torchs_generator_itself_is_as_what_it_asks_torch(draw: Callable[..., Tensor]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Draws(draw)

    found = Twins(sgd, total, make)
    for _ in range(2):
        found.same(torch.ones(4, 8), seed=3)


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
