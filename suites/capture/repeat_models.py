"""Deep models whose layers repeat, and models that only look so."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

WIDTH = 6
calls = 0


def batch() -> tuple[Tensor]:
    return (torch.ones(4, WIDTH),)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


class Block(nn.Module):
    """LayerNorm and biases, as GPT has them."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two projections, each called with the output of the one before."""

    def __init__(self, n: int, make: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make(i) for i in range(n))
        self.last = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.through(self.first(x)))

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# Layers that repeat.


class Counting(Block):
    """Buffers: one written in place, one read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("gain", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean) * self.gain


class Wasteful(Block):
    """A parameter that forward does not read, and results that nobody reads."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x.sin()
        return super().forward(x)


class Shares(Stack):
    """All layers get a learned bias, whose gradient is summed over layers, and hand a mask through."""

    def __init__(self, n: int) -> None:
        super().__init__(n, lambda i: Biased(i))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def through(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH, WIDTH).triu()
        for layer in self.layers:
            x, mask = layer(x, self.bias * 2, mask=mask)
        return x


class SharesOnce(Shares):
    """As Shares, but what layers share is computed once."""

    def through(self, x: Tensor) -> Tensor:
        mask, bias = torch.ones(WIDTH, WIDTH).triu(), self.bias * 2
        for layer in self.layers:
            x, mask = layer(x, bias, mask=mask)
        return x


class Biased(Block):
    def forward(self, x: Tensor, bias: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + bias + mask[0]), mask


class Residual(Stack):
    """The parent adds between its layers."""

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def first_frozen(n: int) -> nn.Module:
    model = Stack(n)
    model.layers[0].requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


def wider_inside(n: int) -> nn.Module:
    """Layers before and behind the ones that are alike."""
    return Stack(n + 3, lambda i: Windowed(i, 2) if i in (1, n + 2) else Block(i))


def sequential(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(i) for i in range(n)), nn.Linear(WIDTH, 2))


class Keyed(Stack):
    """Layers in a ModuleDict, as torchtitan has them."""

    def __init__(self, n: int) -> None:
        super().__init__(0)
        self.layers = nn.ModuleDict({str(i): Block(i) for i in range(n)})

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Windowed(Block):
    def __init__(self, number: int, window: int | None) -> None:
        super().__init__(number)
        self.window = window
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.extra(x)
        return super().forward(x if self.window is None else x + x.narrow(1, 0, self.window).sum(1, keepdim=True))


def every_second(n: int) -> nn.Module:
    return Stack(n, lambda i: Windowed(i, 3 if i % 2 else None))


# Layers that do not.


class Growing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class Late(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin() if self.number == 9 else super().forward(x)


class Literal(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([0.5] * WIDTH)


class Config:
    def __init__(self) -> None:
        self.seen = {"calls": 0}


class CountsInConfig(Block):
    def __init__(self, number: int, config: Config) -> None:
        super().__init__(number)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        self.config.seen["calls"] += 1
        return super().forward(x).sin() if self.config.seen["calls"] % 9 == 0 else super().forward(x)


def counts_in_config(n: int) -> nn.Module:
    config = Config()
    return Stack(n, lambda i: CountsInConfig(i, config))


class CountsInModule(Block):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return super().forward(x)


class CountsInClass(Block):
    made = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).mro()[-1 - len(nn.Module.mro()) - 1].made += 1
        return super().forward(x)


class Drops(Stack):
    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 2:
                x = layer(x)
        return x


class Taps(Stack):
    """Layer 8 alone is changed by the parent."""

    def through(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).sin() if i == 8 else layer(x)
        return x


class TapsLater(Stack):
    """What layer 4 gave is read behind the layers."""

    def through(self, x: Tensor) -> Tensor:
        kept = x
        for i, layer in enumerate(self.layers):
            x = layer(x)
            kept = x if i == 4 else kept
        return x + kept


class Stacks(Stack):
    def through(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return torch.stack(kept).sum(0)


class Scales(Stack):
    """Each layer gets a number of its own."""

    def __init__(self, n: int) -> None:
        super().__init__(n, Scaled)

    def through(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, 1.0 if i < 8 else 2.0)
        return x


class Scaled(Block):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


class Skips(Stack):
    """Each layer reads the two before it."""

    def through(self, x: Tensor) -> Tensor:
        before = x
        for layer in self.layers:
            x, before = layer(x) + before, x
        return x


class Twice(Stack):
    def through(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(layer(x)) if i == 7 else layer(x)
        return x


class Backwards(Stack):
    def through(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class LeavesOut(Stack):
    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


class Counts(Stack):
    """Divides by how many layers there are."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(x) / len(self.layers)


class CountsInside(Stack):
    """Its layers divide by how many there are."""

    def __init__(self, n: int) -> None:
        super().__init__(n, lambda _: Knowing(self))


class Knowing(Block):
    def __init__(self, parent: CountsInside) -> None:
        super().__init__()
        self.parent = [parent]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(self.parent[0].layers)


class ByNumber(Stack):
    """Knows how many layers it had when it was made."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n

    def through(self, x: Tensor) -> Tensor:
        for i in range(self.n):
            x = self.layers[i](x)
        return x


class PastTheLayer(Stack):
    """The parent reads a child of layer 9 by itself."""

    def through(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 9:
                x = layer.norm(x)
        return x


def tied(n: int) -> nn.Module:
    model = Stack(n)
    model.layers[8].up.weight = model.layers[3].up.weight
    return model


def tied_to_the_head(n: int) -> nn.Module:
    model = Stack(n)
    model.first.bias = model.layers[8].down.bias
    return model


def shared_module(n: int) -> nn.Module:
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    model = Stack(n)
    for layer in model.layers:
        layer.norm = norm
    return model


def hooked(n: int) -> nn.Module:
    model = Stack(n)
    model.layers[5].register_forward_hook(lambda module, args, output: output.sin())
    return model


def own_forward(n: int) -> nn.Module:
    model = Stack(n)
    plain = model.layers[5].forward
    model.layers[5].forward = lambda x: plain(x).sin()
    return model


def asks_a_value(n: int) -> nn.Module:
    return Stack(n, lambda i: Asking(i))


class Asking(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


# Layers that know their number from elsewhere: layer 8 alone is another one.

ODD = 8
running = 0
RUNNING: ContextVar[int] = ContextVar("RUNNING", default=0)


class Knows(Block):
    """Three times as large in layer 8; says in what way it knows which one it is."""

    def __init__(self, number: int, number_of: Callable[[Any], int]) -> None:
        super().__init__(number)
        self.number_of = number_of

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if self.number_of(self) == ODD else 1.0)


class Tells(Stack):
    """The parent tells which layer runs, and takes it back."""

    def __init__(self, n: int, number_of: Callable[[Any], int], tell: Callable[[int], object]) -> None:
        super().__init__(n, lambda i: Knows(i, number_of))
        self.tell = tell

    def through(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            self.tell(i)
            x = layer(x)
        self.tell(0)
        return x


def _tell_all(number: int) -> None:
    global running
    running = number


def told_by_a_variable(n: int) -> nn.Module:
    return Tells(n, lambda _: running, _tell_all)


def told_by_a_context(n: int) -> nn.Module:
    return Tells(n, lambda _: RUNNING.get(), RUNNING.set)


def told_by_a_config(n: int) -> nn.Module:
    config = SimpleNamespace(at=0)
    return Tells(n, lambda _: config.at, partial(setattr, config, "at"))


def _number_in_dict(layer: nn.Module) -> int:
    return layer.__dict__["number"]


def _number_in_vars(layer: nn.Module) -> int:
    return vars(layer)["number"]


def reads_its_dict(n: int) -> nn.Module:
    return Stack(n, lambda i: Knows(i, _number_in_dict))


def reads_its_vars(n: int) -> nn.Module:
    return Stack(n, lambda i: Knows(i, _number_in_vars))


def in_a_registry(n: int) -> nn.Module:
    numbers: dict[int, int] = {}
    model = Stack(n, partial(Knows, number_of=lambda layer: numbers[id(layer)]))
    numbers.update((id(layer), i) for i, layer in enumerate(model.layers))
    return model


def in_a_weak_registry(n: int) -> nn.Module:
    numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
    model = Stack(n, partial(Knows, number_of=lambda layer: numbers[layer]))
    numbers.update((layer, i) for i, layer in enumerate(model.layers))
    return model


def on_a_buffer(n: int) -> nn.Module:
    model = Stack(n, partial(Knows, number_of=lambda layer: layer.one.number))
    for i, layer in enumerate(model.layers):
        layer.register_buffer("one", torch.ones(1))
        layer.one.number = i
    return model


class Mute(Block):
    """Without a gradient in layer 8: the same operators forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(vars(self)["number"] != ODD):
            added = self.up(self.norm(x))
        return x + self.down(added)


class Stops(torch.autograd.Function):
    """Hands its input on; in layer 8 the gradient is three times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Any) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (3.0 if ctx.number[0] == ODD else 1.0), None


class BackwardOnly(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Stops.apply(x, [vars(self)["number"]]))


class HooksTensor(Block):
    def forward(self, x: Tensor) -> Tensor:
        x, odd = super().forward(x), vars(self)["number"] == ODD
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * (3.0 if odd else 1.0))
        return x


class Sharply(Stops):
    """As every layer does it."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2.0, None


class OwnBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Sharply.apply(x, None))
