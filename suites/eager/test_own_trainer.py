"""A trainer's own step as the reference: held to it bit for bit, and one sentence for a trainer that is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fxbucket.compat.modules import plain_fqn
from pytest_fxbucket.eager.job import _whole as whole
from pytest_fxbucket.eager.trainer import EagerStep, OtherModelError
from suites.eager.eager_net import HEAD, Net, Run


class TrainerOf:
    """As much of a trainer as is looked at where no step is taken: it has no ``backward`` and no ``update``."""

    def __init__(self, model: nn.Module, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        self.model = model
        self.optimizers = [optimizer(model.parameters(), **options)]


def text(name: str, of_optimizer: str = "") -> str:
    """The plan whose step is to be that of the trainer of this name."""
    return f"""{HEAD}
[optimizer]
factory = "torch.optim:AdamW"
args = {{ lr = 0.03125 }}
{of_optimizer}
[eager]
factory = "suites.eager.own_trainers:{name}"
"""


def test_a_trainer_whose_step_it_is_is_green_also_where_it_puts_another_class_in_the_models_place(run: Run) -> None:
    verdict = run(text("OtherClass"))
    assert verdict, verdict
    assert "are those of the trainer suites.eager.own_trainers:OtherClass bit for bit on 2 ranks in 3 steps" in verdict.summary


def test_names_lose_what_wrappers_put_into_them_and_nothing_else() -> None:
    inner = nn.Sequential(nn.Linear(1, 1))
    inner.module = nn.Linear(1, 1)  # type: ignore[assignment]
    compiled = torch.compile(inner)
    wrapped = nn.DataParallel(compiled)
    names = [fqn for fqn, _ in inner.named_parameters()]
    assert names[-1] == "module.bias"
    for model in (inner, compiled, wrapped):
        assert [plain_fqn(fqn, model) for fqn, _ in model.named_parameters()] == names


def test_another_step_is_red_and_led_to_its_place(run: Run) -> None:
    verdict = run(text("AnotherLoss"))
    assert verdict.summary == "the bucketed step is not shown to be that of the trainer suites.eager.own_trainers:AnotherLoss"
    assert verdict.lines[0].startswith("step 0, rank 0: loss: 1 of 1 elements differ")
    assert verdict.lines[-1].startswith("first module whose output differs: the loss (aten.mul.Tensor)")


NOT_ONE = {
    "Raises": "it raised ValueError: no such batch",
    "nothing": "[eager] factory gave a Linear without model, optimizers, backward, update",
}


@pytest.mark.parametrize("name", NOT_ONE)
def test_what_is_no_such_trainer_is_one_sentence(name: str, run: Run) -> None:
    verdict = run(text(name))
    assert verdict.outcome == "failed"
    (line,) = verdict.lines
    assert line.startswith(f"the trainer suites.eager.own_trainers:{name}: {NOT_ONE[name]}")


SCHEDULE = 'schedule = "fixtures.trainers.schedules:warmed"'


@pytest.mark.parametrize("name", ["Right", "WithItsOwnSchedule"])
def test_a_schedule_takes_a_trainers_rate_along_whether_it_has_one_itself_or_not(name: str, run: Run) -> None:
    verdict = run(text(name, SCHEDULE))
    assert verdict, verdict


def test_another_rate_than_the_plans_is_red_also_where_a_schedule_says_those_of_each_step(run: Run) -> None:
    assert run(text("OfAnotherRate")).outcome == "failed"
    (line,) = run(text("OfAnotherRate", SCHEDULE)).lines
    assert line == (
        "the trainer suites.eager.own_trainers:OfAnotherRate: the trainer's optimizers.0.groups.0.lr is 0.5, where the plan's "
        "is 0.03125, and 0.003125 as its schedule begins"
    )


def test_a_group_without_a_rate_has_none_that_could_be_another() -> None:
    trainer = TrainerOf(nn.Linear(2, 2), torch.optim.SGD, lr=0.5)
    step, planned = stepped_by(trainer), {"optimizers.0.groups.0.lr": 0.25}
    with pytest.raises(OtherModelError, match=r"groups\.0\.lr is 0\.5, where the plan's is 0\.25, and 0\.125 as its"):
        step.refuse_other_rates(planned, {"optimizers.0.groups.0.lr": 0.125})
    step.refuse_other_rates(planned, {})
    del trainer.optimizers[0].param_groups[0]["lr"]
    step.refuse_other_rates(planned, {"optimizers.0.groups.0.lr": 0.125})


def other_names(model: nn.Module) -> None:
    model.out = model.head
    del model.head


def other_shapes(model: nn.Module) -> None:
    model.head = nn.Linear(8, 12)


def stepped_by(trainer: TrainerOf) -> EagerStep:
    """With neither ``backward`` nor ``update``: no step is taken here."""
    return EagerStep(trainer, updates=True)  # type: ignore[arg-type]  # so it is no trainer by its type


OTHERS: dict[Callable[[nn.Module], None], str] = {
    other_names: "the trainer's model has no parameter head.weight; it has embed.weight, layers.0.norm.weight, ",
    other_shapes: "the trainer's parameter head.weight is float32 (12, 8), where the plan's is float32 (16, 8)",
}


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change.__name__)
def test_a_trainer_of_another_model_is_one_sentence(change: Callable[[nn.Module], None]) -> None:
    model = Net()
    change(model)
    with pytest.raises(OtherModelError) as caught:
        stepped_by(TrainerOf(model, torch.optim.SGD)).begin(whole(Net()))
    assert str(caught.value).startswith(OTHERS[change])


# What a trainer's optimizers leave to torch, which decides otherwise on a GPU, is decided as on the CPU.


@pytest.mark.parametrize(
    ("options", "foreach"), [({}, False), ({"foreach": True}, True), ({"foreach": False}, False), ({"fused": True}, None)]
)
def test_one_parameter_after_another_unless_it_says_otherwise(options: dict[str, Any], foreach: bool | None) -> None:
    trainer = TrainerOf(nn.Linear(2, 2), torch.optim.AdamW, **options)
    stepped_by(trainer)
    (group,) = trainer.optimizers[0].param_groups
    assert (group["foreach"], bool(group["fused"])) == (foreach, "fused" in options)


def test_a_learning_rate_that_groups_share_shrinks_for_each_by_its_own_factor() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [one]} for one in model.parameters()]
    trainer = TrainerOf(model, torch.optim.AdamW, fused=True)
    trainer.optimizers = [torch.optim.AdamW(groups, lr=torch.tensor(0.5), fused=True)]
    factors = {"optimizers.0.groups.0.lr": 0.5, "optimizers.0.groups.1.lr": 0.25}
    stepped_by(trainer).set_rates({}, factors)
    assert [float(group["lr"]) for group in trainer.optimizers[0].param_groups] == [0.25, 0.125]


def test_an_optimizer_that_knows_of_no_such_thing_is_left_alone() -> None:
    trainer = TrainerOf(nn.Linear(2, 2), torch.optim.LBFGS)
    before = dict(trainer.optimizers[0].param_groups[0])
    stepped_by(trainer)
    assert trainer.optimizers[0].param_groups[0] == before
