"""What lies around a captured step, and no tensor holds: a graph in which it is another is not used again."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError
from suites.train_step.step_twins import Optimizers, Run, Twins

FACTOR = 1.0
X = torch.arange(12.0).reshape(3, 4) / 10


class Scaling(nn.Module):
    """Scales by numbers that it keeps in a list, in its class, and in a variable of its Python module."""

    LEVELS: ClassVar = {"low": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scaled(x) * self.LEVELS["low"]

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors[0] * FACTOR


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaling(), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def trained(model: nn.Module, optimizers: Optimizers, loss_of: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    optimizers[0].zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    optimizers[0].step()
    return loss.detach()


def summed(model: nn.Module, optimizers: Optimizers) -> Any:
    return lambda x: trained(model, optimizers, torch.sum, x)


def list_of_a_module(run: Run) -> None:
    run.model[1].factors[0] = 5.0  # type: ignore[index]


def forward_hook(run: Run) -> None:
    run.model[0].register_forward_hook(lambda module, given, output: output * 3)  # type: ignore[index]


def forward_of_a_module(run: Run) -> None:
    run.model[1].forward = lambda x: x * 2  # type: ignore[index]


def hook_of_a_parameter(run: Run) -> None:
    run.model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index]


def hook_of_an_optimizer(run: Run) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in run.model.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    run.optimizers[0].register_step_pre_hook(halve)


IN_OBJECTS = [list_of_a_module, forward_hook, forward_of_a_module, hook_of_a_parameter, hook_of_an_optimizer]


@pytest.mark.parametrize("change", IN_OBJECTS)
def test_what_is_done_to_modules_parameters_and_optimizers_between_steps_counts(change: Any) -> None:
    twins = Twins(sgd, summed, small)
    twins.same(X)
    for run in twins.each():
        change(run)
    twins.same(X)
    twins.same(X)
    assert twins.step.traces == 2


@pytest.mark.parametrize(("name", "owner"), [("FACTOR", globals()), ("low", Scaling.LEVELS)])
def test_variables_that_a_forward_reads_count(name: str, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(sgd, summed, small)
    twins.same(X)
    monkeypatch.setitem(owner, name, 5.0)
    twins.same(X)
    assert twins.step.traces == 2


class Trainer:
    """A step that is a method, and reads some of what its object has."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, box: Any) -> None:
        self.model, self.optimizers, self.box = model, optimizers, box
        self.epoch = 0

    def step(self, x: torch.Tensor) -> Any:
        return trained(self.model, self.optimizers, self.loss, x)

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        return y.sum() * self.box["s"]


def in_a_closure(model: nn.Module, optimizers: Optimizers, box: Any) -> Any:
    return lambda x: trained(model, optimizers, lambda y: y.sum() * box["s"], x)


def in_a_function_that_it_calls(model: nn.Module, optimizers: Optimizers, box: Any) -> Any:
    def loss_of(y: torch.Tensor) -> torch.Tensor:
        return y.sum() * box["s"]

    return partial(trained, model, optimizers, loss_of)


def in_an_object(model: nn.Module, optimizers: Optimizers, box: Any) -> Any:
    given = Namespace(box=box, seen=0)
    return lambda x: trained(model, optimizers, lambda y: y.sum() * given.box["s"], x)


def in_its_own_object(model: nn.Module, optimizers: Optimizers, box: Any) -> Any:
    return Trainer(model, optimizers, box).step


READ = [in_a_closure, in_a_function_that_it_calls, in_an_object, in_its_own_object]


@pytest.mark.parametrize("make_step", READ)
def test_what_the_step_reads_besides_its_arguments_counts(make_step: Any) -> None:
    box = {"s": 1.0}
    twins = Twins(sgd, partial(make_step, box=box), small)
    for s in (1.0, 5.0, 1.0):
        box["s"] = s
        twins.same(X)
    assert twins.step.traces == 2


def test_attributes_that_the_step_does_not_read_do_not_count() -> None:
    trainers: list[Trainer] = []

    def make_step(model: nn.Module, optimizers: Optimizers) -> Any:
        trainers.append(Trainer(model, optimizers, {"s": 1.0}))
        return trainers[-1].step

    twins = Twins(sgd, make_step, small)
    for epoch in range(2):
        for trainer in trainers:
            trainer.epoch = epoch
        twins.same(X)
    assert twins.step.traces == 1


def counting(model: nn.Module, optimizers: Optimizers) -> Any:
    c = [0]

    def step(x: torch.Tensor) -> Any:
        c[0] += 1
        return trained(model, optimizers, lambda y: y.sum() * c[0], x)

    return step


def keeping(model: nn.Module, optimizers: Optimizers) -> Any:
    last = None

    def step(x: torch.Tensor) -> None:
        nonlocal last
        last = trained(model, optimizers, torch.sum, x)

    return step


def setting_an_attribute(model: nn.Module, optimizers: Optimizers) -> Any:
    class Counted(Trainer):
        def step(self, x: torch.Tensor) -> Any:
            self.epoch += 1
            return super().step(x)

    return Counted(model, optimizers, {"s": 1.0}).step


def adding_to_a_modules_list(model: nn.Module, optimizers: Optimizers) -> Any:
    def step(x: torch.Tensor) -> Any:
        model[1].factors.append(1.0)  # type: ignore[index,union-attr,operator]
        return trained(model, optimizers, torch.sum, x)

    return step


@pytest.mark.parametrize(
    ("make_step", "what"),
    [
        (counting, "c"),
        (keeping, "last"),
        (setting_an_attribute, "self.epoch"),
        (adding_to_a_modules_list, "factors of module 1"),
    ],
)
def test_what_the_step_itself_changes_is_refused(make_step: Any, what: str) -> None:
    run = Twins(sgd, make_step, small).captured
    before = run.facts()
    with pytest.raises(CaptureError) as caught:
        run.step(X)
    text = "which a graph does not do again; return it, or keep it in a buffer"
    assert str(caught.value) == f"the step changes {what}, {text}"
    assert run.facts() == before
    assert run.step.traces == 0
