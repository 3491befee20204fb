"""What an operator of ours computes has gradients wherever it is called from, and sees what its caller set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fxbucket.compat.dispatch_keys import above_autograd
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Calls ``function`` where a dispatch mode calls operators."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.given = function, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.given.append(self.function())
        return func(*args, **(kwargs or {}))


def gradient() -> torch.Tensor | None:
    x = torch.tensor([2.0], requires_grad=True)
    with torch.enable_grad():
        y = (x * x.conj()).sum()
    return torch.autograd.grad(y, x)[0] if y.requires_grad else None


def below(function: Any) -> Any:
    """What ``function`` gives where a dispatch mode calls it."""
    calls = Calls(function)
    with calls:
        torch.ones(1)
    return calls.given[0]


def test_a_mode_calls_below_autograd() -> None:
    """Else the tests below would show nothing."""
    assert below(gradient) is None


@pytest.mark.parametrize("call", [below, lambda function: function()], ids=["in a mode", "outside"])
def test_there_are_gradients(call: Any) -> None:
    assert call(above_autograd(gradient)) == torch.tensor([4.0])


def test_the_mode_is_left_as_it_was() -> None:
    def twice() -> list[torch.Tensor | None]:
        return [above_autograd(gradient)(), gradient()]

    assert below(twice) == [torch.tensor([4.0]), None]


def test_autocast_of_the_caller_holds() -> None:
    product = above_autograd(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert product().dtype == torch.bfloat16
