"""Four linears, of which the last two are to be updated a call late."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def build() -> Stack:
    return Stack()


def batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)),)


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return output.square().mean()
