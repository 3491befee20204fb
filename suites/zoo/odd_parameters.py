"""Odd but ordinary modules: what parameters are, and by whom they are read."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from suites.zoo.draws import mean_square, tokens, vectors
from suites.zoo.shelf import Shelf

SHELF = Shelf("odd", __name__)
DIM = 16
rows = vectors(4, DIM)


class Block(nn.Module):
    """Linear, activation, residual."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x)))


def stack(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


class LogitScale(nn.Module):
    """A parameter of no dimension, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.logit_scale = stack(), nn.Parameter(torch.tensor(2.6592))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.logit_scale.exp()


SHELF.add("logit_scale", LogitScale, rows, mean_square)


class Functional(nn.Module):
    """Calls a child with its own parameters, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.inner = stack(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        changed = {name: parameter * 0.5 for name, parameter in self.inner.named_parameters()}
        return functional_call(self.inner, changed, (self.blocks(x),))


SHELF.add("functional_call", Functional, rows, mean_square)


class ReadsChild(nn.Module):
    """A parent that reads a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32, DIM), stack()

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.blocks(self.embedding(ids)), self.embedding.weight)


SHELF.add("reads_childs_weight", ReadsChild, lambda g: (tokens(g, 2, 6, high=32),), mean_square)


class Penalised(nn.Module):
    """Adds the squares of all its parameters to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(parameter.float().square().sum() for parameter in self.parameters())
        return self.blocks(x).float().square().mean() + 1e-3 * penalty


SHELF.add("l2_penalty", Penalised, rows)


class Listed(nn.Module):
    """Raw parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(DIM, DIM) / 4) for _ in range(3)])
        self.biases = nn.ParameterDict({name: nn.Parameter(torch.zeros(DIM)) for name in ("a", "b")})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x + self.biases["a"] - self.biases["b"].exp()


SHELF.add("parameter_list", Listed, rows, mean_square, plan=("weights", "biases"))


def weight_norm() -> nn.Module:
    return nn.Sequential(Block(), parametrizations.weight_norm(nn.Linear(DIM, DIM)), Block())


def spectral_norm() -> nn.Module:
    return nn.Sequential(Block(), parametrizations.spectral_norm(nn.Linear(DIM, DIM)), Block())


def orthogonal() -> nn.Module:
    return nn.Sequential(Block(), parametrizations.orthogonal(nn.Linear(DIM, DIM)), Block())


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(Block(), nn.utils.weight_norm(nn.Linear(DIM, DIM)), Block())


def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(Block(), nn.utils.spectral_norm(nn.Linear(DIM, DIM)), Block())


SHELF.add("weight_norm", weight_norm, rows, mean_square)
SHELF.add("spectral_norm", spectral_norm, rows, mean_square, refused={"bf16": "mv.* eagerly too"})
SHELF.add("orthogonal", orthogonal, rows, mean_square, refused={"bf16": "mm.* eagerly too"})
SHELF.add("old_weight_norm", old_weight_norm, rows, mean_square)
SHELF.add("old_spectral_norm", old_spectral_norm, rows, mean_square, refused={"bf16": "mv.* eagerly too"})


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(32, DIM, sparse=True), stack()

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.embedding(ids))


SHELF.add("sparse_embedding", SparseEmbedding, lambda g: (tokens(g, 2, 6, high=32),), mean_square)


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(32, DIM), stack(), nn.Linear(DIM, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


SHELF.add("tied", Tied, lambda g: (tokens(g, 2, 6, high=32),), mean_square)


class LoRA(nn.Module):
    """A frozen linear and its low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)
        self.base.requires_grad_(False)
        nn.init.normal_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


SHELF.add("frozen", lambda: nn.Sequential(LoRA(), LoRA()), rows, mean_square)


class Spectrum(nn.Module):
    """A complex parameter, as in Fourier operators."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.filter = Block(), nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.block(x).float()) * self.filter, n=DIM)


SHELF.add(
    "complex_parameter", Spectrum, rows, mean_square, plan=("block+filter",), refused={"bf16": "filter is torch.complex64"}
)
SHELF.add("deepcopied", lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in [Block()] * 3)), rows, mean_square)


class Unused(nn.Module):
    """A layer that forward never calls: eager gives its parameters no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.never = stack(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


SHELF.add("unused_layer", Unused, rows, mean_square)


class ReadWithoutGrad(nn.Module):
    """A weight is first read under no_grad, as for a clamp or logging."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = stack(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.last.weight.float().norm() + self.blocks[0].up.weight.float().norm()
        return self.last(self.blocks(x)) / scale.to(x.dtype)


SHELF.add("read_under_no_grad", ReadWithoutGrad, rows, mean_square)


class Clamped(nn.Module):
    """Writes its parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = stack(), nn.Parameter(torch.full((DIM,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.0, 1.0)
        return self.blocks(x) * self.scale


SHELF.add("clamped_parameter", Clamped, rows, mean_square, refused={"": "writes a parameter in place"})


class Registered(nn.Module):
    """A hook on a parameter scales its gradient."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.blocks = stack()
        for parameter in self.blocks[0].parameters():
            if when == "before":
                parameter.register_hook(lambda gradient: gradient * 2)
            else:
                parameter.register_post_accumulate_grad_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def _halve(parameter: Any) -> None:
    parameter.grad = parameter.grad / 2


SHELF.add("gradient_hook", lambda: Registered("before"), rows, mean_square)
SHELF.add("post_accumulate_hook", lambda: Registered("after"), rows, mean_square, refused={"": "post_accumulate"})


class Experts(nn.Module):
    """Stacked experts by bmm, and an einsum that sums the sharded dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 3), nn.Parameter(torch.randn(3, DIM, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.bmm(x.expand(3, *x.shape), self.up)
        return torch.einsum("end,ne->nd", made, self.gate(x).softmax(-1))


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix = Block(), nn.Parameter(torch.randn(3, DIM, DIM) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,edf->nf", self.block(x), self.mix)


SHELF.add("stacked_experts", Experts, rows, mean_square, plan=("gate+up",))
SHELF.add("einsum_over_shards", Summed, rows, mean_square, plan=("block", "mix"))
SHELF.add("plain_parameter_sum", lambda: nn.Sequential(Block(), nn.PReLU(), Block()), rows, mean_square)
