"""Models that a view is taken of, and the graphs that tracers make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph

WIDTH = 4
PLANS = Path(__file__).resolve().parents[2] / "fixtures" / "plans"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(this, x: Tensor) -> Tensor:
        return this.wo(torch.tanh(this.wq(x)))


class Block(nn.Module):
    """A ModuleDict, which nobody calls, an operator of several results, and a residual around each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "a-b": nn.Linear(WIDTH, WIDTH)})
        self.norm = nn.LayerNorm(WIDTH)

    def forward(this, x: Tensor) -> Tensor:
        x = x + this.attention(this.norm(x))
        return x + this.mlp["a-b"](this.mlp["up"](x).relu())


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(this, x: Tensor) -> Tensor:
        x = this.embed(x) * this.scale
        for layer in this.layers:
            x = layer(x)
        return x


class Wrapper(nn.Module):
    def __init__(self, wrapped: Any) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(s, x: Tensor) -> Tensor:
        return s.wrapped(x)


class Twice(nn.Module):
    """One layer that is called on both sides of another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Attention()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.other(self.shared(x)))


def checkpointed(net: Any) -> Any:
    """``net``, whose first layer is computed again in backward."""
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    return net


def ones() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def dynamo(model: Any, *args: Any, behind: Callable[[Any], Any] = lambda backend: backend) -> fx.GraphModule:
    """The graph that a backend of ``torch.compile`` is given, or a compiler ``behind`` what makes a backend of it."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=behind(keep), fullgraph=True)(*args)
    (gm,) = graphs
    return gm


def aot(model: Any, *args: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of AOTAutograd behind dynamo."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(*args).sum().backward()
    forward, backward = graphs
    return forward, backward


def annotated() -> fx.GraphModule:
    """What make_fx traces of a function that annotates what it does."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        with traceback.annotate({"module_fqn": "layers.0.attention"}):
            x = torch.tanh(x @ w)
        with traceback.annotate({"module_path": "head"}):
            return x.sum()

    with traceback.preserve_node_meta():
        return make_fx(step)(ones(), torch.ones(WIDTH, WIDTH))


@functools.cache
def cached_aot() -> tuple[fx.GraphModule, fx.GraphModule]:
    """Read it only."""
    return aot(Wrapper(Net()), ones())


@functools.cache
def captured() -> StepGraph:
    """The step of fixtures/plans/llama.toml, of two layers, as this package captures it; read it only."""
    plan = load_plans(PLANS / "llama.toml")[0]
    assert plan.model is not None
    smaller = replace(plan, model=replace(plan.model, args={"layers": 2, "dim": 64}))
    return capture_plan(smaller, shard_mesh(4), 0)
