"""Where eager parts from a graph, operator by operator: what backward goes through counts, though it may call nothing there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pytest_fxbucket.checks.bitwise.localise import bits_digest
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode
from pytest_fxbucket.eager.divergence import Divergence, first_divergence


class Residual(nn.Module):
    """A sum, whose backward calls no operator, and a sine that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.sin()
        return x + h


class Checks(nn.Module):
    """Looks at its input, as ``one_hot`` does, scales it without gradients, and keeps its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert bool(x.amax() < 1e6)
        with torch.no_grad():
            scaled = (x * 3).flip(0)
            self.last.copy_(x.sum())
        out: Tensor = self.linear(scaled)
        return out


class Seen(TorchDispatchMode):
    """Digests of what all operators give, but for those of ``left_out``."""

    def __init__(self, *left_out: str) -> None:
        super().__init__()
        self.left_out, self.digests = left_out, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and str(func) not in self.left_out:
            self.digests.add(bits_digest([made]))
        return made


def first(*left_out: str, of: type[nn.Module] = Residual) -> Divergence:
    """The first difference from a graph that has not computed what operators of these names give."""
    torch.manual_seed(0)
    model, x = of(), torch.randn(3, 4)

    def take() -> None:
        model(x).tanh().mean().backward()

    with Seen(*left_out) as seen:
        take()
    return first_divergence(model, seen.digests, take)


def test_a_sum_is_named_and_what_nobody_reads_is_not() -> None:
    assert first() == Divergence()
    assert first("aten.sin.default") == Divergence()
    assert first("aten.sin.default", "aten.add.Tensor") == Divergence("", "aten.add.Tensor")
    assert first("aten.sin.default", "aten.add.Tensor", "aten.addmm.default") == Divergence("linear", "aten.addmm.default")


def test_what_has_no_gradient_is_named_where_it_is_read_or_written() -> None:
    looks = ("aten.amax.default", "aten.lt.Scalar")
    assert first(*looks, of=Checks) == Divergence()
    lost = "aten.mul.Tensor", "aten.flip.default"
    assert first(*looks, *lost, "aten.addmm.default", of=Checks) == Divergence("", "aten.mul.Tensor")
    assert first(*looks, *lost, of=Checks) == Divergence()
    assert first(*looks, "aten.mul.Tensor", of=Checks) == Divergence(), "flip gave what the graph has, by another way"
    both = "aten.sum.default", "aten.copy_.default"
    assert first(*looks, *both, of=Checks) == Divergence("", "aten.sum.default")
    assert first(*looks, *both, "aten.mul.Tensor", of=Checks) == Divergence("", "aten.sum.default")
