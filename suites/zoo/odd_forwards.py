"""Odd but ordinary modules: what forward reads, decides, keeps, takes and gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from suites.zoo.draws import mean_square, tokens, vectors
from suites.zoo.odd_modules import DIM, Block, OddShelf, rows, sequence, stack

SHELF = OddShelf(__name__)


def table(first: float = 0.5, **more: Any) -> Tensor:
    return torch.linspace(first, first + 1, DIM, **more)


@SHELF.odd(lambda: {"mean": nn.Buffer(torch.zeros(DIM))})
def replaced_buffer(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().float().mean(0)
    return m.blocks(x - m.mean.to(x.dtype))


OTHER_SHAPE = (
    r"^buffer mean, \[1, 16\] in torch\.float32, is replaced in forward by one of \[4, 16\] in torch\.float32; only its values "
    r"may change, since one graph serves all steps$"
)


@SHELF.odd(lambda: {"mean": nn.Buffer(torch.zeros(1, DIM))}, refused={"": OTHER_SHAPE})
def growing_buffer(m: Any, x: Tensor) -> Tensor:
    m.mean = (0.9 * m.mean + 0.1 * x.detach().float().mean(0)).expand(4, DIM)
    return m.blocks(x - m.mean.to(x.dtype))


TABLE = table()


class Global(nn.Module):
    """A tensor of the file that has the module's class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * TABLE


SHELF.add("tensor_global", Global, rows, mean_square)


@SHELF.odd(lambda: {"scale": table(), "tables": {"a": [table(2.0)]}}, below=True)
def tensor_attribute(m: Any, x: Tensor) -> Tensor:
    """Tensors that are neither parameter nor buffer."""
    return m.blocks(x) * m.scale * m.tables["a"][0]


TRAINED = (
    r"^1\.tables\['a'\]\[0\] requires grad and is used in forward, but is no parameter of the model; make it one "
    r"\(torch\.nn\.Parameter, in an attribute of its module\), or detach it$"
)
WRITTEN = (
    r"^1\.scale is written in place in forward \(aten\.add_\.Tensor\), so the next step would need it, but it is no buffer; "
    "register it with register_buffer$"
)


@SHELF.odd(lambda: {"tables": {"a": [table(requires_grad=True)]}}, below=True, refused={"": TRAINED})
def trained_attribute(m: Any, x: Tensor) -> Tensor:
    return m.blocks(x) * m.tables["a"][0]


@SHELF.odd(lambda: {"scale": table()}, below=True, refused={"": WRITTEN})
def written_attribute(m: Any, x: Tensor) -> Tensor:
    m.scale.add_(1)
    return m.blocks(x) * m.scale


@torch.compile(backend="eager")
def doubled(x: Tensor) -> Tensor:
    return x * 2


def compiled() -> nn.Module:
    first = Block()
    first.compile(backend="eager")
    return nn.Sequential(first, torch.compile(Block(), backend="eager"), Block())


SHELF.add("compiled_submodule", compiled, rows, mean_square)


@SHELF.odd()
def compiled_function(m: Any, x: Tensor) -> Tensor:
    return doubled(m.blocks(x))


@SHELF.odd()
def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.blocks(x)


@SHELF.odd(lambda: {"router": nn.Linear(DIM, 4, bias=False)})
def weight_in_float(m: Any, x: Tensor) -> Tensor:
    """Computes with its weight in other dtypes, as routers do."""
    x = m.blocks(x)
    logits = F.linear(x.double(), m.router.weight.double()).float() + F.linear(x.float(), m.router.weight.float())
    return logits.softmax(-1)


@SHELF.odd()
def float_between_units(m: Any, x: Tensor) -> Tensor:
    """Hands float32 from one block to the next whatever the parameters are."""
    for layer in m.blocks:
        x = layer(x).float() * 1.5
    return x


def crossing(memory: int) -> dict[str, Any]:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 6, DIM, generator=generator), torch.randn(2, 5, memory, generator=generator)

    def held() -> dict[str, Any]:
        return {"attention": nn.MultiheadAttention(DIM, 4, batch_first=True, kdim=memory, vdim=memory)}

    return {"held": held, "draw": draw}


def cross_attention(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    """By nn.MultiheadAttention, which takes one weight apart where memory is as wide as what asks."""
    x = m.blocks(x)
    return x + m.attention(x, memory, memory)[0]


SHELF.put("cross_attention", cross_attention, **crossing(DIM))
SHELF.put("cross_attention_kdim", cross_attention, **crossing(8))


@SHELF.odd(lambda: {"gate": nn.Linear(DIM, 2)}, vectors(12, DIM), refused={"": r"aten\.nonzero\.default gives depends"})
def loop_over_experts(m: Any, x: Tensor) -> Tensor:
    """Asks each expert for its tokens."""
    chosen, out = m.gate(x).argmax(-1), torch.zeros_like(x)
    for number, expert in enumerate(m.blocks):
        mine = (chosen == number).nonzero().squeeze(-1)
        out = out.index_add(0, mine, expert(x[mine]))
    return out + m.gate(x).mean()


@SHELF.odd(refused={"": "value of a tensor"})
def early_exit(m: Any, x: Tensor) -> Tensor:
    """Stops when a value is small."""
    for layer in m.blocks:
        x = layer(x)
        if x.abs().mean() > 100:
            break
    return x


@SHELF.odd(below=True, refused={"": "^module 1 draws from Python's random generator in forward"})
def python_random(m: Any, x: Tensor) -> Tensor:
    """Leaves layers out by Python's random numbers."""
    for layer in m.blocks:
        if random.random() < 0.9:
            x = layer(x)
    return x


@SHELF.odd(lambda: {"generator": random.Random(7)}, refused={"": "attribute generator of the root module"})
def own_random(m: Any, x: Tensor) -> Tensor:
    return m.blocks(x if m.generator.random() < 0.999 else x * 2)


@SHELF.odd(refused={"": r"the step calls torch\.manual_seed"})
def seeds(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(m.blocks(x), 0.5)


@SHELF.odd(lambda: {"calls": 0}, refused={"": "attribute calls of the root module"})
def python_counter(m: Any, x: Tensor) -> Tensor:
    """Anneals by a counter in Python, late."""
    m.calls += 1
    return m.blocks(x) * (2 if m.calls % 100 == 0 else 1)


@SHELF.odd(lambda: {"last": None}, below=True, refused={"": "attribute last of module 1"})
def remembers(m: Any, x: Tensor) -> Tensor:
    before, m.last = m.last, x
    return m.blocks(x if before is None else x + before.detach())


@SHELF.odd(lambda: {"is_warm": False}, refused={"": "attribute is_warm of the root module"})
def warms(m: Any, x: Tensor) -> Tensor:
    """Another step the first time."""
    scale, m.is_warm = 1.0 if m.is_warm else 0.5, True
    return m.blocks(x * scale)


@SHELF.odd(lambda: {"longest": 0, "seen": None})
def caches(m: Any, x: Tensor) -> Tensor:
    """What it sets changes nothing."""
    m.longest, m.seen = max(m.longest, x.shape[0]), x.detach()
    return m.blocks(x)


@SHELF.odd(lambda: {"rates": torch.linspace(0, 0.3, 2).tolist()})
def drop_path(m: Any, x: Tensor) -> Tensor:
    """Stochastic depth with rates of a linspace."""
    for layer, rate in zip(m.blocks, m.rates, strict=True):
        keep = torch.rand(x.shape[0], 1) >= rate
        x = x + (layer(x) - x) * keep.to(x.dtype) / (1 - rate)
    return x


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, *, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        out = self.blocks(x) * scale
        return out if mask is None else out.masked_fill(mask, 0.0)


SHELF.add(
    "keywords_only",
    KeywordsOnly,
    lambda g: {"x": torch.randn(4, DIM, generator=g), "scale": 2.0, "mask": torch.rand(4, DIM, generator=g) < 0.2},
    mean_square,
)


@dataclass
class Given:
    loss: Tensor
    logits: Tensor


def gives(kind: str, m: Any, x: Tensor) -> Any:
    logits = m.blocks(x)
    loss = logits.float().square().mean()
    return {"tuple": (loss, logits), "dict": {"loss": loss, "logits": logits}, "dataclass": Given(loss, logits)}[kind]


for kind in ("dict", "dataclass", "tuple"):
    SHELF.put(f"output_{kind}", partial(gives, kind), loss=None)


def nested(generator: torch.Generator) -> dict[str, Any]:
    dense, more, target = torch.randn(3, 4, DIM, generator=generator)
    return {"features": {"dense": dense, "more": [more]}, "targets": (target,)}


@SHELF.odd(draw=nested, loss=None)
def nested_batch(m: Any, features: Any, targets: Any) -> Tensor:
    return F.mse_loss(m.blocks(features["dense"] + features["more"][0]).float(), targets[0].float())


class Labelled(nn.Module):
    """Takes inputs; the loss takes the targets that come beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = stack(), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def against_target(output: Tensor, target: Any) -> Tensor:
    return F.cross_entropy(output.float(), target)


def labelled(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, DIM, generator=generator), tokens(generator, 4, high=5)


def labelled_by_name(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    x, target = labelled(generator)
    return {"x": x}, target


BY_NAME = {"model": {"inputs": ["0.*"]}, "step": {"microbatches": 2}}
SHELF.add("labels_beside", Labelled, labelled, against_target, targets=True)
SHELF.add("labels_microbatches", Labelled, labelled_by_name, against_target, targets=True, tables=BY_NAME)


@SHELF.odd(lambda: {"positions": nn.Embedding(16, DIM)}, sequence)
def position_slice(m: Any, x: Tensor) -> Tensor:
    """Reads rows of an embedding by slice, and writes logits in place."""
    out = m.blocks(x + m.positions.weight[: x.shape[1]])
    out[..., 0] = 0.0
    return out
