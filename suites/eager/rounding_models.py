"""Models that torch's own step rounds otherwise, by design, or cannot step; and what waits for ever in it alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Twice(nn.Module):
    """Calls a layer twice."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.first = times, nn.Linear(8, 8)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return self.head(x)


class ReadTwice(nn.Module):
    """Each call of its first unit reads a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Twice(2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


class Scaled(nn.Module):
    """Promotes what it is given to the dtype that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.3, 0.7, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class InLists(nn.Module):
    """Calls modules of a list in a dict, again and again, and adds up in float32."""

    def __init__(self, times: int) -> None:
        super().__init__()
        inner = nn.ModuleList([Scaled(), nn.Linear(8, 8)])
        self.times, self.first, self.held, self.head = times, nn.Linear(8, 8), nn.ModuleDict({"a": inner}), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        for _ in range(self.times):
            for module in self.held["a"].children():
                x = x + module(x).tanh().float()
        return self.head(x)


class Attending(nn.Module):
    """Reads a memory for keys and for values, or once; each is one product."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.reads = nn.ModuleList(nn.Linear(8, 8) for _ in range(reads))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for read in self.reads:
            x = x * read(memory).tanh()
        return x


class Decoded(nn.Module):
    """Layers that read what an encoder gives; ``reads`` says how often each of them does."""

    def __init__(self, reads: tuple[int, ...] = (2, 2)) -> None:
        super().__init__()
        self.encoder, self.layers = nn.Linear(8, 8), nn.ModuleList(map(Attending, reads))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoded(x)
        for layer in self.layers:
            x = layer(x, memory=memory)
        return x

    def encoded(self, x: Tensor) -> Tensor:
        made: Tensor = self.encoder(x)
        return made


class Learned(Decoded):
    """The memory is a parameter, which no unit has."""

    def __init__(self) -> None:
        super().__init__()
        del self.encoder
        self.memory = nn.Parameter(torch.linspace(-1, 1, 8))

    def encoded(self, x: Tensor) -> Tensor:
        return self.memory


@dataclass
class Pair:
    """What a layer is given."""

    x: Tensor
    memory: Tensor


class OfPair(Attending):
    """Is given a dataclass."""

    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]  # called as the model below calls it
        return super().forward(pair.x, pair.memory)


class InPairs(Decoded):
    """Values go to layers in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfPair(2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoded(x)
        for layer in self.layers:
            x = layer(Pair(x, memory))
        return x


class Mixing(nn.Module):
    """Reads three values, one product of each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Tensor = self.q(q) * self.k(k).tanh() * self.v(v).tanh()
        return made


class GivenThrice(Decoded):
    """A layer is given one value three times, and nobody else reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixing()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoded(x)
        made: Tensor = self.layers[0](x, x, x)
        return made


class ReadByLoss(Decoded):
    """The loss reads the memory, too, which the only layer reads twice."""

    def __init__(self) -> None:
        super().__init__((2,))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # the loss takes both
        memory = self.encoded(x)
        return self.layers[0](x, memory=memory), memory


class Parted(nn.Module):
    """An MLP with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Recurrent(nn.Module):
    """An LSTM between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Two(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))


class ReadByParent(Two):
    """Reads a parameter of a unit, and never calls the unit, which FSDP2 gathers when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.addmm(self.a.bias, x.flatten(0, 1), self.a.weight)).view_as(x)


class RaisesLater(Two):
    """Raises in the second step that it takes in a rank; where it is traced, it is called with no real tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if type(x) is Tensor and torch.distributed.get_backend() != "fake" and int(self.steps) > 1:
            raise ValueError("tired")
        return self.b(self.a(x))


class Doubled(nn.Linear):
    """A layer with a forward of its own: torch's are not compiled alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class CompiledPart(Two):
    """A part that torch.compile wraps, by a compiler that gives other bits."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Doubled(8, 8)
        self.a.compile(backend=lambda gm, _: lambda *args: [2 * out for out in gm(*args)])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Unused(Two):
    """A parameter that no forward reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Unread(Two):
    """A buffer and a layer that forward does not read, and a buffer that it does; ``late`` writes the first in ranks alone."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late, self.rest = late, nn.Linear(8, 3)
        self.b.register_buffer("factor", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.late and type(x) is Tensor and torch.distributed.get_backend() != "fake":
            self.steps.add_(1)
        return self.b(self.a(x)) * self.b.factor


class Waits(Two):
    """Waits for ever where it runs in a rank, and not where it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and torch.distributed.is_initialized() and torch.distributed.get_backend() != "fake":
            threading.Event().wait()
        return self.b(self.a(x))


def build(name: str, **args: int) -> nn.Module:
    model: nn.Module = globals()[name](**args)
    return model


def batch(rank: int, step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(100 * rank + step))}


def loss(output: Tensor | tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([(one - batch["x"]).square().mean() for one in outputs]).sum()
