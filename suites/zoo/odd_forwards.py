"""Odd but ordinary modules: what forward does."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from suites.zoo.draws import mean_square, tokens, vectors
from suites.zoo.odd_parameters import DIM, Block, rows, stack
from suites.zoo.shelf import Shelf

SHELF = Shelf("odd", __name__)
sequence = vectors(2, 6, DIM)


class Replaced(nn.Module):
    """A buffer is replaced in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return self.blocks(x - self.mean.to(x.dtype))


SHELF.add("replaced_buffer", Replaced, rows, mean_square)


class Attribute(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = stack(), torch.linspace(0.5, 1.5, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


TABLE = torch.linspace(0.5, 1.5, DIM)


class Global(nn.Module):
    """A tensor of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * TABLE


SHELF.add("tensor_attribute", Attribute, rows, mean_square)
SHELF.add("tensor_global", Global, rows, mean_square)


def compiled() -> nn.Module:
    return nn.Sequential(Block(), torch.compile(Block(), backend="eager"), Block())


SHELF.add("compiled_submodule", compiled, rows, mean_square)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.blocks(x)


class Upcast(nn.Module):
    """Computes with its weight in float32, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.router = stack(), nn.Linear(DIM, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return F.linear(x.float(), self.router.weight.float()).softmax(-1)


class FloatBetween(nn.Module):
    """Hands float32 from one block to the next whatever the parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).float() * 1.5
        return x


SHELF.add("autocast", Autocast, rows, mean_square)
SHELF.add("weight_in_float", Upcast, rows, mean_square)
SHELF.add("float_between_units", FloatBetween, rows, mean_square)


class Cross(nn.Module):
    """Cross-attention by nn.MultiheadAttention."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.block, self.attention = Block(), nn.MultiheadAttention(DIM, 4, batch_first=True, **sizes)
        self.width = sizes.get("kdim", DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.block(x)
        return x + self.attention(x, memory, memory)[0]


def with_memory(width: int) -> Any:
    return lambda g: (torch.randn(2, 6, DIM, generator=g), torch.randn(2, 5, width, generator=g))


SHELF.add("cross_attention", Cross, with_memory(DIM), mean_square)
SHELF.add("cross_attention_kdim", lambda: Cross(kdim=8, vdim=8), with_memory(8), mean_square)


class GradientPenalty(nn.Module):
    """The norm of its output's gradient by its input, as in WGAN-GP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = stack(), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.head(self.blocks(x)).sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return score + (gradient.float().norm(dim=-1) - 1).square().mean()


SHELF.add("gradient_penalty", GradientPenalty, rows)


class LoopOverExperts(nn.Module):
    """Asks each expert for its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 3), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, mine, expert(x[mine]))
        return out + self.gate(x).mean()


class EarlyExit(nn.Module):
    """Stops when a value is small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.abs().mean() > 100:
                break
        return x


SHELF.add("loop_over_experts", LoopOverExperts, vectors(12, DIM), mean_square, refused={"": "experts|nonzero"})
SHELF.add("early_exit", EarlyExit, rows, mean_square, refused={"": "value of a tensor"})


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(dropout)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


SHELF.add("checkpoint", lambda: Checkpointed(False, 0.0), rows, mean_square)
SHELF.add("checkpoint_dropout", lambda: Checkpointed(False, 0.2), rows, mean_square)
SHELF.add("checkpoint_reentrant", lambda: Checkpointed(True, 0.0), rows, mean_square)


class Recurrent(nn.Module):
    """Writes the output row by row, as RWKV's does."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.step, self.head = Block(), nn.Linear(DIM, DIM), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(self.step(state) + x[:, t])
            out[:, t] = state
        return self.head(out)


SHELF.add("writes_rows", Recurrent, sequence, mean_square)


class LayerDrop(nn.Module):
    """Leaves layers out by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.9:
                x = layer(x)
        return x


class Counter(nn.Module):
    """Anneals by a counter in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = stack(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.blocks(x) / self.calls


SHELF.add("python_random", LayerDrop, rows, mean_square, refused={"": "random generator"})
SHELF.add("python_counter", Counter, rows, mean_square, refused={"": "attribute calls"})


class DropPath(nn.Module):
    """Stochastic depth with rates of a linspace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.rates = torch.linspace(0, 0.3, 3).tolist()

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.layers, self.rates, strict=True):
            keep = torch.rand(x.shape[0], 1) >= rate
            x = x + (layer(x) - x) * keep.to(x.dtype) / (1 - rate)
        return x


SHELF.add("drop_path", DropPath, rows, mean_square)


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


class GivesDict(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.kind = stack(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.blocks(x)
        loss = logits.float().square().mean()
        if self.kind == "tuple":
            return loss, logits
        return {"loss": loss, "logits": logits} if self.kind == "dict" else Given(loss, logits)


SHELF.add("output_dict", lambda: GivesDict("dict"), rows)
SHELF.add("output_dataclass", lambda: GivesDict("dataclass"), rows)
SHELF.add("output_tuple", lambda: GivesDict("tuple"), rows)


class TakesNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, features: Any, targets: Any) -> Tensor:
        x = self.blocks(features["dense"] + features["more"][0])
        return F.mse_loss(x.float(), targets[0].float())


SHELF.add(
    "nested_batch",
    TakesNested,
    lambda g: {
        "features": {"dense": torch.randn(4, DIM, generator=g), "more": [torch.randn(4, DIM, generator=g)]},
        "targets": (torch.randn(4, DIM, generator=g),),
    },
)


class Labelled(nn.Module):
    """Takes inputs; the loss takes the targets that come beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = stack(), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def against_target(output: Tensor, target: Any) -> Tensor:
    return F.cross_entropy(output.float(), target)


SHELF.add(
    "labels_beside", Labelled, lambda g: (torch.randn(4, DIM, generator=g), tokens(g, 4, high=5)), against_target, targets=True
)


class Slices(nn.Module):
    """Reads rows of an embedding by slice, and writes logits in place."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.blocks = nn.Embedding(16, DIM), stack()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions.weight[: x.shape[1]]
        out = self.blocks(x)
        out[..., 0] = 0.0
        return out


SHELF.add("position_slice", Slices, sequence, mean_square)
