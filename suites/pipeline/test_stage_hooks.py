"""Hooks of the whole model: they run once a step, with its own arguments, outputs and gradients, wherever the stages run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline import Stages, split_stages
from suites.pipeline.running import bits, step_apart, summed
from suites.pipeline.stage_models import SPLITS

CUTS = ["layers.0", "layers.1"]


class Scored(nn.Module):
    """Reads its mask in the first stage alone; has a number and None among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, scale: float, given: dict[str, Any], other: None = None) -> dict[str, Any]:
        x = x * given["mask"]
        for layer in self.layers:
            x = layer(x).tanh() * scale
        return {"x": x, "scale": scale}


def batch() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(4, 8, requires_grad=True), 1.5), {"given": {"mask": torch.rand(4, 8)}}


def seen_by(register: Callable[[nn.Module, Callable[..., Any]], Any], run: Callable[[nn.Module, Any, Any], Any]) -> list[Any]:
    """What a hook is called with in a step: the class of the module, and bits of all else."""
    torch.manual_seed(2)
    model, (args, kwargs) = Scored(), batch()
    calls: list[Any] = []
    register(model, lambda module, *given: calls.append((type(module).__name__, bits(given))))
    run(model, args, kwargs)
    return calls


def split(model: nn.Module, args: Any, kwargs: Any) -> Stages:
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return split_stages(model, CUTS, bound.args)


def in_turn(model: nn.Module, args: Any, kwargs: Any) -> None:
    summed(split(model, args, kwargs)(*args, **kwargs)).backward()


def apart(model: nn.Module, args: Any, kwargs: Any) -> None:
    stages = split(model, args, kwargs)
    values = stages.batch(*args, **kwargs)
    step_apart(stages, values)


RUNS = [in_turn, apart]


@pytest.mark.parametrize("run", RUNS)
def test_a_hook_before_forward_gets_the_arguments_of_the_model(run: Callable[..., Any]) -> None:
    def register(model: nn.Module, hook: Callable[..., Any]) -> Any:
        return model.register_forward_pre_hook(hook)

    expected = seen_by(register, lambda m, a, k: m(*a, *k.values()))
    assert seen_by(register, run) == expected
    assert len(expected) == 1


@pytest.mark.parametrize("run", RUNS)
def test_a_hook_behind_forward_gets_the_output_and_arguments_that_no_late_stage_reads(
    run: Callable[..., Any],
) -> None:
    def register(model: nn.Module, hook: Callable[..., Any]) -> Any:
        return model.register_forward_hook(hook)

    expected = seen_by(register, lambda m, a, k: m(*a, *k.values()))
    assert seen_by(register, run) == expected
    assert len(expected) == 1


@pytest.mark.parametrize("run", RUNS)
def test_hooks_with_keyword_arguments_get_them(run: Callable[..., Any]) -> None:
    def register(model: nn.Module, hook: Callable[..., Any]) -> Any:
        model.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_hook(hook, with_kwargs=True)

    assert seen_by(register, run) == seen_by(register, lambda m, a, k: m(*a, *k.values()))


def backward_calls(register: str, step: Callable[[nn.Module, Tensor], Any], which: int) -> list[Any]:
    """What a hook around backward is called with: whether with the model, and bits of its ``which`` tuple of gradients."""
    torch.manual_seed(2)
    model, x, calls = SPLITS["Skips"].build(), torch.randn(4, 8, requires_grad=True), list[Any]()
    getattr(model, register)(lambda module, *given: calls.append((module is model, bits(given[which]))))
    step(model, x)
    return calls


def step_in_turn(model: nn.Module, x: Tensor) -> None:
    summed(split_stages(model, CUTS, x)(x)).backward()


def step_of_apart(model: nn.Module, x: Tensor) -> None:
    stages = split_stages(model, CUTS, x)
    step_apart(stages, stages.batch(x))


@pytest.mark.parametrize("step", [step_in_turn, step_of_apart])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_around_backward_get_gradients_of_the_models_inputs_and_outputs(register: str, step: Callable[..., Any]) -> None:
    expected = backward_calls(register, lambda model, x: summed(model(x)).backward(), 0)
    assert backward_calls(register, step, 0) == expected
    ((is_model, (_, ((dtype, shape, _),))),) = expected
    assert (is_model, dtype, shape) == (True, torch.float32, (4, 8))


def test_what_hooks_give_is_what_the_model_runs_on_and_gives() -> None:
    def build() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(2)
        model = SPLITS["Skips"].build()
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.register_forward_pre_hook(lambda module, args: args[0] + 1)
        model.register_forward_hook(lambda module, args, output: output * args[0])
        return model, torch.randn(4, 8)

    model, x = build()
    assert bits(split_stages(model, CUTS, x)(x)) == bits(build()[0](x))


def test_a_hook_that_is_removed_runs_no_more_and_none_runs_while_the_model_is_cut() -> None:
    model, x, calls = SPLITS["Skips"].build(), torch.randn(4, 8), list[Any]()
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(args))
    stages = split_stages(model, CUTS, x)
    assert calls == []
    stages(x)
    assert len(calls) == 1
    handle.remove()
    stages(x)
    model(x)
    assert len(calls) == 1


def test_arguments_of_another_form_from_a_hook_are_refused() -> None:
    model, x = SPLITS["Skips"].build(), torch.randn(4, 8)
    model.register_forward_pre_hook(lambda module, args: args[0][:2])
    stages = split_stages(model, CUTS, x)
    with pytest.raises(StageError, match=r"argument x is a tensor of \[2, 8\] .* traced with a tensor of \[4, 8\] .*"):
        stages(x)


def test_the_arguments_cross_only_where_a_hook_reads_them() -> None:
    torch.manual_seed(2)
    (args, kwargs), plain = batch(), Scored()
    assert [one.name for one in split(plain, args, kwargs)[2].summary.receives if one.stage == 0 and not one.module] == []
    hooked = Scored()
    hooked.register_forward_hook(lambda *_: None)
    last = split(hooked, args, kwargs)[2].summary
    assert [one.name for one in last.receives[:2]] == [one.name for one in last.read[:2]] == ["x", "given['mask']"]


def test_a_partial_backward_hook_is_refused() -> None:
    model = SPLITS["Skips"].build()
    model.register_backward_hook(lambda *_: None)
    with pytest.raises(StageError, match="use register_full_backward_hook"):
        split_stages(model, CUTS, torch.randn(4, 8))
