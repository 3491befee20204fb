"""Small models of the passes suite, imported by name as a plan's are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Stack(nn.Module):
    """Layers whose inputs and weights backward reads."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Late(nn.Module):
    """Registers `first` before `second`, and reads them the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(torch.tanh(self.second(x)))
        return out


class ToFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class ToHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def linears() -> nn.Module:
    return Stack(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def late() -> nn.Module:
    return Stack(Late(), Late(), Late())


def normed() -> nn.Module:
    return Stack(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)))


def batch_normed() -> nn.Module:
    return Stack(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)))


def uneven() -> nn.Module:
    return Stack(*(nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)) for _ in range(3)))


def twice() -> nn.Module:
    """One layer between two calls of another."""
    again = nn.Linear(WIDTH, WIDTH)
    return Stack(again, nn.Linear(WIDTH, WIDTH), again)


class AsWeight(nn.Linear):
    """Computes in the dtype that its weight has, whatever the plan makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def two_dtypes() -> nn.Module:
    mixed = nn.Sequential(ToHalf(), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), ToFloat(), AsWeight(WIDTH, WIDTH))
    return Stack(mixed, nn.Linear(WIDTH, WIDTH))


def of_each_kind() -> nn.Module:
    """One layer of each kind above, the first called twice, and one whose numbers are dropped at random."""
    again, mixed = nn.Linear(WIDTH, WIDTH), two_dtypes().layers[0]
    uneven_and_dropped = nn.Sequential(nn.Linear(WIDTH, 5), nn.Dropout(0.5), nn.Linear(5, WIDTH))
    normal = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return Stack(again, Late(), again, uneven_and_dropped, normal, mixed)


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return (torch.randn(4, WIDTH, generator=generator),)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()
