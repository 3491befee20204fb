"""What a traced step is good for: nothing that is compared may differ, and what is not compared is told by the user."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_fxbucket.compat.c10d import destroy_subgroups, fake_world, make_group
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.train_step.step_twins import Optimizers, Run, Twins, adamw, batch, sgd

c10d = torch.ops._c10d_functional


def test_two_shapes_by_turns_are_traced_once_each() -> None:
    twins = Twins(adamw)
    for i in range(6):
        twins.same(*batch(i, rows=4 if i % 2 else 3), seed=i)
    assert twins.step.traces == 2


def frozen(run: Run) -> None:
    run.model.get_parameter("0.weight").requires_grad_(False)


def other_decay(run: Run) -> None:
    run.optimizers[0].param_groups[0]["weight_decay"] = 0.5


def in_float64(run: Run) -> None:
    run.model.double()
    run.optimizers[0].state.clear()


@pytest.mark.parametrize("change", [frozen, other_decay, in_float64])
def test_what_a_graph_has_baked_in_of_parameters_and_their_groups_is_traced_anew(change: Any) -> None:
    twins = Twins(adamw)
    twins.same(*batch(0))
    for run in twins.each():
        change(run)
        run.optimizers[0].zero_grad()
    for number in (1, 2):
        x, y = batch(number)
        twins.same(x.double() if change is in_float64 else x, y)
    assert twins.step.traces == 2


def test_groups_that_no_longer_share_a_learning_rate_are_traced_anew() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=torch.tensor(0.1), fused=True)

    twins = Twins(optimizer)
    twins.same(*batch(0))
    for run in twins.each():
        run.optimizers[0].param_groups[1]["lr"] = torch.tensor(0.0)
    twins.same(*batch(1))
    assert twins.step.traces == 2


def test_a_keyword_called_args_is_no_positional_argument() -> None:
    def make_step(model: nn.Module, optimizers: Any) -> Any:
        return lambda x, args: (model(x).sum() * args[0]).detach()

    x, y = batch(0)
    assert Twins(adamw, make_step=make_step).same(x, args=[y.float()]) is not None


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


def test_the_structure_of_arguments_is_part_of_the_signature() -> None:
    def make_step(model: nn.Module, optimizers: Any) -> Any:
        return lambda parts: (model(parts[0]) * (2 if isinstance(parts, list) else 3)).sum().detach()

    twins = Twins(sgd, make_step)
    for parts in ([batch(0)[0]], (batch(0)[0],), [batch(1)[0]]):
        twins.same(parts)
    assert twins.step.traces == 2


def test_state_dicts_taken_and_loaded_between_steps_are_right() -> None:
    twins = Twins(adamw)
    twins.train(2)
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


def test_a_step_is_called_without_a_model_being_called_again() -> None:
    calls: list[int] = []
    twins = Twins(sgd)
    twins.captured.model[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index]
    for _ in range(3):
        twins.step(*batch(0))
    assert len(calls) == 1


X = torch.arange(12.0).reshape(3, 4) / 10
FACTOR = 1.0


class Scaling(nn.Module):
    """Scales by a number that it keeps in a list, and one in a variable of its Python module."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors[0] * FACTOR


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaling(), nn.Dropout(0.3), nn.Linear(4, 2))


def summed(model: nn.Module, optimizers: Optimizers) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss: torch.Tensor = model(x).sum()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


class Doubled(Scaling):
    """Another module with the same attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def factor(run: Run, value: float = 5.0) -> None:
    run.model.get_submodule("1").factors[0] = value  # type: ignore[index,operator]


def other_module(run: Run) -> None:
    run.model[1] = Doubled()  # type: ignore[index,operator]


def evaluating(run: Run) -> None:
    run.model.eval()


def forward_hook(run: Run) -> None:
    run.model.get_submodule("0").register_forward_hook(lambda module, given, output: output * 3)


def hook_of_a_parameter(run: Run) -> None:
    run.model.get_parameter("0.weight").register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]


def hook_of_an_optimizer(run: Run) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter in run.model.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    run.optimizers[0].register_step_pre_hook(halve)


UNSEEN = [factor, other_module, evaluating, forward_hook, hook_of_a_parameter, hook_of_an_optimizer]


@pytest.mark.parametrize("change", UNSEEN)
def test_retrace_makes_the_next_call_do_what_nothing_else_sees(change: Any) -> None:
    twins = Twins(sgd, summed, small)
    twins.same(X)
    for run in twins.each():
        change(run)
    old = twins.step.graphs
    twins.step.retrace()
    assert twins.step.graphs == ()
    twins.same(X)
    twins.same(X)
    assert twins.step.traces == 2
    assert twins.step.graphs[0] is not old[0]


@pytest.mark.parametrize(("guard", "change"), [("1.factors", factor), ("1", other_module), ("training", evaluating)])
def test_an_attribute_that_is_listed_is_compared(guard: str, change: Any) -> None:
    twins = Twins(sgd, summed, small, guards=guard)
    twins.same(X)
    for run in twins.each():
        change(run)
    twins.same(X)
    assert twins.step.traces == 2


def test_an_attribute_that_is_not_listed_costs_no_trace() -> None:
    twins = Twins(sgd, summed, small)
    for value in (1.0, 5.0):
        factor(twins.captured, value)
        twins.step(X)
    assert twins.step.traces == 1


def test_a_value_that_was_seen_is_not_traced_again() -> None:
    twins = Twins(sgd, summed, small, guards=["0.in_features", "1.factors"])
    for value in (1.0, 5.0, 1.0, float("nan"), float("nan"), 5.0):
        factor(twins.captured, value)
        twins.step(X)
    assert twins.step.traces == 3


def test_callables_are_asked_for_what_closures_and_globals_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    box = {"s": [1.0, "sum"]}

    def make_step(model: nn.Module, optimizers: Optimizers) -> Any:
        inner = summed(model, optimizers)
        return lambda x: inner(x * box["s"][0])

    twins = Twins(sgd, make_step, small, guards=(lambda: FACTOR, lambda: box))
    for s in (1.0, 5.0, 1.0):
        box["s"][0] = s
        twins.same(X)
    assert twins.step.traces == 2
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    twins.same(X)
    assert twins.step.traces == 3


def test_a_number_of_another_type_is_another_number() -> None:
    box: list[Any] = [1]

    def make_step(model: nn.Module, optimizers: Optimizers) -> Any:
        return lambda x: torch.full((2,), box[0])

    twins = Twins(sgd, make_step, small, guards=lambda: box)
    for value in (1, 1.0, True):
        box[0] = value
        twins.same(X)
    assert twins.step.traces == 3


def counted() -> int:
    return 1


GUARDS = [
    (3, "guards has a value of type int, expected a callable without arguments, or the path of an attribute of the model, "),
    ("1.factor", "guards has '1.factor', but Scaling has no attribute factor"),
    ("0.weight", "the guard 0.weight gives a tensor; make it a plain value, or an argument of the step"),
    (lambda: {1}, "the guard <lambda> gives a value of type set, which has no hash; make it a plain value, or a tuple, list"),
]


@pytest.mark.parametrize(("guard", "text"), GUARDS)
def test_what_is_no_guard_is_told(guard: Any, text: str) -> None:
    with pytest.raises(CaptureError) as caught:
        Twins(sgd, summed, small, guards=[counted, guard]).step(X)
    assert str(caught.value).startswith(text)


def test_a_guard_that_the_step_itself_changes_is_refused() -> None:
    count = [0]

    def make_step(model: nn.Module, optimizers: Optimizers) -> Any:
        inner = summed(model, optimizers)

        def step(x: torch.Tensor) -> Any:
            count[0] += 1
            return inner(x * count[0])

        return step

    def counter() -> int:
        return count[0]

    twins = Twins(sgd, make_step, small, guards=["training", counter])
    before = twins.captured.facts()
    with pytest.raises(CaptureError, match=r"the step changes the guard .*counter, which a graph does not do again; return"):
        twins.step(X)
    assert twins.captured.facts() == before
    assert twins.step.traces == 0


def scaled_by_the_world(model: nn.Module, optimizers: Optimizers) -> Any:
    return lambda x: model(x).sum().detach() / dist.get_world_size()


def summed_over_a_pair(model: nn.Module, optimizers: Optimizers) -> Any:
    return lambda x: c10d.wait_tensor(c10d.all_reduce(model(x).sum().detach(), "sum", "pair"))


def test_a_world_of_another_size_is_traced_anew() -> None:
    twins = Twins(sgd, scaled_by_the_world, small)
    for size in (2, 4, 2):
        with fake_world(0, size):
            twins.same(X)
    assert twins.step.traces == 2


def test_a_process_group_of_other_ranks_is_traced_anew_and_groups_that_are_not_launched_on_do_not_count() -> None:
    twins = Twins(sgd, summed_over_a_pair, small)
    with fake_world(0, 4):
        for number, ranks in enumerate(([0, 1], [0, 2, 3], [0, 1])):
            make_group("pair", ranks)
            make_group(f"other {number}", [0, 3])
            twins.step(X)
            destroy_subgroups()
    assert twins.step.traces == 2


class TiedBuffers(nn.Linear):
    """One buffer is another by a second name."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, 3)
        self.register_buffer("a", torch.full((3,), 1.0))
        self.register_buffer("b", torch.full((3,), 2.0))
        self.register_buffer("scale", self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_buffer_that_is_tied_to_another_is_traced_anew() -> None:
    twins = Twins(sgd, make_model=TiedBuffers)
    twins.same(*batch(0))
    for run in twins.each():
        run.model.scale = run.model.b
    twins.same(*batch(1))
    assert twins.step.traces == 2


def test_an_argument_that_was_state_of_an_optimizer_is_an_argument_again() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()

    def step(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return of * 1

    captured = capture_step(step, model=model, optimizers=optimizer)
    captured(torch.ones(1, 6), optimizer.state[model[0].weight]["exp_avg"])
    assert captured(torch.ones(1, 6), torch.full((3, 6), 7.0)).eq(7).all()
