"""Small models for what stages of a plan can have, and cannot: each with three blocks, cut behind the first and the second."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DIM = 8


class Blocks(nn.Module):
    """The first block's output is read by the last one, too, which no stage between reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        out: Tensor = self.blocks[2](self.blocks[1](first)) * first
        return out


class Dropping(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].append(nn.Dropout(0.5))


class Writing(Blocks):
    """The last stage reads a buffer that the first one writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        out: Tensor = super().forward(x) * self.seen
        return out


class Early(Blocks):
    """Calls backward() itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x).sum().backward()
        return super().forward(x)


class Frozen(Blocks):
    """The second stage has no trainable parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Mixed(Blocks):
    """A bool mask, whole numbers, nothing at all, and a value that is transposed and one that is expanded, cross."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        mask, order, none = first > 0, first.argsort(-1), first[:, :0] * 2
        turned, wide = (first * 2).t(), (first.sum(0, keepdim=True) * 3).expand(x.shape[0], DIM)
        y = self.blocks[1](first).masked_fill(mask, 0.5)
        out: Tensor = self.blocks[2](y).gather(-1, order) + turned.t() * wide + none.sum()
        return out


class Normed(Blocks):
    """BatchNorm in each block, whose statistics forward writes; the batch of :func:`with_gaps` has gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.append(nn.BatchNorm1d(DIM))  # type: ignore[operator]  # a Sequential


def build(name: str) -> nn.Module:
    made: nn.Module = globals()[name]()
    return made


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    return (torch.randn(6, DIM, generator=generator),)


def with_gaps(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that cross to the last stage: both parts of wider tensors."""
    (x,) = batch(rank, step)
    wide = torch.cat([x, x], 1)
    return wide[:, :DIM], wide[:, 1 : DIM + 1]


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return output.square().mean()
