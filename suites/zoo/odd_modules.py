"""What odd modules have in common: a few plain blocks, and a forward that is a function of the module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from suites.zoo.draws import mean_square, vectors
from suites.zoo.shelf import Draw, Loss, Shelf

DIM = 16
rows = vectors(4, DIM)
sequence = vectors(2, 6, DIM)


class Block(nn.Module):
    """Linear, activation, residual."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x)))


def stack(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


class HandsOn(nn.Module):
    """Wraps a module; attributes that are set are that one's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.add_module("inner", inner)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


Held = Callable[[], dict[str, Any]]


class Odd(nn.Module):
    """Two ``blocks``, and what ``held`` makes besides; ``call`` is its forward."""

    def __init__(self, call: Callable[..., Any], held: Held) -> None:
        super().__init__()
        self.blocks, self.call = stack(), call
        for name, value in held().items():
            setattr(self, name, value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.call(self, *inputs, **named)


def below_another(call: Callable[..., Any], held: Held) -> nn.Module:
    return nn.Sequential(Block(), Odd(call, held))


class OddShelf(Shelf):
    """Odd modules, each a function ``(module, *inputs)`` whose name is the model's."""

    def __init__(self, module: str) -> None:
        super().__init__("odd", module)

    def put(self, name: str, call: Callable[..., Any], held: Held = dict, draw: Draw = rows, **rest: Any) -> None:
        """Put a module on the shelf; its loss is the mean square unless ``loss`` is another.

        With ``below`` it is module 1 of a model that does nothing odd itself.
        """
        loss: Loss | None = rest.pop("loss", mean_square)
        build = partial(below_another if rest.pop("below", False) else Odd, call, held)
        self.add(name, build, draw, loss, **rest)

    def odd(self, held: Held = dict, draw: Draw = rows, **rest: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Put the decorated forward on the shelf."""

        def put(call: Callable[..., Any]) -> Callable[..., Any]:
            self.put(call.__name__, call, held, draw, **rest)
            return call

        return put
