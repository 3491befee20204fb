"""Overridden modules of which a part has nothing to do: calls without a gradient for it, sub-graphs that route nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fixtures.models import routed
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import CapturedStep, capture_step
from suites.capture import override_models as models
from suites.train_step.step_twins import Twins, adamw, batch, differing

EXPERT = "layers.*.moe.experts.3"


def captured(model: nn.Module, *entries: str, **overrides: Any) -> CapturedStep:
    def step(tokens: Tensor) -> Tensor:
        model.zero_grad()
        loss = routed.loss(model(tokens), (tokens,))
        loss.backward()
        return loss.detach()

    return capture_step(step, model=model, overrides={routed.Routed: "call", **overrides}, may_be_idle=entries)


def skipping() -> nn.Module:
    torch.manual_seed(0)
    return routed.build(idle=1, skips=True)


def test_an_expert_without_tokens_has_zeros_where_it_may_be_idle() -> None:
    model, eager = skipping(), skipping()
    step = captured(model, EXPERT)
    for number in range(2):
        (tokens,) = routed.batch(0, number)
        eager.zero_grad()
        loss = routed.loss(eager(tokens), (tokens,))
        loss.backward()
        assert torch.equal(step(tokens), loss)
        idle = {fqn for fqn, one in eager.named_parameters() if one.grad is None}
        assert idle == {f"layers.{i}.moe.experts.3.w{j}.weight" for i in (0, 1) for j in (1, 2)}
        for (fqn, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert mine.grad is not None
            assert torch.equal(mine.grad, torch.zeros_like(mine) if theirs.grad is None else theirs.grad), fqn
    assert step.traces == 1


@pytest.mark.parametrize(("layer", "entries"), [(1, ()), (0, ("layers.1.moe",)), (1, ("layers.0.moe", "layers.1.moe.gate"))])
def test_any_other_parameter_without_a_gradient_is_refused(layer: int, entries: tuple[str, ...]) -> None:
    step = captured(skipping(), *entries)
    sentence = (
        f"experts.3.w1.weight of module layers.{layer}.moe has no gradient in this call, where eager would leave .grad as it is"
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(sentence)} .*or name it in may_be_idle: it has zeros then$"):
        step(*routed.batch(0, 0))


class RoutesNothing(nn.Module):
    """Beside what it gives nothing depends on its parameters, nor on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize(("entry", "lacks"), [("held.gate", ""), ("held.gate.weight", "gate.bias of module held has no")])
def test_a_call_that_routes_nothing_gives_its_input_zeros_where_all_of_it_may_be_idle(entry: str, lacks: str) -> None:
    model = models.Holds(RoutesNothing())

    def train(x: Tensor) -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    step = capture_step(train, model=model, overrides={"held": "call"}, may_be_idle=[entry])
    if lacks:
        with pytest.raises(CaptureError, match=f"^{lacks} gradient"):
            step(batch(0)[0])
        return
    step(batch(0)[0])
    assert [fqn for fqn, one in model.named_parameters() if one.grad is None or not one.grad.any()] == [
        "first.weight",
        "first.bias",
        "held.gate.weight",
        "held.gate.bias",
        "last.weight",
    ]


class Ignores(RoutesNothing):
    """What it gives depends on its parameters alone."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gate(torch.ones_like(x))
        return out


def test_an_input_without_a_gradient_is_refused_where_a_parameter_must_have_one() -> None:
    model = models.Holds(Ignores())

    def train(x: Tensor) -> None:
        model(x).square().sum().backward()

    step = capture_step(train, model=model, overrides={"held": "call"}, may_be_idle=["held.gate.weight"])
    with pytest.raises(CaptureError, match=r"^its input 0 of module held has no gradient in this call"):
        step(batch(0)[0])


WRONG = {
    "layers.0.moe.expert": 'may_be_idle: entry "layers.0.moe.expert" matches nothing; "layers.0.moe" has children gate, ',
    "embed": 'may_be_idle names embed.weight, of no module that is overridden by "call"; leave it out: what is traced has a ',
    "layers..moe": 'may_be_idle: entry "layers..moe" is no name',
}


@pytest.mark.parametrize("entry", WRONG)
def test_entries_that_name_nothing_that_is_called_are_refused(entry: str) -> None:
    with pytest.raises(CaptureError, match=f"^{re.escape(WRONG[entry])}"):
        captured(skipping(), entry)


Read = dict[str, Tensor]
NOTHING: dict[str, Callable[[Read, Tensor], Tensor]] = {
    "its input": lambda held, x: x,
    "its input times zero": lambda held, x: x * 0,
    "zeros": lambda held, x: torch.zeros_like(x),
    "a sum that is dropped": lambda held, x: (functional.linear(x, held["low.weight"]).sum() * 0).expand_as(x),
    "rows that are none": lambda held, x: x.index_add(
        0, torch.zeros(0, dtype=torch.int64), functional.linear(x[:0], held["low.weight"])
    ),
    "a weight of zero": lambda held, x: functional.linear(x, held["low.weight"], held["low.bias"]) * (x.sum() * 0) + x,
}


@pytest.mark.parametrize("gives", NOTHING)
def test_a_subgraph_that_routes_nothing_trains_as_eager_does(gives: str) -> None:
    """With gradients of zeros, or none, where eager has them: AdamW decays where a gradient is zero, and nowhere else."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        found = models.Holds(models.Chooses())
        held = dict(found.held.named_parameters())
        found.held.forward = lambda x: NOTHING[gives](held, x)
        return found

    twins = Twins(adamw, make_model=model, overrides={"held": lambda module: NOTHING[gives]})
    twins.train(3)
    assert not differing(*twins.each())
    (graph,) = twins.step.graphs
    assert not [node for node in graph.graphs["joint"].graph.nodes if "anchor" in str(node.target)]
