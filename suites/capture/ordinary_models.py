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
        self.kept = [self.scale, self.shift]

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.inner.weight, self.inner.bias)
        halved = {name: parameter / 2 for name, parameter in self.other.named_parameters()}
        x = torch.tanh(torch.func.functional_call(self.other, halved, (x,)))
        x = torch.func.functional_call(self.other, dict(self.other.named_parameters()), (x,))
        x = Scaled.apply(x, self.kept[0]) + self.kept[1]
        x = x * sum(self.listed) * sum(self.named.values())
        return x + sum(parameter.square().sum() for parameter in self.penalised.parameters()) / 100


def reads() -> nn.Module:
    return Reads()


class Averages(nn.Module):
    """Replaces its buffer by a new average of what it was given."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rows = rows
        self.register_buffer("average", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.average = (0.9 * self.average + 0.1 * x.detach().mean(0)).expand(self.rows, WIDTH)
        return x - self.average


def averages(rows: int = 1) -> nn.Module:
    return nn.Sequential(Averages(rows), nn.Linear(WIDTH, WIDTH))


class LogitScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.logit_scale.exp()


def logit_scale() -> nn.Module:
    return LogitScale()


class Looks(nn.Module):
    """Looks rows up with sparse gradients, by a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, WIDTH, sparse=True)
        self.bag = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        index = (x > 0).long().sum(-1) % 4
        return x + self.tokens(index) + F.embedding_bag(index[:, None], self.bag, mode="sum", sparse=True)


def looks() -> nn.Module:
    return nn.Sequential(Looks(), nn.Linear(WIDTH, WIDTH))


@torch.compile(backend="eager")
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(doubled(self.inner(x)))


def compiled() -> nn.Module:
    return nn.Sequential(Doubles(), torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"))


TABLE = torch.linspace(0, 1, WIDTH)


class Holds(nn.Module):
    """Reads tensors that are neither parameter nor buffer."""

    def __init__(self, trained: bool = False, written: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = torch.linspace(1, 2, WIDTH)
        self.tables = {"a": [torch.linspace(2, 3, WIDTH, requires_grad=trained)]}
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        if self.written:
            self.table.add_(1)
        return self.linear(x) * self.table * self.tables["a"][0] + TABLE


def holds(trained: bool = False, written: bool = False) -> nn.Module:
    return nn.Sequential(Holds(trained, written), nn.Linear(WIDTH, WIDTH))


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x.float()) * self.filter).real


def complex_filter() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Filter())


class ReadsEarly(nn.Module):
    """Reads a weight long before it computes anything of it, as DeBERTa its relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.weight
        for layer in self.layers:
            x = layer(x)
            x = x + x @ table
        return x


def reads_early() -> nn.Module:
    return ReadsEarly()


class Pooled(nn.Module):
    """Computes what its loss does not read, as BERT's pooler in a language model; joins a weight to an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pooler = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ torch.cat([self.layer.weight.t(), self.more]) + self.layer.bias
        assert self.pooler(x).shape == x.shape
        return x


def pooled() -> nn.Module:
    return Pooled()


class Zeroed(nn.Linear):
    """Without the middle of its bias, as attention without a bias for keys."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.clone()
        bias[2:4].zero_()
        return F.linear(x, self.weight, bias)


def zeroed() -> nn.Module:
    return nn.Sequential(Zeroed(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Depthwise(nn.Module):
    """A convolution between layers of rows: gradients of rows are looked at, those of its weights are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.before(torch.stack([x * number for number in range(6)], 1))
        rows = self.conv(rows.transpose(1, 2).view(-1, 4, 2, 3)).flatten(2).transpose(1, 2)
        return self.after(F.gelu(rows)).sum(1)


def depthwise() -> nn.Module:
    return nn.Sequential(Depthwise(), nn.Linear(WIDTH, WIDTH))


class Recurrent(nn.LSTM):
    """Its parameters lie in a list of its own besides."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[None])[0][0]


def recurrent() -> nn.Module:
    return nn.Sequential(Recurrent(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
