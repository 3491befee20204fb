"""A step that cannot be captured: one sentence with the user's own line, and model and optimizers as they were."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.capture.steps import at
from suites.train_step.step_twins import Run, Twins, adamw, batch, net, sgd, usual


def refused(step: Callable[..., Any], run: Run, *args: Any) -> str:
    """The sentence; fails unless everything is as it was before the call."""
    captured = capture_step(step, model=run.model, optimizers=run.optimizers)
    before = run.facts(), [*map(vars_of, run.model.modules())], [dict(vars(o)) for o in run.optimizers]
    groups = [dict(group) for optimizer in run.optimizers for group in optimizer.param_groups]
    with pytest.raises(CaptureError) as caught:
        captured(*(args or batch(0)))
    assert before == (run.facts(), [*map(vars_of, run.model.modules())], [dict(vars(o)) for o in run.optimizers])
    assert groups == [dict(group) for optimizer in run.optimizers for group in optimizer.param_groups]
    assert captured.traces == 0
    assert "\n" not in str(caught.value)
    return str(caught.value)


def vars_of(module: nn.Module) -> dict[str, Any]:
    tensors = {name: id(tensor) for held in (module._parameters, module._buffers) for name, tensor in held.items()}
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")} | tensors


def trained(optimizer: Any = sgd) -> Run:
    """A model that took one step, so that there are gradients and state to be kept."""
    model = net()
    run = Run(model, [optimizer(model)], None)
    usual(model, run.optimizers)(*batch(9))
    return run


@pytest.fixture
def run() -> Run:
    return trained()


def forward(run: Run, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = run.model(x).sum()
    loss.backward()
    return loss


def test_item_in_the_step_is_told_at_its_line(run: Run) -> None:

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        run.optimizers[0].zero_grad()
        loss = forward(run, x)
        return loss.item()

    text = refused(step, run)
    assert f"failed at {at(step, 'return loss.item')}: it asks for the value of a tensor (item())" in text


def test_a_decision_by_a_value_is_told_at_its_line_and_with_the_module() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    run = trained()
    run.model[2] = Deciding()  # type: ignore[index]
    text = refused(lambda x, y: forward(run, x), run)
    assert text.startswith(f"tracing module 2 failed at {at(Deciding.forward, 'return')}: it decides by the value of a tensor")


def test_an_average_of_weights_decides_by_its_counter_and_is_to_be_called_behind_the_step(run: Run) -> None:
    average = AveragedModel(run.model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = forward(run, x)
        average.update_parameters(run.model)
        return loss

    captured = capture_step(step, model={"model": run.model, "average": average}, optimizers=run.optimizers)
    with pytest.raises(CaptureError, match=r"what is no part of the step \(an average of weights\) may be called behind it$"):
        captured(*batch(0))


def test_another_model_is_told_as_a_tensor_of_elsewhere() -> None:
    run, other = trained(), trained()
    text = refused(lambda x, y: forward(other, x), run)
    assert f"at {at(forward, 'loss: ')}" in text
    assert "neither parameter, buffer nor input" in text


def test_an_optimizer_of_other_parameters_is_told_by_its_group() -> None:
    run, other = trained(), trained()
    run.optimizers += other.optimizers
    text = refused(lambda x, y: forward(run, x), run)
    assert text.startswith("group 0 of optimizer 1 (SGD) has a parameter of shape (8, 6) that the model does not have; give")


def test_an_optimizer_that_capture_was_not_given_is_told(run: Run) -> None:
    hidden = sgd(run.model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        forward(run, x)
        hidden.step()

    text = refused(step, run)
    assert f"failed at {at(step, 'hidden.step')}: it steps an optimizer, SGD, that capture_step was not given" in text
    assert not hidden.state


def test_lbfgs_is_told_at_its_line(run: Run) -> None:
    run.optimizers[:] = [torch.optim.LBFGS(run.model.parameters())]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        run.optimizers[0].step(lambda: forward(run, x))  # type: ignore[arg-type,return-value]

    assert "the step of the optimizer LBFGS" in (text := refused(step, run))
    assert "runs a closure" in text


def test_an_optimizer_that_decides_by_its_counter_is_told() -> None:
    run = trained(lambda model: torch.optim.RAdam(model.parameters()))
    text = refused(usual(run.model, run.optimizers), run)
    assert text.startswith("tracing the step of the optimizer RAdam failed at suites/train_step/step_twins.py:")
    assert "decides by the value of a number" in text
    assert text.endswith("; a captured step may end with gradients, and the optimizer step behind it")


def test_sgd_with_dampening_has_another_first_step() -> None:
    model = net()
    run = Run(model, [sgd(model, dampening=0.5)], None)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        forward(run, x)
        run.optimizers[0].step()

    assert "takes its first gradient whole and no later one; take one step without capture before" in refused(step, run)


class Counted(torch.optim.SGD):
    """Counts its steps in a plain number, made in the first one."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as people write it
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state["step"] += 1
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / state["step"])


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_counter_outside_of_tensors_is_told_in_the_first_step_too(steps_before: int) -> None:
    model = net()
    run = Run(model, [Counted(model.parameters(), 0.1)], None)
    for number in range(steps_before):
        usual(model, run.optimizers)(*batch(number))
    text = refused(usual(model, run.optimizers), run)
    assert "the optimizer Counted keeps step outside of tensors, and changes it" in text


def narrower(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(1)


def of_another_dtype(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(3, dtype=torch.float64)


@pytest.mark.parametrize("draw", [narrower, of_another_dtype])
def test_another_draw_from_an_earlier_state_of_the_generator_is_told(run: Run, draw: Callable[..., Any]) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            first = draw(x)
        return (first * torch.rand(3)).sum()

    assert "then draws by aten.rand.default with other sizes, dtypes or numbers than first" in refused(step, run)


def sparse_buffer(model: nn.Module) -> tuple[torch.Tensor, ...]:
    model.register_buffer("adjacent", torch.eye(3).to_sparse())
    return batch(0)


def sparse_argument(model: nn.Module) -> tuple[torch.Tensor, ...]:
    return torch.eye(3).to_sparse(), batch(0)[1]


def sparse_gradient(model: nn.Module) -> tuple[torch.Tensor, ...]:
    weight = model.get_parameter("0.weight")
    weight.grad = torch.ones_like(weight).to_sparse()
    return batch(0)


@pytest.mark.parametrize(
    ("make", "called"),
    [(sparse_buffer, "buffer adjacent"), (sparse_argument, "argument args[0]"), (sparse_gradient, "gradient of 0.weight")],
)
def test_what_is_sparse_is_told(make: Callable[[nn.Module], tuple[torch.Tensor, ...]], called: str) -> None:
    model = net()
    given = make(model)
    step = capture_step(lambda x, y: None, model=model)
    with pytest.raises(
        CaptureError, match=rf"^{re.escape(called)} is sparse \(torch.sparse_coo\); a captured step takes dense"
    ):
        step(*given)


def test_a_learning_rate_that_is_a_tensor_is_told_where_it_is_none() -> None:
    run = trained(lambda model: adamw(model, foreach=False))
    run.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)
    assert refused(usual(run.model, run.optimizers), run).startswith("optimizers.0.groups.0.lr is a tensor")


def scheduled(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    usual(run.model, run.optimizers)(x, y)
    run.optimizers[0].param_groups[0]["lr"] *= 0.5


def decayed(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    usual(run.model, run.optimizers)(x, y)
    run.optimizers[0].param_groups[0]["weight_decay"] = 0.5


class Numbered(torch.optim.SGD):
    """Counts its steps in an attribute of its own, as those without state do."""

    count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # as people write it
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1 / self.count)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_counter_in_an_attribute_of_an_optimizer_is_told(steps_before: int) -> None:
    """Its number would be that of the trace in all later steps."""
    model = net()
    optimizer = Numbered(model.parameters(), 0.1)
    run = Run(model, [optimizer], None)
    for number in range(steps_before):
        usual(model, run.optimizers)(*batch(number))
    text = refused(usual(model, run.optimizers), run)
    assert "the optimizer Numbered sets its attribute count in a step, which a graph does not do again; keep it in a" in text
    assert optimizer.count == steps_before


def by_chance(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share = random.random()
    return forward(run, share * x + (1 - share) * x.flip(0))


def by_numpys_chance(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    import numpy

    return forward(run, numpy.random.beta(0.2, 0.2) * x)


def remembering(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.model[0].last = run.model(x)  # type: ignore[index]


def counting(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.model.calls += 1  # type: ignore[operator]


def replacing(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.model[1].running_mean = run.model[1].running_mean + 1  # type: ignore[index]


def with_data(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.model[0].weight.data = run.model[0].weight.data * 2  # type: ignore[index]


def giving(run: Run, x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"model": run.model}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (scheduled, "the step sets the learning rate of optimizers.0.groups.0; call the scheduler after the step"),
        (decayed, "the step sets weight_decay of optimizers.0.groups.0; set it between steps"),
        (remembering, "module 0 sets its attribute last in forward"),
        (counting, "module at the root sets its attribute calls in forward"),
        (replacing, "buffer 1.running_mean is replaced in forward; write it in place"),
        (with_data, "it sets .data of a tensor, which no operator tells of; write it with copy_"),
        (by_chance, "it draws from Python's random generator, and each later call would have the numbers of this one; draw"),
        (by_numpys_chance, "it draws from numpy's random generator, and each later call would have the numbers of"),
        (giving, "the step gives a value of type Sequential at result['model']"),
    ],
)
def test_what_a_graph_would_not_do_again_is_refused(step: Any, text: str, run: Run) -> None:
    run.model.calls = 0  # type: ignore[assignment]
    assert text in refused(partial(step, run), run)


def test_a_scheduler_that_is_called_too_early_or_given_a_tensor_is_refused(run: Run) -> None:
    decaying = torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizers[0])
    run.optimizers[0]._opt_called = True  # type: ignore[attr-defined]  # what a scheduler has step() set, as it did before

    def early(x: torch.Tensor, y: torch.Tensor) -> None:
        decaying.step()
        usual(run.model, run.optimizers)(x, y)

    assert "the scheduler ExponentialLR is called before its optimizer steps, and a captured step" in refused(early, run)
    told = refused(lambda x, y: plateau.step(run.model(x).sum()), run)
    assert "the scheduler ReduceLROnPlateau is given a tensor, whose value is known only when the step" in told
    assert decaying.last_epoch == 0


def test_a_learning_rate_behind_its_scheduler_is_read_between_steps(run: Run) -> None:
    decaying = torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], 0.5)
    run.optimizers[0]._opt_called = True  # type: ignore[attr-defined]  # as a scheduler has step() set
    rates: list[Callable[[], Any]] = [lambda: run.optimizers[0].param_groups[0]["lr"], lambda: decaying.get_last_lr()[0]]

    def telling(rate: Callable[[], Any], x: torch.Tensor, y: torch.Tensor) -> Any:
        usual(run.model, run.optimizers)(x, y)
        decaying.step()
        return {"rate": rate()}

    told = [refused(partial(telling, rate), run) for rate in rates]
    assert told[0].startswith("the step gives a learning rate at result['rate'] and calls its scheduler")
    assert "the step calls get_last_lr() of ExponentialLR, a number that a captured step would keep" in told[1]


def test_a_module_beside_the_model_is_to_be_given_with_it(run: Run) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.rand(3))
    told = refused(lambda x, y: loss(run.model(x), y), run)
    assert told.endswith("give it to the step as an argument, or the module that has it as a buffer in model={...}")


class MeanOfGradients(torch.optim.Optimizer):
    """Steps by a mean of gradients that begins with the first."""

    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if state:
                    state["mean"].lerp_(parameter.grad, 0.1)
                else:
                    state["mean"] = parameter.grad.clone()
                parameter.sub_(state["mean"], alpha=self.param_groups[0]["lr"])


def test_an_optimizer_whose_first_step_is_another_is_refused_until_it_is_taken() -> None:
    model = net()
    optimizer = MeanOfGradients(model.parameters(), {"lr": 0.1})
    run = Run(model, [optimizer], None)
    told = refused(usual(model, [optimizer]), run)
    assert told.startswith("the optimizer MeanOfGradients takes its first step otherwise than later ones")
    assert not optimizer.state
    twins = Twins(lambda model: MeanOfGradients(model.parameters(), {"lr": 0.1}))
    for one in twins.each():
        torch.manual_seed(0)
        usual(one.model, one.optimizers)(*batch(0))
    twins.same(*batch(1))
    twins.same(*batch(2))


def test_arguments_that_are_no_tensors_or_plain_values_are_told_by_path(run: Run) -> None:
    text = refused(lambda x: x, run, {"data": [net()]})
    assert text.startswith("argument args[0]['data'][0] is a value of type Sequential; ")


def test_what_is_no_model_or_optimizer_is_told() -> None:
    model = net()
    with pytest.raises(CaptureError, match=r"model is a value of type int, expected a torch\.nn\.Module, or several"):
        capture_step(print, model=[model, 3])  # type: ignore[list-item]
    with pytest.raises(CaptureError, match=r"optimizers has a value of type str, expected a torch\.optim\.Optimizer"):
        capture_step(print, model=model, optimizers=["sgd"])  # type: ignore[list-item]


def test_a_step_that_raises_leaves_state_that_was_not_there_not_there() -> None:
    model = net()
    run = Run(model, [adamw(model)], None)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        usual(model, run.optimizers)(x, y)
        raise ValueError("no such thing")

    assert f"failed at {at(step, 'raise')}: ValueError: no such thing" in refused(step, run)
    assert not run.optimizers[0].state
