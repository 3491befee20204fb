"""Optimizers that no graph can run are refused in one sentence that names them, and the line of the user's own that is why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.optimizers.state import make_state, state_tensors
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_model import Optimizer, Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.roles import Value
from suites.capture.optimizer_steps import beginning, shards, trace_update, values
from suites.capture.steps import plan_of


def refusal(build):
    with pytest.raises(CaptureError) as raised:
        trace_update(lambda parameters: [build(list(parameters.values()))], values(shards()), list(shards()))
    text = str(raised.value)
    assert "\n" not in text
    return text


class Counting(torch.optim.Optimizer):
    """Its step is what a test makes of it."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])


@pytest.mark.parametrize("kind", ["RAdam", "ASGD", "Adafactor"])
def test_optimizers_that_decide_by_values_are_refused_by_name(kind):
    text = refusal(getattr(torch.optim, kind))
    assert re.match(f"the step of the optimizer {kind} cannot be traced: it (decides by|asks for) the value", text)
    assert "SGD, Adam and AdamW can" in text


def test_a_users_optimizer_is_refused_with_the_users_own_line():
    class Careful(Counting):
        def update(self, parameter, state, lr):
            if parameter.grad.norm() < 1:
                parameter.sub_(parameter.grad * lr)

    text = refusal(Careful)
    assert re.search(
        r"optimizer Careful cannot be traced at suites/capture/test_optimizer_errors.py:\d+ in update: it decides by the value",
        text,
    )


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (True, r"step\(\) missing 1 required positional argument: 'loss'; step\(\) is called without closure or loss$"),
        (False, r"TypeError: '>' not supported between instances of 'NoneType' and 'int'$"),
    ],
)
def test_a_step_that_wants_a_loss_is_told_that_it_gets_none(needs, said):
    class Wanting(Counting):
        if needs:

            def step(self, loss):
                super().step()

        else:

            def step(self, loss=None):
                if loss > 0:
                    super().step()

    assert re.search(said, refusal(Wanting))


def test_deciding_by_the_learning_rate_is_refused():
    class Picky(Counting):
        def update(self, parameter, state, lr):
            if not isinstance(lr, float) and lr > 0.5:
                parameter.sub_(parameter.grad * lr)

    assert "decides by the value of a number" in refusal(Picky)


def test_a_count_outside_of_tensors_for_one_parameter_would_stand_still_in_a_graph():
    class Matrices(Counting):
        def update(self, parameter, state, lr):
            state["step"] = state.get("step", 0) + (parameter.dim() == 2)
            parameter.sub_(parameter.grad * lr * (1 + state["step"]))

    assert refusal(Matrices) == (
        "the optimizer Matrices counts its state step outside of tensors, where no graph can; keep it in a tensor"
    )


def test_state_that_comes_late_for_one_parameter_alone_is_missing():
    class Late(Counting):
        def update(self, parameter, state, lr):
            if parameter.dim() == 2 and "late" not in state and "first" in state:
                state["late"] = torch.zeros_like(parameter)
            state.setdefault("first" if parameter.dim() == 2 else "late", torch.zeros_like(parameter))

    assert "the state late of the optimizer Late is missing before its second step" in refusal(Late)


def test_a_tensor_from_elsewhere_is_refused():
    class Closing(Counting):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.scale = torch.ones(7)

        def update(self, parameter, state, lr):
            parameter.sub_(parameter.grad * self.scale[0])

    assert "neither parameter, gradient, state nor learning rate" in refusal(Closing)


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_making_state_leaves_parameters_and_gradients_as_they_were(way, momentum):
    parameters = shards()
    held = {fqn: torch.nn.Parameter(tensor.clone()) for fqn, tensor in parameters.items()}
    optimizers = [
        torch.optim.AdamW([*held.values()][:2], lr=0.1, weight_decay=0.5, **{way: True}),
        torch.optim.SGD([*held.values()][2:], lr=0.1, momentum=momentum, weight_decay=0.5, **{way: True}),
    ]
    make_state(optimizers, list(held.values()))
    assert all(torch.equal(held[fqn], parameters[fqn]) and held[fqn].grad is None for fqn in held)
    state = {one.fqn: one.tensor for one in state_tensors(optimizers, held)}
    assert all(not tensor.any() for tensor in state.values())
    assert ("scale.momentum_buffer" in state) == bool(momentum)
    assert {"layers.0.w.step", "layers.0.w.exp_avg", "layers.0.w.exp_avg_sq"} <= set(state)
    assert [group["weight_decay"] for optimizer in optimizers for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_step_that_raises_while_state_is_made_leaves_parameters_gradients_and_options_as_they_were():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].add_(1)
            raise LookupError("lost")

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = gradient = torch.full((3,), 2.0)
    optimizer = Fails([parameter], lr=0.1, weight_decay=0.5)
    with pytest.raises(LookupError):
        make_state([optimizer], [parameter])
    assert parameter.grad is gradient
    assert torch.equal(parameter, torch.ones(3))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_state_is_the_same_on_fake_tensors_and_on_real_shards():
    def build(parameters):
        return [torch.optim.NAdam(list(parameters.values()), foreach=True)]

    update = trace_update(build, values(shards()), list(shards()))
    real, _ = beginning(build, shards(), list(shards()))
    traced = {value.fqn: (value.shape, value.dtype) for value in update.inputs if value.role == "state"}
    assert traced == {fqn: (tuple(t.shape), t.dtype) for fqn, t in real.items() if fqn not in shards()}
    assert real["scale.mu_product"] == 1.0


def test_real_state_that_each_step_puts_another_tensor_for_is_refused():
    class Replacing(Counting):
        def update(self, parameter, state, lr):
            state["count"] = state.get("count", torch.zeros(())) + 1
            parameter.sub_(parameter.grad * lr)

    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(CaptureError, match="the optimizer Replacing puts another tensor in the place of its state 'count'"):
        make_state([Replacing([parameter])], [parameter])


class Trust(torch.optim.Optimizer):
    """Steps by the norm of each parameter, as LARS does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * parameter.norm() * group["lr"])


MIXED = {
    "spread": lambda gradient: gradient / torch.std_mean(gradient)[0],
    "largest": lambda gradient: gradient * gradient.argmax(),
    "neighbour": lambda gradient: gradient.roll(1, 0),
    "first": lambda gradient: gradient / gradient[0],
    "a part": lambda gradient: gradient * gradient.split([1, 3])[0],
    "where another says": lambda gradient: gradient.index_put([torch.arange(4) > 1], gradient[:2]),
    "any": lambda gradient: gradient * (gradient > 0).any(),
}


@pytest.mark.parametrize("by", MIXED)
def test_whatever_an_optimizer_mixes_elements_by_is_refused_on_parts(by):
    class Mixing(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(MIXED[by](parameter.grad))

    weight = [Value("param", "w", (4,), torch.float32)]
    with pytest.raises(CaptureError, match="Mixing looks at more than one element at a time"):
        trace_update(lambda given: [Mixing(list(given.values()), lr=0.1)], weight, ["w"], parted=True)
    assert trace_update(lambda given: [Mixing(list(given.values()), lr=0.1)], weight, ["w"], parted=False)


@pytest.mark.parametrize(
    ("parallel", "by", "clip_norm", "said"),
    [
        ({"dp_shard": 4}, "test_optimizer_errors:Trust", 0.0, "the optimizer Trust looks at more than one element at a time"),
        ({"mode": "replicate", "dp_replicate": 4, "dp_shard": 1}, "test_optimizer_errors:Trust", 0.0, None),
        ({"dp_shard": 4}, "torch.optim:SGD", 1.0, None),
        ({"dp_shard": 4}, "torch.optim:Rprop", 0.0, None),
    ],
)
def test_an_optimizer_that_looks_at_a_whole_parameter_is_refused_where_it_has_a_part_and_only_there(
    parallel, by, clip_norm, said
):
    own = {"optimizer": (Optimizer(by, {"lr": 0.1}),), "step": Step(clip_norm=clip_norm), "bucket": Bucket(unplanned="root")}
    plan = replace(plan_of("residual", **parallel), **own)
    if said is None:
        assert capture_plan(plan, mesh_of(plan), 0).optimizing is not None
        return
    with pytest.raises(CaptureError, match=rf"^{said} \(aten\.linalg_vector_norm\).*updates each element for itself"):
        capture_plan(plan, mesh_of(plan), 0)
