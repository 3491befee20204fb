"""A captured step gives, bit for bit, what eager gives: results, parameters, buffers, gradients, optimizers' state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_fxbucket.train_step import capture_step
from suites.train_step.step_twins import Optimizers, Run, Step, Twins, adamw, batch, differing, net, sgd, usual

KINDS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Recomputing(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def dropping() -> nn.Module:
    """A trace leaves out p = 0.5, which the functional twin of bernoulli_ must be given; half is computed again in backward."""
    torch.manual_seed(0)
    again = Recomputing(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 8))
    return nn.Sequential(nn.Linear(6, 64), nn.Dropout(), again, nn.Linear(8, 3))


class Swapping(torch.optim.Optimizer):
    """Its two tensors of state change places at each step, and a third one is replaced."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {key: torch.full_like(parameter, i) for i, key in enumerate(("near", "far", "last"))}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["near"], state["far"] = state["far"], state["near"]
            state["last"] = state["last"] * 0.5 + state["near"]
            parameter.add_(parameter.grad + state["last"], alpha=-self.param_groups[0]["lr"])


class Shrinking(torch.optim.SGD):
    """Has its base's step within its own: torch calls hooks of steps around both, once there was a plain one of the base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as people write it
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.mul_(0.75)


def of_torch(name: str, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    return optimizer


OTHERS: dict[str, dict[str, Any]] = {
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {"weight_decay": 0.1},
    "Adamax": {},
    "Adadelta": {},
    "Rprop": {},
    "Adam": {"amsgrad": True, "maximize": True},
    "SGD": {"nesterov": True, "momentum": 0.9, "weight_decay": 0.1},
}
TRAINED: dict[str, Callable[[], Twins]] = {
    **{f"sgd-{kind}": partial(Twins, partial(sgd, **options)) for kind, options in KINDS.items()},
    **{f"adamw-{kind}": partial(Twins, partial(adamw, **options)) for kind, options in KINDS.items()},
    **{name: partial(Twins, partial(of_torch, name, options)) for name, options in OTHERS.items()},
    "state that is replaced": lambda: Twins(lambda model: Swapping(model.parameters())),
    "dropout": lambda: Twins(sgd, make_model=dropping),
}


@pytest.mark.parametrize("twins", TRAINED.values(), ids=TRAINED.keys())
def test_a_step_trains_as_eager(twins: Callable[[], Twins]) -> None:
    found = twins()
    for i in range(4):
        found.same(*batch(i), seed=i)
    assert found.step.traces == 1


def test_clipping_is_traced_as_foreach_as_it_runs() -> None:
    twins = Twins(sgd)
    twins.same(*batch(0))
    assert any("_foreach_norm" in str(node.target) for node in twins.step.graphs[0].graphs["joint"].graph.nodes)


def test_groups_and_several_optimizers_train_as_eager_with_live_learning_rates() -> None:
    def optimizers(model: Any) -> Optimizers:
        groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[1].parameters(), "weight_decay": 0.1}]
        rest = [*model[4].parameters(), *model[5].parameters()]
        return [torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True), torch.optim.AdamW(rest, lr=0.01, amsgrad=True)]

    twins = Twins(optimizers)
    schedulers = [
        scheduler
        for run in twins.each()
        for scheduler in (
            torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], 0.5),
            torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizers[1], 5),
        )
    ]
    for i in range(4):
        twins.same(*batch(i))
        for scheduler in schedulers:
            scheduler.step()
    assert twins.step.traces == 1


@pytest.mark.filterwarnings("error:Detected call of")
def test_schedulers_that_the_step_calls_are_called_after_each_run() -> None:
    def warmed(model: Any, optimizers: Optimizers) -> Step:
        rates = torch.optim.lr_scheduler
        first, then = rates.LinearLR(optimizers[0], 0.1, total_iters=2), rates.CosineAnnealingLR(optimizers[0], 3)
        schedulers = [rates.SequentialLR(optimizers[0], [first, then], [2]), rates.ExponentialLR(optimizers[1], 0.5)]
        train = usual(model, optimizers)

        def step(x: Any, y: Any) -> Any:
            loss = train(x, y)
            for scheduler in schedulers:
                scheduler.step()
            return loss

        return step

    twins = Twins(lambda model: [sgd(model[:3]), adamw(model[3:])], warmed)
    rates = []
    for i in range(6):
        twins.same(*batch(i))
        rates.append([[group["lr"] for one in run.optimizers for group in one.param_groups] for run in twins.each()])
    assert twins.step.traces == 1
    assert all(eagers == captured for eagers, captured in rates)
    assert len({tuple(eagers) for eagers, _ in rates}) == 6


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_scales_and_skips_as_in_eager(fused: bool) -> None:
    """The third batch is so large that gradients are not finite: nothing is updated, and the scale is halved."""

    def scaled(scaler: torch.amp.GradScaler) -> Callable[..., Any]:
        def make(model: Any, optimizers: Optimizers) -> Step:
            def step(x: Any, y: Any) -> Any:
                optimizers[0].zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = functional.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizers[0])
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizers[0])
                scaler.update()
                return loss.detach()

            return step

        return make

    def run(scaler: torch.amp.GradScaler) -> Run:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizers: Optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)]
        return Run(model, optimizers, scaled(scaler)(model, optimizers))

    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    eager, captured = (run(scaler) for scaler in scalers)
    step = capture_step(captured.step, model=captured.model, optimizers=captured.optimizers, scaler=scalers[1])
    scales = []
    for number in range(6):
        if number == 4:
            for scaler in scalers:
                scaler.set_growth_factor(4.0)
        draw = torch.Generator().manual_seed(number)
        x, y = torch.randn(3, 4, generator=draw), torch.randn(3, 2, generator=draw)
        given = x * (1e30 if number == 2 else 1), y
        assert torch.equal(eager.step(*given).nan_to_num(), step(*given).nan_to_num())
        assert differing(eager, captured) == []
        assert scalers[0].state_dict() == scalers[1].state_dict()
        scales.append(scalers[1].get_scale())
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 4096.0, 4096.0]
    assert step.traces == 2  # by how much it grows is a number of the graph


def test_gradients_are_accumulated_over_microbatches_of_which_a_tensor_counts_the_tokens() -> None:
    """The count is live, and as many microbatches as a call has are traced once."""

    def accumulated(model: Any, optimizers: Optimizers) -> Step:
        def step(batches: Any, count: Any) -> Any:
            optimizers[0].zero_grad()
            losses = [functional.cross_entropy(model(x), y, reduction="sum") / count for x, y in batches]
            for loss in losses:
                loss.backward()
            optimizers[0].step()
            return sum(loss.detach() for loss in losses)

        return step

    twins = Twins(sgd, accumulated)
    for number, several in enumerate((2, 3, 2, 3)):
        twins.same([batch(10 * number + i) for i in range(several)], torch.tensor(3.0 + number))
    assert twins.step.traces == 2


def test_a_step_within_the_step_of_a_class_derived_from_an_optimizer_is_a_part_of_it() -> None:
    torch.optim.SGD(net().parameters(), lr=0.1)
    twins = Twins(lambda model: Shrinking(model.parameters(), lr=0.1, momentum=0.9))
    for i in range(3):
        twins.same(*batch(i))


@pytest.mark.parametrize("in_hook", [False, True])
def test_weights_averaged_in_the_step_and_an_evaluation_beside_it(in_hook: bool) -> None:
    """A second module that holds averages, and a step of its own that evaluates with them."""

    def averaged(models: Any, optimizers: Optimizers) -> Step:
        train = usual(models["model"], optimizers)

        @torch.no_grad()
        def average(*_: Any) -> None:
            for mean, one in zip(models["mean"].parameters(), models["model"].parameters(), strict=True):
                mean.lerp_(one, 0.1)

        if in_hook:
            optimizers[0].register_step_post_hook(average)

        def step(x: Any, y: Any) -> Any:
            loss = train(x, y)
            if not in_hook:
                average()
            return loss

        return step

    def models() -> Any:
        return nn.ModuleDict({"model": net(), "mean": net().requires_grad_(False)})

    twins = Twins(lambda both: adamw(both["model"]), averaged, models)
    evaluated = []
    for run in twins.each():
        run.model["mean"].eval()  # type: ignore[index, operator]  # a ModuleDict
        evaluated.append(partial(_evaluated, run.model["mean"]))  # type: ignore[index]  # a ModuleDict
    evaluated[1] = capture_step(evaluated[1], model=dict(twins.captured.model.items()))  # type: ignore[operator]  # a ModuleDict
    for i in range(3):
        twins.same(*batch(i))
        assert torch.equal(*(one(batch(9)[0]) for one in evaluated))
    assert (twins.step.traces, evaluated[1].traces) == (1, 1)  # type: ignore[attr-defined]  # a CapturedStep


def _evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(x).softmax(-1)
    return found


def test_a_learning_rate_that_is_a_tensor_is_live() -> None:
    twins = Twins(lambda model: adamw(model, lr=torch.tensor(0.01), fused=True))
    for i in range(3):
        twins.same(*batch(i))
        for run in twins.each():
            run.optimizers[0].param_groups[0]["lr"].mul_(0.5)
    assert twins.step.traces == 1


def accumulating(model: nn.Module, optimizers: Optimizers) -> Step:
    """Several microbatches, clipping, and gradients dropped at the end."""

    def step(x: torch.Tensor, y: torch.Tensor, parts: int) -> dict[str, Any]:
        losses = []
        for part, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = functional.cross_entropy(model(part), target) / parts
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizers[0].step()
        model.zero_grad()
        return {"loss": sum(losses), "norm": norm, "parts": parts, "lr": optimizers[0].param_groups[0]["lr"]}

    return step


def test_microbatches_add_up_as_in_eager_and_results_keep_their_shape() -> None:
    twins = Twins(adamw, accumulating)
    for i in range(3):
        found = twins.same(*batch(i, 8), 2)
    assert found["parts"] == 2
    assert found["lr"] == 0.01
    assert twins.step.traces == 1


def test_gradients_of_before_are_added_to_and_then_dropped() -> None:
    twins = Twins(sgd, accumulating)
    twins.same(*batch(0), 2)
    for run in twins.each():
        run.model[0].weight.grad = torch.ones(8, 6)  # type: ignore[index]
    twins.same(*batch(1), 2)
    assert twins.captured.model[0].weight.grad is None  # type: ignore[index]
    assert twins.step.traces == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_only_adds_to_gradients_is_traced_for_each_of_their_states(first: bool) -> None:
    def make_step(model: nn.Module, optimizers: Optimizers) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        return step

    twins = Twins(sgd, make_step)
    for has_gradients in (first, not first, first):
        for run in twins.each():
            for parameter in run.model.parameters():
                parameter.grad = torch.ones_like(parameter) if has_gradients else None
        twins.same(*batch(0))
    assert twins.step.traces == 2


def by_hand(model: nn.Module, optimizers: Optimizers) -> Step:
    """autograd.grad and gradients set by hand; parameters are held from outside of the step."""
    parameters = list(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = functional.cross_entropy(model(x), y)
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad * 2
        nn.utils.clip_grad_value_(parameters, 0.01)
        optimizers[0].step()
        with torch.no_grad():
            parameters[0].mul_(0.5)
        return loss.detach(), parameters[0]

    return step


def test_parameters_held_outside_of_the_model_are_the_same_parameters() -> None:
    twins = Twins(sgd, by_hand)
    twins.train(3)
    _, parameter = twins.step(*batch(0))
    assert parameter is twins.captured.model[0].weight  # type: ignore[index]


def without_dropping(model: nn.Module, optimizers: Optimizers) -> Step:
    """Gradients live on from call to call."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


def zeroing(model: nn.Module, optimizers: Optimizers) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad(set_to_none=False)
        return without_dropping(model, optimizers)(x, y)  # type: ignore[no-any-return]

    return step


@pytest.mark.parametrize("make_step", [without_dropping, zeroing])
def test_gradients_that_outlive_a_step_are_kept(make_step: Any) -> None:
    twins = Twins(sgd, make_step)
    twins.train(4)
    assert twins.step.traces == 2  # with gradients of before, and without


class Tied(nn.Module):
    """A tied weight, a layer called twice, a frozen one, two dtypes, a parameter that is never used, one on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.head, self.low = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.head.weight = self.inner.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = checkpoint(self.inner, self.inner(x).relu(), use_reentrant=False)
        x = self.low(self.frozen(x).bfloat16()).float() * self.scale
        return self.head(x * torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0]))  # type: ignore[no-any-return]


def tied() -> Tied:
    torch.manual_seed(1)
    return Tied()


def test_tied_frozen_unused_and_mixed_parameters_train_as_eager() -> None:
    twins = Twins(adamw, make_model=tied)
    twins.train(3)
    assert len(twins.eager.optimizers[0].state) == 5
    parameters = twins.step.graphs[0].parameters
    assert next(p for p in parameters if p.fqn == "inner.weight").aliases == ("head.weight",)


def test_an_argument_that_is_written_in_place_is_written() -> None:
    def make_step(model: nn.Module, optimizers: Optimizers) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
            loss = usual(model, optimizers)(x, y)
            running.mul_(0.9).add_(loss)
            return running

        return step

    twins = Twins(sgd, make_step)
    for i in range(3):
        twins.same(*batch(i), torch.ones(()))


def test_inputs_and_outputs_have_roles_and_names() -> None:
    twins = Twins(adamw, make_model=lambda: net()[5:])
    twins.step(torch.ones(2, 8), torch.ones(2, dtype=torch.int64))
    (step,) = twins.step.graphs
    assert [(value.role, value.fqn) for value in step.inputs["joint"]] == [
        *[("param", "5.weight"), ("param", "5.bias")],
        *[("state", f"5.{name}.{key}") for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")],
        *[("hyper", "optimizers.0.groups.0.lr"), ("batch", "args[0]"), ("batch", "args[1]")],
    ]
    assert [(value.role, value.fqn) for value in step.outputs["joint"]][:3] == [
        *[("loss", "result"), ("param", "5.weight"), ("param", "5.bias")],
    ]
    assert all(value.shape == (1,) or value.dtype for value in step.inputs["joint"])
