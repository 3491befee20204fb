"""Random models with legal cuts, and plans that run them in pipeline stages; all from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.pipeline_schedules import SCHEDULES, fitting_ranks, microbatches_problem
from pytest_fxbucket.plan.schema import Plan

DIM, ROWS, CLASSES = 4, 12, 4
MOST_RANKS = 4
KINDS = ("one", "nested", "both", "wide", "half", "checkpointed")
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """What one block of a model is, and where its arguments come from."""

    kind: str
    """one, nested, both (two branches), wide (float64 inside), half (bfloat16), checkpointed."""
    skip: int | None
    """The block whose output it adds, besides that of the one before it."""
    reads: tuple[str, ...]
    """Of the batch."""
    scale: float | None
    flip: bool
    gives: str
    """tensor, tuple, dict."""
    tied: int | None
    """The block whose weight it shares."""
    is_frozen: bool
    has_bias: bool
    counts: bool
    """Whether it has a buffer of its own that it writes."""
    reads_shared: bool
    """Whether it reads the model's own buffer and parameter."""


def shapes_of(seed: int) -> list[Shape]:
    """The blocks of the model that ``seed`` gives; the first and the last are always trained."""
    chance = random.Random(seed)
    depth = chance.randint(2, 9)
    shapes: list[Shape] = []
    for number in range(depth):
        kind = chance.choice(("one", *KINDS))
        plain = [place for place, one in enumerate(shapes) if one.kind == "one"]
        tied = chance.choice(plain) if kind == "one" and plain and chance.random() < 0.3 else None
        inner = 0 < number < depth - 1
        shapes.append(
            Shape(
                kind,
                chance.randrange(number) if number and chance.random() < 0.5 else None,
                tuple(name for name in ("mask", "ids", "scales") if chance.random() < 0.25),
                chance.choice((None, 0.5, 2.0)),
                chance.random() < 0.3,
                chance.choice(("tensor", "tuple", "dict")),
                tied,
                inner and tied is None and chance.random() < 0.15,
                chance.random() < 0.7,
                kind != "checkpointed" and chance.random() < 0.2,
                chance.random() < 0.3,
            )
        )
    return shapes


class Wide(nn.Linear):
    """Computes in double precision, and gives single."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.weight.double(), None if self.bias is None else self.bias.double()).float()


class Half(nn.Linear):
    """Computes in half precision, and gives single."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class Both(nn.Module):
    """Two branches of one input."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM, bias), nn.Sequential(nn.Linear(DIM, DIM, bias), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = self.left(x)
        return left * torch.sigmoid(self.right(x))


def core_of(shape: Shape) -> nn.Module:
    if shape.kind == "nested":
        inner = nn.Sequential(nn.Linear(DIM, DIM, shape.has_bias), nn.GELU())
        return nn.Sequential(nn.LayerNorm(DIM), inner, nn.Linear(DIM, DIM))
    if shape.kind == "both":
        return Both(shape.has_bias)
    kinds: dict[str, type[nn.Linear]] = {"wide": Wide, "half": Half}
    return kinds.get(shape.kind, nn.Linear)(DIM, DIM, shape.has_bias)


class Block(nn.Module):
    """Takes tensors, None, bools and numbers, and gives a tensor, a tuple or a dict."""

    count: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.core = shape, core_of(shape)
        self.register_buffer("count", torch.zeros(()) if shape.counts else None)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        *,
        flip: bool,
        ids: Tensor | None = None,
        skip: Tensor | None = None,
        scales: Tensor | None = None,
        scale: float | None = 1.0,
    ) -> Any:
        y = checkpoint(self.core, x, use_reentrant=False) if self.shape.kind == "checkpointed" else self.core(x)
        y = y if skip is None else y + skip / 2
        y = y if mask is None else y.masked_fill(mask, 0.25)
        y = y if ids is None else y * (1 + ids.unsqueeze(-1) / 8)
        y = y if scales is None else y * scales.to(y.dtype)
        y = y if scale is None else y * scale
        y = -y if flip else y.tanh()
        if self.shape.counts:
            self.count += 1
        if self.shape.gives == "tensor":
            return y
        return (y, x, None) if self.shape.gives == "tuple" else {"y": y, "x": x, "nothing": None, "scale": scale}


class Model(nn.Module):
    """Blocks one after the other, each of which may read what any before gave; the loss is its output."""

    offset: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        shapes = shapes_of(seed)
        self.blocks = nn.ModuleList(map(Block, shapes))
        self.head = nn.Linear(DIM, CLASSES)
        for block, shape in zip(self.blocks, shapes, strict=True):
            if shape.tied is not None:
                block.core.weight = self.blocks[shape.tied].core.weight  # type: ignore[union-attr]  # a linear one, which has a weight
            if shape.is_frozen:
                block.requires_grad_(False)
        self.register_buffer("offset", torch.rand(DIM))
        self.gain = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        given, found = {"mask": mask, "ids": ids, "scales": scales}, list[Tensor]()
        for block in self.blocks:
            shape: Shape = block.shape  # type: ignore[assignment]  # of each block
            x = x * self.gain + self.offset if shape.reads_shared else x
            more: dict[str, Any] = {name: given[name] for name in shape.reads if name != "mask"}
            more |= {} if shape.skip is None else {"skip": found[shape.skip]}
            out = block(scale=shape.scale, flip=shape.flip, mask=mask if "mask" in shape.reads else None, x=x, **more)
            x = (
                out[0] + out[1] / 4
                if isinstance(out, tuple)
                else out["y"] + out.get("other", 0.0)
                if type(out) is dict
                else out
            )
            found.append(x)
        loss = nn.functional.cross_entropy(self.head(x).float(), ids)
        return loss + found[0].square().mean() + (self.gain * scales[0].float()).sum() / 8 + mask.float().mean()


def build(seed: int) -> Model:
    return Model(seed)


def batch(rank: int, step: int) -> Batch:
    """Floats, a mask, whole numbers, which are the labels as well, and half precision."""
    torch.manual_seed(100 * rank + step)
    shape = (ROWS, DIM)
    return torch.randn(shape), torch.rand(shape) > 0.8, torch.randint(0, CLASSES, (ROWS,)), torch.rand(shape).bfloat16()


def cuts_of(shapes: Sequence[Shape], chance: random.Random) -> list[str]:
    """One to seven cuts, in the order in which the model runs, some of them below a block."""
    most = min(len(shapes), 7)
    found = []
    for place in sorted(chance.sample(range(len(shapes)), chance.randint(1, most))):
        below = {"nested": ".core.1", "both": ".core.left"}.get(shapes[place].kind)
        # Below a block there must be trained parameters on either side of the cut.
        below = below if below and place and chance.random() < 0.4 else ""
        found.append(f"blocks.{place}{below}")
    return found


def plan_of(seed: int) -> Plan:
    """The plan that ``seed`` gives."""
    chance, shapes = random.Random(seed + 10**6), shapes_of(seed)
    while True:
        cuts = cuts_of(shapes, chance)
        schedule = chance.choice(list(SCHEDULES))
        ranks = [pp for pp in fitting_ranks(schedule, len(cuts) + 1) if 2 <= pp <= MOST_RANKS]
        pp = chance.choice(ranks) if ranks else 0
        fits = [count for count in (1, 2, 3, 4, 6, 12) if pp and not microbatches_problem(schedule, count, len(cuts) + 1, pp)]
        if fits:
            break
    data = chance.choice((1, 2)) if pp == 2 else 1
    optimizer = chance.choice(OPTIMIZERS) if chance.random() < 0.5 else ""
    # Clipping is refused where a stage has no trainable parameter.
    clips = bool(optimizer) and chance.random() < 0.5 and not any(shape.is_frozen for shape in shapes)
    text = f"""
[model]
factory = "suites.soak.random_models:build"
args = {{ seed = {seed} }}
batch = "suites.soak.random_models:batch"

[parallel]
pp = {pp}
dp_shard = {data}
{'reduce_dtype = "float32"' if chance.random() < 0.3 else ""}

[pipeline]
cuts = {cuts!r}
schedule = "{schedule}"

[step]
microbatches = {chance.choice(fits)}
{"clip_norm = 0.1" if clips else ""}

[bucket]
by = "size"
cap_mb = 0.001

[run]
backend = "gloo"
steps = 2
timeout_s = 120
{optimizer}
"""
    (plan,) = parse_plans(text, Path(__file__).with_name(f"random_{seed}.toml"))
    return plan


OPTIMIZERS = (
    '\n[optimizer]\nfactory = "torch.optim:AdamW"\nargs = { lr = 0.1 }\n',
    '\n[optimizer]\nfactory = "torch.optim:Adagrad"\nargs = { lr = 0.1 }\n',
)
