"""Modules as people write them: they read, cast, permute and hold tensors in ways of their own."""

from __future__ import annotations

from typing import Any

import torch
from capture_models import WIDTH, batch, loss
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["batch", "loss"]


class Casts(nn.Module):
    """Reads its weights in another dtype than they are gathered in: by a cast, by autocast, and row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rows = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = F.linear(x.double(), self.second.weight.double()).to(x.dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(x).float()
        for row in self.rows:
            x = torch.tanh(x @ row)
        return x


def casts() -> nn.Module:
    return Casts()


class Heads(nn.Module):
    """Weights of heads, which einsum permutes before it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(WIDTH, 4, 2))
        self.out = nn.Parameter(torch.randn(4, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhd,hdm->bm", torch.einsum("bm,mhd->bhd", x, self.inner).tanh(), self.out)


class Summed(nn.Module):
    """Sums the dimension that its weight is sharded on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + torch.einsum("mhd->d", self.weight))


class Joined(nn.Module):
    """Two projections as one product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.query.weight, self.key.weight])
        query, key = F.linear(x, weight, torch.cat([self.query.bias, self.key.bias])).chunk(2, -1)
        return torch.tanh(query * key)


class Cross(nn.Module):
    """Cross-attention, which takes one weight apart for queries and for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        other = x[:2].sin()
        return x + self.attention(x, other, other)[0]


class Penalised(nn.Module):
    """Adds the squared gradient of its output by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = self.layers(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + gradient.square().sum()


def by_own_orders() -> nn.Module:
    return nn.Sequential(Heads(), Summed(), Joined(), Cross(), Penalised())


class Scaled(torch.autograd.Function):
    """Multiplies by a weight, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Reads(nn.Module):
    """Reads its parameters in every way but as attributes of the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other, self.penalised = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 1), nn.Parameter(torch.rand(WIDTH))
        self.listed = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.rand(WIDTH))})
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.kept = [self.scale, self.shift]

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.inner.weight, self.inner.bias)
        halved = {name: parameter / 2 for name, parameter in self.other.named_parameters()}
        x = torch.tanh(torch.func.functional_call(self.other, halved, (x,)))
        x = torch.func.functional_call(self.other, dict(self.other.named_parameters()), (x,))
        x = Scaled.apply(x, self.kept[0]) + self.kept[1]
        x = x * sum(self.listed) * sum(self.named.values())
        x = self.recurrent(x[None])[0][0]
        return x + sum(parameter.square().sum() for parameter in self.penalised.parameters()) / 100


def reads() -> nn.Module:
    return Reads()
