"""A model that runs its layers' parts in another order than it registers them: there the layouts of a bucket differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """Registers what it reads last first: a parameter of its own, which FSDP2 lays behind those of the children."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((dim,), 0.75))
        self.last, self.middle, self.first = (nn.Linear(dim, dim, bias=bias) for bias in (True, False, True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def build(dim: int = 16) -> nn.Module:
    """Rows (batch, dim) to rows."""
    return nn.Sequential(*(Layer(dim) for _ in range(2)))


class Tied(Layer):
    """A layer whose ``last`` has its weight, which it registers before its bias, under an earlier name, too."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gain = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.middle(torch.tanh(self.first(x @ self.gain)))))


def tied(dim: int = 16) -> nn.Module:
    """As :func:`build`, of layers that are tied."""
    return nn.Sequential(*(Tied(dim) for _ in range(2)))


def shared(dim: int = 16) -> nn.Module:
    """As :func:`build`, and a layer more that shares a weight with the first: FSDP2 has both layers with the root."""
    model = nn.Sequential(*(Layer(dim) for _ in range(3)))
    model[2].first.weight = model[0].first.weight  # type: ignore[union-attr,assignment]  # Module.__getattr__ is typed
    return model


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Two inputs of 4 rows, of which the second is what is wanted."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows, wanted = torch.randn(2, 4, 16, generator=generator)
    return rows, wanted


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of squares."""
    return (output.float() - batch[1]).square().mean()


def wide_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The same of 256 features."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows, wanted = torch.randn(2, 4, 256, generator=generator)
    return rows, wanted
