"""Models with a module that no tracer can follow; batches of 6 columns, as step_twins has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from suites.zoo.odd_modules import HandsOn

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


class Transforms(Chooses):
    """Gives complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(x))


class GivesNaN(Chooses):
    """Beside a tensor, as a number."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return super().forward(x), float("nan")


@dataclass
class Found(dict[str, Tensor]):
    """As models of transformers give: a dict that is read by attribute, too."""

    rows: Tensor
    doubled: Tensor

    def __post_init__(self) -> None:
        self |= {"rows": self.rows, "doubled": self.doubled}


class GivesFound(Chooses):
    """A dict that is a dataclass."""

    def forward(self, x: Tensor) -> Found:  # type: ignore[override]  # gives more than the class that it is made of
        found = super().forward(x)
        return Found(found, 2 * found)


class ReadsFound(Holds):
    """By attribute and by key."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.held(self.first(x))
        return self.last(found.rows + found["doubled"])


class TakesFirst(Holds):
    """Of what its module gives."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.held(self.first(x))[0])


class Turns(nn.Module):
    """Takes and gives complex numbers, and reads its parameter as such."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.view_as_complex(self.turn) * (1 if bool(x.abs().sum() > 0) else 2j)


class OnComplex(Holds):
    """What its module gives is multiplied by what it was given, complex both."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        given = x if isinstance(self.held, Transforms) else torch.fft.fft(x)
        return self.last((self.held(given) * given.tanh()).abs())


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


class ReadsTwice(nn.Module):
    """Its input's gradient is the sum of two."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x) * (1 if bool(x.sum() > 0) else 2) + self.high(x)


class Does(Chooses):
    """Gives what ``does(module, x, out)`` makes of what it chose; ``held`` are attributes."""

    def __init__(self, does: Callable[[Any, Tensor, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.does = does
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x, super().forward(x))


def forks(m: Any, x: Tensor, out: Tensor) -> Tensor:
    """Puts torch's generator back to where it was, while others draw from it."""
    with torch.random.fork_rng():
        return functional.dropout(out, 0.5)


def counts_when_above(m: Any, x: Tensor, out: Tensor) -> Tensor:
    """Keeps nothing before a call whose first number is above 0."""
    m.calls[0] += bool(x[0, 0] > 0)
    return out * (1 + m.calls[0])


def counts(m: Any, x: Tensor, out: Tensor) -> Tensor:
    m.calls += 1
    return out


def writes_input(m: Any, x: Tensor, out: Tensor) -> Tensor:
    x.add_(1)
    return out


class PastAttributes(Chooses):
    """Reads a parameter that it keeps in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.low.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(x, self.listed[0])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


DOES: dict[str, Callable[[], nn.Module]] = {
    "drops": lambda: Does(lambda m, x, out: functional.dropout(out, 0.5)),
    "draws of its own": lambda: Does(lambda m, x, out: out * (torch.rand(x.shape, generator=m.own) > 0.5), own=generator()),
    "forks": lambda: Does(forks),
    "remembers in a later call": lambda: Does(counts_when_above, calls=[0]),
    "remembers": lambda: Does(counts, calls=0),
    "writes a buffer": lambda: Does(counts, calls=nn.Buffer(torch.zeros(()))),
    "writes its input": lambda: Does(writes_input),
    "reads past an attribute": PastAttributes,
    "gives other strides": lambda: Does(lambda m, x, out: out.T.contiguous().T),
}


def scales(by: float) -> nn.Module:
    """Another computation by an attribute."""
    return Does(lambda m, x, out: out * m.by, by=by)


def doubles() -> nn.Module:
    """By a hook around it."""
    model = Chooses()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


def hands_on() -> nn.Module:
    return HandsOn(Chooses())


class Skips(Chooses):
    """Leaves out a linear that has no rows."""

    def forward(self, x: Tensor) -> Tensor:
        high = x.sum(1) >= 0
        return self.low(x) if not bool(high.any()) else self.low(x) + self.high(x)


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
    """As a plan's factory: :class:`Holds` of what ``kind`` names and makes."""
    return Holds(globals()[kind]())


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


def deep_pairs() -> nn.Module:
    """With two linears before each module that chooses, which can be parted."""
    model = Deep()
    for layer in model.layers:
        layer.insert(0, nn.Linear(WIDTH, WIDTH))
    return model


def batch(rank: int, step: int) -> tuple[Tensor]:
    """Eight rows of 6 columns, other for each rank and step."""
    return (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1_000 * step + rank)),)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


class OfColumns(Holds):
    """Gives the module rows that lie in memory column by column, as flattened images do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.held(self.first(x).t().contiguous().t()))


class OfImages(Holds):
    """Gives the module images of channels last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.first(x).view(len(x), WIDTH // 2, 1, 2).contiguous(memory_format=torch.channels_last)
        return self.last(self.held(images).reshape(len(x), WIDTH))
