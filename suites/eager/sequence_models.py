"""A block whose residual stream can be parted along the sequence: biases everywhere, and norms of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEAD = 16, 4


class Attention(nn.Module):
    """Heads of width 4, as many as the linears give, of which queries and keys are normed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one(x).unflatten(2, (-1, HEAD)) for one in (self.q, self.k, self.v))
        query, key, value = (one.transpose(1, 2) for one in (self.norm(query), self.norm(key), value))
        weights = (query @ key.transpose(2, 3)).softmax(-1)
        return self.o((weights @ value).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Tokens (batch, sequence) int64 to logits; ``tied``: head and second have one bias; ``short``: the MLP ends early."""

    def __init__(self, tied: bool, short: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.first, self.attention, self.second = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        if short:
            del self.mlp[2]
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.bias = self.second.bias

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x=self.first(x))
        x = x + self.mlp(self.second(x))
        return self.head(x)


def build(tied: bool = False, short: bool = False) -> nn.Module:
    return Net(tied, short)


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return (torch.randint(WIDTH, (4, 8), generator=generator),)


def batch_of_seven(rank: int, step: int) -> tuple[Tensor]:
    return (batch(rank, step)[0][:, :7],)


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[0].roll(-1, 1).flatten())
