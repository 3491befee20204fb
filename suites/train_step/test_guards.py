"""One graph a signature: a new one is traced, an old one never again, and none is used where it does not fit."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError
from suites.train_step.step_twins import Twins, adamw, batch, sgd


def test_two_shapes_by_turns_are_traced_once_each() -> None:
    twins = Twins(adamw)
    for i in range(6):
        twins.same(*batch(i, rows=4 if i % 2 else 3), seed=i)
    assert twins.step.traces == 2


def double(run: Any) -> None:
    run.model.double()


def evaluating(run: Any) -> None:
    run.model[1].eval()


def without_dropout(run: Any) -> None:
    run.model[3].p = 0.0


def frozen(run: Any) -> None:
    run.model[0].weight.requires_grad_(False)


def other_decay(run: Any) -> None:
    run.optimizers[0].param_groups[0]["weight_decay"] = 0.5


class Doubled(nn.ReLU):
    """Another module with the same attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def other_layer(run: Any) -> None:
    run.model[2] = Doubled()


CHANGES = [evaluating, without_dropout, frozen, other_decay, other_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_graph_has_baked_in_is_traced_anew_when_it_changes(change: Any) -> None:
    twins = Twins(adamw)
    twins.same(*batch(0))
    for run in twins.each():
        change(run)
        run.optimizers[0].zero_grad()
    twins.same(*batch(1))
    twins.same(*batch(2))
    assert twins.step.traces == 2


def test_plain_arguments_and_dtypes_are_part_of_the_signature() -> None:
    def make_step(model: nn.Module, optimizers: Any) -> Any:
        def step(x: torch.Tensor, *, scale: float) -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = (model(x.float()) * scale).sum()
            loss.backward()
            optimizers[0].step()
            return loss.detach()

        return step

    twins = Twins(sgd, make_step)
    x, _ = batch(0)
    for given, scale in [(x, 1.0), (x, 2.0), (x.double(), 2.0), (x, 1.0), (x.double(), 2.0)]:
        twins.same(given, scale=scale)
    assert twins.step.traces == 3


def test_state_dicts_taken_and_loaded_between_steps_are_right() -> None:
    twins = Twins(adamw)
    for i in range(2):
        twins.same(*batch(i))
    saved = [(deepcopy(run.model.state_dict()), deepcopy(run.optimizers[0].state_dict())) for run in twins.each()]
    twins.same(*batch(2))
    for run, (model, optimizer) in zip(twins.each(), saved, strict=True):
        run.model.load_state_dict(model)
        run.optimizers[0].load_state_dict(optimizer)
    for i in range(2, 5):
        twins.same(*batch(i))
    assert twins.step.traces == 1


def test_parameters_that_the_user_writes_between_steps_are_read() -> None:
    twins = Twins(sgd)
    for i in range(3):
        twins.same(*batch(i))
        for run in twins.each():
            with torch.no_grad():
                run.model[0].weight.fill_(i)
            run.optimizers[0].state.clear()
    assert twins.step.traces == 1


def test_state_that_is_missing_or_of_another_shape_is_told_by_name() -> None:
    twins = Twins(adamw)
    twins.same(*batch(0))
    model, optimizer = twins.captured.model, twins.captured.optimizers[0]
    state = optimizer.state[model[0].weight]  # type: ignore[index]
    average = state.pop("exp_avg")
    with pytest.raises(CaptureError, match=r"parameter 0\.weight has state in the optimizer AdamW, but no exp_avg; load"):
        twins.step(*batch(1))
    state["exp_avg"] = average[:1]
    with pytest.raises(CaptureError, match=r"state 0\.weight\.exp_avg has shape \(1, 6\) .* traced with shape \(8, 6\)"):
        twins.step(*batch(1))
    state["exp_avg"] = average
    twins.same(*batch(1))


def test_a_new_parameter_group_is_trained() -> None:
    twins = Twins(lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1))
    twins.same(*batch(0))
    for run in twins.each():
        run.optimizers[0].zero_grad()
        run.optimizers[0].add_param_group({"params": run.model[5].parameters(), "lr": 0.5})  # type: ignore[index]
        run.model.zero_grad()
    twins.same(*batch(1))
    assert twins.step.traces == 2


def test_a_model_that_becomes_float64_is_traced_anew() -> None:
    twins = Twins(sgd)
    twins.same(*batch(0))
    for run in twins.each():
        double(run)
        run.optimizers[0].zero_grad()
        run.optimizers[0].state.clear()
    x, y = batch(1)
    twins.same(x.double(), y)
    assert twins.step.traces == 2


def test_a_step_is_called_without_a_model_being_called_again() -> None:
    calls: list[int] = []
    twins = Twins(sgd)
    twins.captured.model[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index]
    for _ in range(3):
        twins.step(*batch(0))
    assert len(calls) == 1
