"""Tensors of a captured step that share memory: one that is written is refused, others are read as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError
from suites.train_step.step_twins import Optimizers, Twins, sgd


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros(4))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Buffered()


def writing(model: nn.Module, optimizers: Optimizers) -> Any:
    """Writes its first argument, then reads its second."""

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1.0)
        loss = model(a).sum() + b.sum()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach()

    return step


def refused(twins: Twins, a: torch.Tensor, b: torch.Tensor) -> str:
    before = a.clone(), b.clone(), twins.captured.facts()
    with pytest.raises(CaptureError) as caught:
        twins.step(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    assert twins.captured.facts() == before[2]
    return str(caught.value)


def test_arguments_that_share_memory_with_one_that_is_written_are_refused_and_others_are_not() -> None:
    twins = Twins(sgd, writing, make_model)
    twins.same(torch.zeros(4), torch.ones(2))
    whole = torch.zeros(8)
    text = "arguments args[0] and args[1] share memory, and the step writes there; pass it once, or a clone"
    assert refused(twins, whole[:4], whole[3:5]) == text
    twins.step(whole[:4], whole[4:6])
    assert twins.step.traces == 1


@pytest.mark.parametrize(("name", "called"), [("weight", "parameter weight"), ("seen", "buffer seen")])
def test_an_argument_that_shares_memory_with_what_the_model_has_is_refused_where_it_is_written(name: str, called: str) -> None:
    twins = Twins(sgd, writing, make_model)
    held = twins.captured.model.get_buffer(name) if name == "seen" else twins.captured.model.get_parameter(name)
    text = refused(twins, held.detach().flatten()[:4], torch.ones(4))
    assert text.startswith(f"argument args[0] and {called} share memory, and the step writes there")


def test_views_that_are_only_read_are_taken() -> None:
    def reading(model: nn.Module, optimizers: Optimizers) -> Any:
        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (model(a) * b[:2]).sum().detach()

        return step

    twins = Twins(sgd, reading, make_model)
    whole = torch.arange(8.0)
    results = [run.step(whole[:4], whole[1:5]) for run in twins.each()]
    assert torch.equal(*results)
