"""What a call of a traced step is by itself: no cast, constant, name or state is another call's, or the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.train_step.step_twins import Optimizers, Twins, batch, sgd


def test_what_is_exempt_from_autocast_is_exempt_in_the_graph() -> None:
    """Casts are in the graph; the caller's autocast, which is on when it runs, does not cast again."""

    def step_of(model: nn.Module, optimizers: Optimizers) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizers[0].zero_grad()
            out = model(x)
            with torch.autocast("cpu", enabled=False):
                loss = (out.float() @ out.float().T).square().mean()
            loss.backward()
            optimizers[0].step()
            return loss.detach()

        return step

    twins = Twins(sgd, make_step=step_of)
    for number in range(2):  # entered anew for each step, since eager keeps the casts of weights as long as it is on
        with torch.autocast("cpu", dtype=torch.bfloat16):
            twins.same(*batch(number))
            assert torch.is_autocast_enabled("cpu")
    twins.same(*batch(3))


def test_a_constant_is_made_anew_in_each_call() -> None:
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x)
        return torch.tensor([1.0, 2.0])

    captured = capture_step(step, model=model)
    captured(torch.ones(1, 2)).add_(10)
    assert captured(torch.ones(1, 2)).tolist() == [1.0, 2.0]


def test_keywords_called_args_and_kwargs_stay_two() -> None:
    model = nn.Linear(2, 2)

    def step(args: torch.Tensor, kwargs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return args * 1, kwargs["args"] * 1

    one, other = capture_step(step, model=model)(args=torch.ones(1), kwargs={"args": torch.full((1,), 5.0)})
    assert (one.item(), other.item()) == (1.0, 5.0)


class Dropping(torch.optim.Optimizer):
    """Takes a key of its state away in its second step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # it is called without a closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "mean" in state:
                state.pop("first", None)
            else:
                state.update(mean=torch.zeros_like(parameter), first=torch.ones(()))
            parameter.sub_(state["mean"].add_(parameter.grad))


def test_state_that_is_taken_away_is_refused_in_a_sentence() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = Dropping(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match="the optimizer Dropping drops its state 'first' of weight in a step"):
        capture_step(step, model=model, optimizers=optimizer)(torch.ones(1, 2))


def test_a_nan_in_state_is_no_other_tensor() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, both: bool) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model[0](x).sum() + (model[1](x).sum() if both else 0.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture_step(step, model=model, optimizers=optimizer)
    captured(torch.full((1, 2), float("nan")), False)
    assert captured(torch.ones(1, 2), True).isnan()
