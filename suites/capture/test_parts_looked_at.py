"""A rank's part where the whole is meant is refused: outputs under tp, optimizers, and attention that is taken for a draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import plan_of
from torch import Tensor, nn

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Model, Optimizer, Step
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.step.roles import StepGraph


class Attention(nn.Module):
    """Scaled dot product attention of one head, and a linear."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout, self.inner = nn.Linear(8, 8), dropout, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[None, None]
        attended: Tensor = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout)
        return self.inner(attended[0, 0])


def attention(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Attention(dropout))


class Trust(torch.optim.Optimizer):
    """Steps by the norm of each parameter, as LARS does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * parameter.norm() * group["lr"])


def captured(factory: str = "capture_models:residual", step: Step | None = None, *, by: str = "", **parallel: Any) -> StepGraph:
    plan = plan_of("residual", **parallel)
    model = Model(factory, "capture_models:batch", {}, "capture_models:loss")
    optimizer = (Optimizer(by, {"lr": 0.1}),) if by else ()
    bucket = replace(plan.bucket, unplanned="root")
    plan = replace(plan, model=model, step=step or Step(), optimizer=optimizer, bucket=bucket)
    return capture_plan(plan, mesh_of(plan), 0)


def refusal(*args: Any, **rest: Any) -> str:
    with pytest.raises(FxbucketError) as caught:
        captured(*args, **rest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_part_of_the_output_that_reaches_the_loss_is_refused() -> None:
    said = refusal("test_parts_looked_at:attention", tp=2, tp_plan={"1.linear": "colwise"})
    assert said.startswith(
        "under tp = 2 the model's output has the shape (4, 4), and (4, 8) without: a rank's part reaches the loss"
    )
    assert "1.linear, colwise in tp_plan," in said


def test_an_optimizer_that_looks_at_a_whole_parameter_is_refused_where_it_has_a_part_and_only_there() -> None:
    said = refusal(by="test_parts_looked_at:Trust")
    assert said.startswith("the optimizer Trust looks at more than one element at a time (aten.linalg_vector_norm)")
    assert "updates each element for itself" in said
    assert captured(by="test_parts_looked_at:Trust", mode="replicate", dp_replicate=4, dp_shard=1).optimizing is not None
    assert captured(step=Step(clip_norm=1.0), by="torch.optim:SGD").optimizing is not None


def test_attention_without_dropout_draws_nothing_and_may_be_computed_again() -> None:
    again = Step(checkpoint=parse_entries(["1"], "test"))
    step = captured("test_parts_looked_at:attention", again)
    targets = [str(node.target) for node in step.graphs["joint"].graph.nodes]
    assert sum("scaled_dot_product" in target and "backward" not in target for target in targets) == 2


def test_a_module_without_parameters_may_be_computed_again() -> None:
    assert captured("test_parts_looked_at:attention", Step(checkpoint=parse_entries(["1.inner"], "test"))).parameters
    said = refusal("test_parts_looked_at:attention", Step(checkpoint=parse_entries(["1.outer"], "test")))
    assert 'checkpoint: entry "1.outer" matches nothing' in said


def test_two_styles_for_one_linear_are_refused() -> None:
    said = refusal("test_parts_looked_at:attention", tp=2, tp_plan={"1.linear": "colwise", "1.*": "rowwise"})
    assert said.endswith("1.linear is colwise and rowwise by two of its selectors; let one of them name it")
