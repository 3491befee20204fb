"""Backward calls a module again: what a graph cannot do twice alike is refused in one sentence, and the model is as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_fxbucket.capture import Override
from pytest_fxbucket.capture.override.calls import digest_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.train_step import capture_step
from suites.capture import override_models as models
from suites.train_step.step_twins import Twins, adamw, batch

OTHER = "module held gives other values when backward calls it again than it gave in forward"


def twins(make: Callable[[], nn.Module], make_step: Any, override: Any = "call") -> Twins:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return models.Holds(make())

    return Twins(adamw, make_step, seeded, overrides={"held": override})


def dropping(model: nn.Module, optimizers: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Draws between the call's forward and backward."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizers[0].zero_grad()
        loss = functional.cross_entropy(functional.dropout(model(x), 0.3), y)
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


@pytest.mark.parametrize("does", ["draws of its own", "forks"])
def test_a_module_that_draws_unseen_is_refused(does: str) -> None:
    step = twins(models.DOES[does], dropping).captured.step
    with pytest.raises(CaptureError, match=f"^{re.escape(OTHER)}"):
        step(*batch(0))


def test_a_module_that_remembers_only_in_a_later_call_is_refused_then() -> None:
    found = twins(models.DOES["remembers in a later call"], dropping)
    first = found.captured.model.get_submodule("first")
    with torch.no_grad():
        first.weight.zero_()
        first.bias.fill_(-1.0)
    found.captured.step(*batch(0))
    with torch.no_grad():
        first.bias.fill_(1.0)
    with pytest.raises(CaptureError, match=f"^{re.escape(OTHER)}"):
        found.captured.step(*batch(0))


def test_results_that_are_changed_in_place_after_a_call_are_compared_as_they_were_given() -> None:
    def make_step(model: models.Holds, optimizers: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizers[0].zero_grad()
            loss = functional.cross_entropy(model.last(model.held(model.first(x)).mul_(2).add_(1)), y)
            loss.backward()
            optimizers[0].step()
            return loss.detach()

        return step

    found = twins(models.Chooses, make_step)
    found.train(2)


def test_two_backwards_of_a_call_and_two_calls_in_a_step_are_told_apart() -> None:
    def make_step(model: nn.Module, optimizers: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizers[0].zero_grad()
            first, second = (functional.cross_entropy(model(x * by), y) for by in (1, 2))
            first.backward(retain_graph=True)
            (second * first.detach()).backward()
            (first * 3).backward()
            optimizers[0].step()
            return first.detach()

        return step

    found = twins(models.Chooses, make_step)
    found.train(2)


def test_a_call_whose_result_nobody_reads_but_backward_needs_no_forward() -> None:
    def make_step(model: models.Holds, optimizers: Any) -> Callable[[Tensor, Tensor], None]:
        def step(x: Tensor, _: Tensor) -> None:
            optimizers[0].zero_grad()
            model.held(model.first(x)).sum().backward()
            optimizers[0].step()

        return step

    found = twins(models.Chooses, make_step)
    for run in (found.eager, found.captured):
        run.step(*batch(0))
    assert found.eager.facts() == found.captured.facts()


@pytest.mark.parametrize("override", ["call", lambda _: lambda tensors, x: (x @ tensors["low.weight"]).square()])
def test_a_gradient_of_a_gradient_through_an_overridden_module_is_refused(override: Any) -> None:
    def make_step(penalty: bool) -> Any:
        def of(model: nn.Module, optimizers: Any) -> Callable[[Tensor, Tensor], Tensor]:
            def step(x: Tensor, y: Tensor) -> Tensor:
                x = x.detach().requires_grad_()
                out = model(x)
                (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = functional.cross_entropy(out, y) + (grad if penalty else grad.detach()).square().sum()
                loss.backward()
                return loss.detach()

            return step

        return of

    sentence = r"test_override_called_again\.py:\d+ in step: a gradient of a gradient goes through module held, which is"
    with pytest.raises(CaptureError, match=sentence):
        twins(models.Chooses, make_step(True), override).captured.step(*batch(0))
    twins(models.Chooses, make_step(False), override).captured.step(*batch(0))  # asked for, and not differentiated


TENSORS = {
    "float64": torch.linspace(0, 1, 7, dtype=torch.float64),
    "bfloat16": torch.linspace(0, 1, 7).bfloat16(),
    "bool": torch.arange(9) % 2 == 0,
    "complex": torch.linspace(0, 1, 6).to(torch.complex64).conj(),
    "transposed": torch.linspace(0, 1, 12).view(3, 4).T,
    "a number": torch.tensor(3),
    "more than a chunk": torch.arange((1 << 18) + 3, dtype=torch.int16),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_a_digest_is_of_the_bits_and_where_they_are(tensor: Tensor) -> None:
    first = int(digest_of([tensor]))
    assert int(digest_of([tensor.clone(memory_format=torch.contiguous_format)])) == first
    if tensor.dim():
        assert int(digest_of([tensor.roll(1, 0)])) != first
    other = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    other[-1] = other[-1].logical_not()
    assert int(digest_of([other.reshape(tensor.shape)])) != first


def test_a_digest_tells_zeros_of_both_signs_and_tensors_in_another_order_apart() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    found = [digest_of(tensors) for tensors in ([zero], [-zero], [one], [zero, one], [one, zero], [], [zero[:0]])]
    assert len({int(number) for number in found}) == 6  # nothing is as an empty one


REFUSED = {
    "drops": "draws random numbers, which backward, where it is called again, would draw anew",
    "writes a buffer": "writes calls in place, which backward",
    "writes its input": "writes a parameter, or one of its inputs, in place, which backward",
    "remembers": "changes attribute calls of its own when it is called, and backward",
    "gives other strides": ("gives float32[4, 6]{1, 4} as result 0, where float32[4, 6] was promised when the step was traced"),
    "reads past an attribute": ("reads a parameter of shape (6, 6) past its module's attribute, so its gradient would be lost"),
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


@pytest.mark.parametrize(("does", "sentence"), REFUSED.items(), ids=REFUSED)
def test_what_would_happen_twice_is_refused_and_nothing_is_changed(does: str, sentence: str) -> None:
    model, step = captured(models.DOES[does])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = {fqn: dict(vars(module)) for fqn, module in model.named_modules()}
    with pytest.raises(CaptureError, match=f"^module held {re.escape(sentence)}"):
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
