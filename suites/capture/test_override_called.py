"""Overridden modules in a captured step that is called: the bits of eager, state, and the user's model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.capture import Override
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.ranks.process_groups.nccl import WatchedLaunches
from pytest_fxbucket.train_step import capture_step
from suites.capture import override_models as models
from suites.capture import override_subgraphs as subgraphs
from suites.train_step.step_twins import Twins, adamw, batch, usual


def twins(make: Callable[[], nn.Module], overrides: Any) -> Twins:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return Twins(adamw, usual, seeded, overrides=overrides)


def targets(found: Twins) -> list[str]:
    (step,) = found.step.graphs
    return [str(node.target) for node in step.graphs["joint"].graph.nodes]


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "several inputs and results, by name, a buffer": (
        models.AroundAttention,
        {models.Attends: Override(output=subgraphs.attended)},
    ),
    "NaN beside a tensor, which is not equal to itself": (
        lambda: models.TakesFirst(models.GivesNaN()),
        {"held": Override(output=lambda module, x: (torch.empty_like(x), float("nan")))},
    ),
    "a dict that is a dataclass": (
        lambda: models.ReadsFound(models.GivesFound()),
        {"held": Override(output=lambda module, x: models.Found(torch.empty_like(x), torch.empty_like(x)))},
    ),
    "with a parameter of two names": (lambda: models.Holds(models.Ties()), {"held": "call"}),
    "with a hook, which runs once a call": (lambda: models.Holds(models.doubles()), {"held": "call"}),
    "called twice, with a parameter that is read elsewhere": (
        lambda: nn.Sequential(models.Twice(), nn.Linear(models.WIDTH, 3)),
        {models.Chooses: "call"},
    ),
    "complex results": (
        lambda: models.OnComplex(models.Transforms()),
        {"held": Override(output=lambda module, x: torch.empty_like(x, dtype=torch.complex64))},
    ),
    "of rows that lie column by column": (lambda: models.OfColumns(nn.LayerNorm(models.WIDTH)), {"held": "call"}),
    "of images of channels last": (
        lambda: models.OfImages(nn.Conv2d(models.WIDTH // 2, models.WIDTH // 2, 1)),
        {"held": "call"},
    ),
    "complex inputs and results": (lambda: models.OnComplex(models.Turns()), {"held": "call"}),
}


@pytest.mark.parametrize(("make", "overrides"), CASES.values(), ids=CASES.keys())
def test_a_real_module_in_a_captured_step_gives_the_bits_of_eager(make: Callable[[], nn.Module], overrides: Any) -> None:
    found = twins(make, overrides)
    found.train(3)
    assert found.step.traces == 1
    assert "fxbucket.call_forward.default" in targets(found)
    assert "fxbucket.call_backward.default" in targets(found)


def test_so_it_does_where_a_dispatch_mode_watches_the_step() -> None:
    """As on ranks over NCCL, whose launches one enters in the flight record."""
    found = twins(lambda: models.Holds(models.Chooses()), {"held": "call"})
    with WatchedLaunches(0):
        found.train(3)
    assert "fxbucket.call_backward.default" in targets(found)


def test_without_an_override_such_a_module_cannot_be_captured() -> None:
    """Else the tests above would show nothing."""
    with pytest.raises(CaptureError, match=r"the shape that aten\.nonzero\.default gives depends on values"):
        twins(lambda: models.Holds(models.Chooses()), {}).same(*batch(0))


def test_a_parameter_that_a_subgraph_does_not_read_has_no_gradient_and_no_update() -> None:
    found = twins(lambda: models.Holds(models.Chooses()), {"held": subgraphs.low_alone})
    held = found.eager.model.get_submodule("held")
    held.forward = lambda x: subgraphs.low_alone(held)(dict(held.named_parameters()), x)  # type: ignore[method-assign]
    found.train(3)
    assert found.captured.model.get_parameter("held.high.weight").grad is None
    assert not [name for name in targets(found) if "fxbucket" in name]


def test_state_of_a_subgraph_goes_from_call_to_call_and_from_step_to_step() -> None:
    """The module is called twice in a step; what it gives depends on the count."""

    class Again(models.Holds):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.held(self.held(self.first(x))))

    found = twins(lambda: Again(models.Chooses()), {models.Chooses: subgraphs.counting})
    held = found.eager.model.get_submodule("held")
    count = {"rows": torch.tensor(0)}

    def forward(x: torch.Tensor) -> torch.Tensor:
        out, new = subgraphs.counting(held).forward({**dict(held.named_parameters()), **count}, x)  # type: ignore[arg-type]
        count.update(new)
        return out

    held.forward = forward  # type: ignore[method-assign]
    for seed in range(3):
        found.same(*batch(seed))
        assert torch.equal(found.step.state["held.rows"], count["rows"])
    assert 0 < int(count["rows"]) < 24
    assert found.step.traces == 1


def test_each_module_is_asked_once_however_often_it_is_called_or_traced() -> None:
    subgraphs.ASKED.clear()
    found = twins(lambda: models.Holds(models.Chooses()), {models.Chooses: subgraphs.counting})
    step = found.step
    for rows in (4, 5, 4):
        step(*batch(0, rows))
    assert step.traces == 2
    assert subgraphs.ASKED == ["Chooses"]


def test_the_model_is_restored_after_a_trace_and_after_an_error() -> None:
    for make, error in ((lambda: models.Holds(models.Chooses()), False), (models.Raises, True)):
        model = make()
        before = {fqn: (type(module), dict(vars(module))) for fqn, module in model.named_modules()}
        tensors = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
        step = capture_step(lambda x, model=model: model(x).sum(), model=model, overrides={"held": "call"})
        if error:
            with pytest.raises(CaptureError, match="LookupError: lost"):
                step(batch(0)[0])
        else:
            step(batch(0)[0])
        assert {fqn: (type(module), dict(vars(module))) for fqn, module in model.named_modules()} == before
        now = model.state_dict(keep_vars=True)
        assert all(id(now[name]) == one and torch.equal(now[name], value) for name, (one, value) in tensors.items())
        assert not torch.is_grad_enabled() or "forward" not in vars(model.get_submodule("held"))


def test_gradients_of_an_input_that_is_read_elsewhere_too_are_added_within_the_module_first() -> None:
    """Eager adds each as it comes: a + b + c, where this is a + (b + c), as eager has it of an input that is a view."""

    def gradient(apart: bool, overrides: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = models.Outside(models.ReadsTwice(), apart)

        def step(x: torch.Tensor) -> None:
            model.zero_grad()
            model(x).sin().sum().backward()

        (capture_step(step, model=model, overrides=overrides) if overrides else step)(batch(0, 64)[0])
        found: torch.Tensor | None = model.first.weight.grad
        assert found is not None
        return found

    called = gradient(False, {"held": "call"})
    assert torch.equal(called, gradient(True, {}))
    assert torch.equal(called, gradient(True, {"held": "call"}))
    assert not torch.equal(called, gradient(False, {})), "the order can be seen"


def test_two_captured_steps_of_one_process_call_each_its_own_model() -> None:
    first, second = (twins(lambda by=by: models.Holds(models.scales(by)), {"held": "call"}) for by in (2.0, 3.0))
    for seed in range(2):
        first.same(*batch(seed))
        second.same(*batch(seed))
