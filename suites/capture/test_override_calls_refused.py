"""Calls of real modules that a graph cannot make: each refused in one sentence when it runs, and the model is as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.capture import Override
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.capture import override_models as models
from suites.train_step.step_twins import batch

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random": (models.Drops, "module held draws random numbers, which backward, where it is called again, would draw anew"),
    "buffer": (models.Counts, "module held writes calls in place, which backward"),
    "input": (models.WritesInput, "module held writes a parameter, or one of its inputs, in place, which backward"),
    "attribute": (models.Remembers, "module held changes attribute calls of its own when it is called, and backward"),
    "strides": (
        models.Transposes,
        "module held gives float32[4, 6]{1, 4} as result 0, where float32[4, 6] was promised when the step was traced",
    ),
    "past the attribute": (
        models.PastAttributes,
        "module held reads a parameter of shape (6, 6) past its module's attribute, so its gradient would be lost",
    ),
}


def captured(make: Callable[[], nn.Module], override: Any = "call") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = models.Holds(make())

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    return model, capture_step(step, model=model, overrides={"held": override})


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_happen_twice_is_refused_and_nothing_is_changed(make: Callable[[], nn.Module], sentence: str) -> None:
    model, step = captured(make)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = {fqn: dict(vars(module)) for fqn, module in model.named_modules()}
    with pytest.raises(CaptureError, match=f"^{re.escape(sentence)}"):
        step(batch(0)[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {fqn: dict(vars(module)) for fqn, module in model.named_modules()} == plain


def test_a_parameter_without_a_gradient_in_one_call_is_refused_then() -> None:
    """Eager would leave its .grad as it is, so that an optimizer would pass it over."""
    model, step = captured(models.Skips)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.fill_(1.0)
    step(batch(0)[0])
    with torch.no_grad():
        model.first.bias.fill_(-1.0)
    sentence = "high.weight of module held has no gradient in this call, where eager would leave .grad as it is"
    with pytest.raises(CaptureError, match=f"^{re.escape(sentence)}"):
        step(batch(0)[0])


def test_a_result_of_another_structure_than_promised_is_refused() -> None:
    model, step = captured(models.Chooses, Override(output=lambda module, x: torch.empty_like(x).to(torch.float64)))
    model.last.double()
    sentence = "module held gives float32[4, 6] as result 0, where float64[4, 6] was promised when the step was traced"
    with pytest.raises(CaptureError, match=f"^{re.escape(sentence)}"):
        step(batch(0)[0])


def test_a_module_that_is_gone_is_named() -> None:
    _, step = captured(models.Chooses)
    step(batch(0)[0])
    graph = step.graphs[0].graphs["joint"]
    node = next(node for node in graph.graph.nodes if str(node.target) == "fxbucket.call_forward.default")
    node.args = ("held#gone", *node.args[1:])
    graph.recompile()
    with pytest.raises(CaptureError, match=r"^the graph calls module held, which this process has not built"):
        step(batch(0)[0])
