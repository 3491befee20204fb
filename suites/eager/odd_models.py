"""Models whose state, or whose names, are as those of few others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DIM = 8


class HandsOn(nn.Module):
    """Reads the mean of the step before the last; the buffer that is written first is the other one's new value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.now, self.before = nn.Buffer(torch.zeros(DIM)), nn.Buffer(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) + self.before
        self.before, self.now = self.now, x.detach().mean(0)
        return out


class Named(nn.Module):
    """Has a child by the name that wrappers give to what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.module = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(torch.tanh(self.linear(x)))
        return out


class Hooked(Named):
    """Halves one gradient, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.module.weight.register_hook(lambda gradient: gradient / 2)


def batch(rank: int, step: int) -> Tensor:
    """Rows (4, DIM)."""
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(output: Tensor, batch: Tensor) -> Tensor:
    """Of squares."""
    return output.square().mean()
