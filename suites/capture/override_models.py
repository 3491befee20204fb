"""Models with a module that no tracer can follow; batches of 6 columns, as step_twins has them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6


class Chooses(nn.Module):
    """Two linears, of which rows take the one that their sum decides on: rows are selected by their values."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        (low,), (high,) = torch.where(x.sum(1) < 0), torch.where(x.sum(1) >= 0)
        return out.index_add(0, low, self.low(x[low])).index_add(0, high, self.high(x[high]))


class Attends(nn.Module):
    """Several inputs, some by name, a buffer, several results of which one is no float and one no gradient comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, pair: tuple[Tensor, list[Any]], *, mask: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        other, (sign, _) = pair
        query, key, value = self.qkv(x).chunk(3, 1)
        weights = (query @ key.T * self.scale * sign).masked_fill(mask, -1e9)
        if bool(weights.max() > 1e6):  # what no trace can decide
            weights = weights * 0
        weights = weights.softmax(1)
        mixed = weights @ value + options["by"] * other
        return {"mixed": mixed, "best": weights.argmax(1), "rest": [weights.detach(), None, options["name"]]}


class AroundAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(WIDTH, WIDTH), Attends(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        found = self.attention(x, (x.tanh(), [1.0, None]), mask=mask, options={"by": 0.25, "name": "rope"})
        weights, _, _ = found["rest"]
        return self.last(found["mixed"] * weights.sum() + found["best"][:, None])


class Twice(nn.Module):
    """Two modules of one class, of which one is called twice, in a model that reads one of its parameters elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Chooses(), Chooses()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.two.low.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.one(self.one(x).tanh())))


class Holds(nn.Module):
    """One module, between linears."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.first, self.held, self.last = nn.Linear(WIDTH, WIDTH), held, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.held(self.first(x)))


class Sorts(nn.Module):
    """Has no parameters; rows above their median are doubled."""

    def forward(self, x: Tensor) -> Tensor:
        (rows,) = torch.where(x.sum(1) > x.sum(1).median())
        return x.index_add(0, rows, x[rows])


class Outside(Holds):
    """Reads what its module is given twice elsewhere, too; ``apart``: the module gets a view of it."""

    def __init__(self, held: nn.Module, apart: bool) -> None:
        super().__init__(held)
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.held(x.view_as(x) if self.apart else x) + x.sin() * 1e3)


class Ties(Chooses):
    """Its two linears have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.high.weight = self.low.weight


class Doubles(Chooses):
    """By a hook around it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * 2)


class ReadsTwice(nn.Module):
    """Its input's gradient is the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) * (1 if bool(x.sum() > 0) else 2) + self.high(x)


class Scales(Chooses):
    """Another computation by an attribute."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.by


class Drops(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5)


class DrawsItsOwn(Chooses):
    """From a generator that only it has."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.rand(x.shape, generator=self.generator) > 0.5)


class DrawsLater(Chooses):
    """Python's random numbers, in a call whose first number is above 0."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * (1 + random.random()) if bool(x[0, 0] > 0) else out


class Forks(Chooses):
    """Puts torch's generator back to where it was, while others draw from it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return functional.dropout(super().forward(x), 0.5)


class Permutes(Chooses):
    """Gives the same numbers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[torch.randperm(len(x), generator=self.generator)]


class RemembersLater(Chooses):
    """Keeps nothing before a call whose first number is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += bool(x[0, 0] > 0)
        return super().forward(x) * (1 + self.calls[0])


class Counts(Chooses):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class WritesInput(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        x.add_(1)
        return out


class Remembers(Chooses):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Transposes(Chooses):
    """Gives other strides than its input has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).T.contiguous().T


class Skips(Chooses):
    """Leaves out a linear that has no rows."""

    def forward(self, x: Tensor) -> Tensor:
        high = x.sum(1) >= 0
        return self.low(x) if not bool(high.any()) else self.low(x) + self.high(x)


class PastAttributes(Chooses):
    """Reads a parameter that it keeps in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.low.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(x, self.listed[0])


class Idles(nn.Module):
    """Has a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.held = nn.Linear(WIDTH, 3), Chooses()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


class Raises(nn.Module):
    """Calls its module, and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Chooses()

    def forward(self, x: Tensor) -> Tensor:
        self.held(x)
        raise LookupError("lost")


def holds(kind: str = "Chooses") -> nn.Module:
    """As a plan's factory: :class:`Holds` of the class named ``kind``."""
    return Holds(globals()[kind]())


def around_attention() -> nn.Module:
    return AroundAttention()


def twice() -> nn.Module:
    return Twice()


class Deep(nn.Module):
    """Layers, each with a module that chooses, and a linear of its own to be parted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Chooses()) for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def deep() -> nn.Module:
    return Deep()


def deep_pairs() -> nn.Module:
    """With two linears before each module that chooses, which can be parted."""
    model = Deep()
    for layer in model.layers:
        layer.insert(0, nn.Linear(WIDTH, WIDTH))
    return model


def idles() -> nn.Module:
    return Idles()


def batch(rank: int, step: int) -> tuple[Tensor]:
    """Eight rows of 6 columns, other for each rank and step."""
    return (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1_000 * step + rank)),)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()
