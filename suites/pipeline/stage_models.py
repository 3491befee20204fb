"""Small models, each with cuts and a batch: what a stage may have to receive, keep and give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM = 8


@dataclass(frozen=True)
class Split:
    """A model with the cuts that part it."""

    build: Callable[[], nn.Module]
    cuts: tuple[str, ...]
    batch: Callable[[], Any]


SPLITS: dict[str, Split] = {}


def rows() -> tuple[Tensor]:
    return (torch.randn(4, DIM),)


def split(*cuts: str, batch: Callable[[], Any] = rows) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(cls: type[nn.Module]) -> type[nn.Module]:
        SPLITS[cls.__name__] = Split(cls, cuts, batch)
        return cls

    return add


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, scale: float, mask: Tensor | None = None, *, flip: bool = False) -> dict[str, Any]:
        y = self.linear(x) * scale
        y = y if mask is None else y.masked_fill(mask, 0.0)
        return {"y": -y if flip else y, "x": x, "scale": scale, "nothing": None}


def masked() -> dict[str, Any]:
    """By name, in another order than the signature."""
    return {"flip": True, "mask": torch.rand(4, DIM) > 0.7, "scale": 1.5, "x": torch.randn(4, DIM)}


@split("first.linear", "first", "second.linear", batch=masked)
class Keywords(nn.Module):
    """Calls by keywords in another order; a dict is asked and indexed behind a cut; numbers, bools and None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x: Tensor, scale: float, mask: Tensor | None, other: Tensor | None = None, flip: bool = False) -> Any:
        first = self.first(flip=flip, mask=None, scale=scale, x=x)
        second = self.second(mask=mask, x=first["y"] + first.get("x", 0.0), scale=first.get("factor", 0.5))
        return second["y"] * first["scale"], first["y"].mean(), other


@split("layers.0", "layers.1")
class TiedThrice(nn.Module):
    """One weight in three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.layers[1].weight = self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass
class Given:
    """An output that pytree does not know."""

    loss: Tensor
    parts: Any
    count: int
    nothing: None = None


@split("layers.0", "layers.1", batch=lambda: (torch.randn(4, DIM), torch.randint(0, DIM, (4,))))
class Nested(nn.Module):
    """A dataclass with a dict of tuples; the last stage alone reads the labels; a parameter and the first value are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x: Tensor, labels: Tensor) -> Given:
        first = self.layers[0](x)
        last = self.layers[2](self.layers[1](first).relu())
        loss = nn.functional.cross_entropy(last, labels)
        return Given(loss, {"states": (first, [last, x]), "kind": "nested", "weight": self.layers[0].weight}, len(labels))


@split("layers.0", "layers.1", "layers.2", "layers.3", "layers.4")
class Skips(nn.Module):
    """Values of one shape that skip stages, and are told apart by what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(6)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:3]:
            x = layer(x).tanh()
            kept.append(x)
        for weight, layer in enumerate(self.layers[3:], 1):
            x = layer(x) * weight - kept.pop() / (weight + 1)
        return x


@split("spread", "one")
class Parts(nn.Module):
    """Several outputs, of which each stage reads some; transposed and expanded views cross."""

    def __init__(self) -> None:
        super().__init__()
        self.spread, self.one, self.two = nn.Linear(DIM, 4 * DIM), nn.Linear(4, 4), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c, _ = self.spread(x).chunk(4, -1)
        mean = c.mean(0, keepdim=True).expand(4, DIM)
        turned = self.one(a.t())
        return self.two(turned.t() + mean), b.sum() + mean.sum()


@split("layers.0", "same")
class Shared(nn.Module):
    """A tied weight, a layer of two names, a bias in a list, buffers, a plain tensor; and a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.layers[2].weight = self.layers[0].weight
        self.same = self.layers[1]
        self.listed = [self.layers[0].bias]
        self.register_buffer("scale", torch.rand(DIM))
        self.register_buffer("offset", torch.rand(DIM), persistent=False)
        self.table = torch.rand(DIM)
        self.unread = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.scale + self.offset) + self.table
        return x - self.listed[0]


@split(*(f"layers.{number}" for number in range(12)))
class Many(nn.Module):
    """More than ten stages: layers.1 is no part of layers.10. And a name that a stage has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(12)
        self.summary = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.summary(x)


SPLITS["Sequential"] = Split(
    lambda: nn.Sequential(
        nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(DIM, DIM), nn.Dropout(0.5)
    ),
    ("1", "4"),
    rows,
)


class Viewed(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y[:2]


@split("first", "second")
class Writes(nn.Module):
    """What crosses is written behind the cut, whole and in part, alone and with others, and so is what was a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Viewed(DIM, DIM), *linears(2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x, head = self.first(x)
        x += 1
        x[:, 0] = head.sum()
        own = x * 2
        torch._foreach_mul_([x, own], 3.0)
        own.add_(head.sum())
        y = self.second(head + own[:2])
        head.mul_(2.0)
        self.calls += 1
        return self.third(x).add_(y.sum()).relu_() * self.calls


@split("layers.0", "layers.1")
class WithoutGrad(nn.Module):
    """A target is computed without gradients, and read two stages later; a detached value crosses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layers[0].weight @ self.layers[2].weight
            self.mean.lerp_(x.mean(0), 0.1)
        y = self.layers[0](x - self.mean)
        z = self.layers[1](y.detach() + y)
        return self.layers[2](z @ target) + y.detach()


@split("lstm", batch=lambda: (torch.randn(3, 4, DIM),))
class Recurrent(nn.Module):
    """An LSTM has lists of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(DIM, DIM), nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, (last, _) = self.lstm(x)
        return self.head(states).sum() + last.sum()


@split("layers.0", "layers.1")
class Checkpointed(nn.Module):
    """Layers that eager mode computes again, with dropout in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


SPLITS["TransformerEncoder"] = Split(
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True), 3, nn.LayerNorm(DIM), enable_nested_tensor=False
    ),
    ("layers.0", "layers.1.norm1", "layers.2"),
    lambda: {"src": torch.randn(2, 5, DIM), "src_key_padding_mask": torch.arange(5).expand(2, 5) > 3},
)
