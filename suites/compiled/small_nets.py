"""Small sharded models to compile, and the ways to shard and break them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fixtures.compiled.sharding import shard
from pytest_fxbucket.ranks import device

WIDTH, WORDS = 8, 16
PLAN = ["embed", "layers.0", "head"]
"""Of a net of one layer, which nets are unless they are to have more."""


class Block(nn.Module):
    """Three parameters, of which two are read in their own module; a graph break in the middle if asked for."""

    def __init__(self, width: int = WIDTH, breaks: bool = False) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(width, bias=False)
        self.mix = nn.Linear(width, width)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(self.scale(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x * 0.5


class Net(nn.Module):
    """Words (batch, length) to logits (batch, length, WORDS)."""

    def __init__(self, *, tied: bool = False, breaks: str = "", width: int = WIDTH, depth: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, breaks == "within") for _ in range(depth))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.breaks = breaks
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        if self.breaks == "between":  # not in the loop, where a graph break gives up the whole function
            torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        if self.breaks == "between":
            torch._dynamo.graph_break()
        out: Tensor = self.head(x)
        return out


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh(torch.device(device()).type, (ranks,), mesh_dim_names=("dp_shard",))


def net(ranks: int = 2, *, tied: bool = False, breaks: str = "", depth: int = 1, **sharding: Any) -> nn.Module:
    """A sharded net, the same on every rank but for the rows that it has."""
    torch.manual_seed(0)
    return shard(Net(tied=tied, breaks=breaks, depth=depth).to(device()), mesh_of(ranks), **sharding)


def net_of_dtensors(ranks: int = 2, width: int = WIDTH, depth: int = 1) -> nn.Module:
    """Sharded by DTensors that are replicated when they are read, as torchtitan does; ranks need not divide ``width``."""
    torch.manual_seed(0)
    made, mesh = Net(width=width, depth=depth), mesh_of(ranks)
    for module in list(made.modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            own_rows = distribute_tensor(
                parameter.detach(), mesh, [Shard(0)], src_data_rank=None
            )  # nothing travels: all have it
            module._parameters[name] = nn.Parameter(own_rows)
        if own:
            readers = {name: property(partial(_replicated, name)) for name in own}
            module.__class__ = type(type(module).__name__, (type(module),), readers)
    return made


def _replicated(name: str, module: nn.Module) -> Tensor:
    parameter: Any = module._parameters[name]
    full: Tensor = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    return full


def words(step: int = 0, batch: int = 3, rank: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (batch, 5), generator=torch.Generator().manual_seed(100 * step + rank), device="cpu").to(
        device()
    )


def loss_of(forward: Callable[..., Tensor], given: Tensor) -> Tensor:
    return F.cross_entropy(forward(given)[:, :-1].float().flatten(0, 1), given[:, 1:].flatten())


def step(forward: Callable[..., Tensor], batch: int = 3) -> None:
    loss_of(forward, words(batch=batch)).backward()
