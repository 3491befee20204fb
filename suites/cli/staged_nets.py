"""A model whose stages can be counted by hand: a tied embedding, four linears, a residual around all, labels for the last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DIM, VOCAB, ROWS, LENGTH = 16, 32, 8, 6


class Net(nn.Module):
    """The loss is in it, so that the last stage reads labels of the batch."""

    def __init__(self, tied: bool, unread: bool) -> None:
        super().__init__()
        print("a factory that prints")
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if unread:
            self.spare = nn.Linear(2, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return nn.functional.cross_entropy(self.head(x + first).flatten(0, 1).float(), labels.flatten())


def build(tied: bool = True, unread: bool = False) -> Net:
    return Net(tied, unread)


def hooked() -> Net:
    """Reads its tokens once more behind its forward."""
    net = Net(tied=False, unread=False)
    net.register_forward_hook(lambda _, args, kwargs, output: output + kwargs["tokens"].float().mean(), with_kwargs=True)
    net.register_full_backward_hook(lambda *_: None)
    return net


def shared() -> Net:
    """The second of its layers is the third, too."""
    net = Net(tied=False, unread=False)
    net.layers[1] = net.layers[2] = nn.Sequential(nn.Linear(DIM, DIM))
    return net


def batch(rank: int, step: int) -> dict[str, Tensor]:
    drawn = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank))
    return {"tokens": drawn[0], "labels": drawn[1]}


class Uneven(nn.Module):
    """The second of four numbered modules takes far longer than the others, has no parameter, and counts no FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Sorts(), nn.Linear(8, 64), nn.Sequential(nn.Linear(64, 8))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.flatten()[0] * x.new_ones(2_000_000).cumsum(0).sort(descending=True).values.mean()


def uneven() -> Uneven:
    return Uneven()


def rows(rank: int, step: int) -> tuple[Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank)),)
