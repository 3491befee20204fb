"""Odd but ordinary modules: what parameters are, and by whom they are read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call as called_with
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from suites.zoo.draws import mean_square, tokens
from suites.zoo.odd_modules import DIM, Block, OddShelf, rows

SHELF = OddShelf(__name__)


def ids(generator: torch.Generator) -> tuple[Tensor]:
    return (tokens(generator, 2, 6, high=32),)


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


@SHELF.odd(lambda: {"logit_scale": Parameter(torch.tensor(2.6592))})
def logit_scale(m: Any, x: Tensor) -> Tensor:
    """A parameter of no dimension, as in CLIP."""
    return m.blocks(x) * m.logit_scale.exp()


@SHELF.odd(lambda: {"inner": linear()})
def functional_call(m: Any, x: Tensor) -> Tensor:
    """Calls a child with its own parameters, scaled and as they are."""
    own = dict(m.inner.named_parameters())
    x = torch.tanh(called_with(m.inner, {name: one * 0.5 for name, one in own.items()}, (m.blocks(x),)))
    return called_with(m.inner, own, (x,))


@SHELF.odd(lambda: {"embedding": nn.Embedding(32, DIM)}, ids)
def reads_childs_weight(m: Any, given: Tensor) -> Tensor:
    """A parent that reads a child's weight."""
    return F.linear(m.blocks(m.embedding(given)), m.embedding.weight)


@SHELF.odd(lambda: {"embedding": nn.Embedding(DIM, DIM)})
def reads_early(m: Any, x: Tensor) -> Tensor:
    """Reads a weight long before it computes anything of it, as DeBERTa its relative positions."""
    table = m.embedding.weight
    for layer in m.blocks:
        x = layer(x)
        x = x + x @ table
    return x


@SHELF.odd(loss=None)
def l2_penalty(m: Any, x: Tensor) -> Tensor:
    """Adds the squares of all its parameters to its output."""
    penalty = sum(parameter.float().square().sum() for parameter in m.parameters())
    return m.blocks(x).float().square().mean() + 1e-3 * penalty


def _listed() -> dict[str, Any]:
    return {
        "weights": nn.ParameterList([Parameter(torch.randn(DIM, DIM) / 4) for _ in range(3)]),
        "biases": nn.ParameterDict({name: Parameter(torch.zeros(DIM)) for name in ("a", "b")}),
    }


@SHELF.odd(_listed, plan=("blocks", "weights", "biases"))
def parameter_list(m: Any, x: Tensor) -> Tensor:
    """Raw parameters in a list and in a dict."""
    x = m.blocks(x)
    for weight in m.weights:
        x = torch.tanh(x @ weight)
    return x + m.biases["a"] - m.biases["b"].exp()


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(Block(), norm(linear()), Block())


BY_VECTOR, BY_MATRIX = {"bf16": "mv.* eagerly too"}, {"bf16": "mm.* eagerly too"}
SHELF.add("weight_norm", partial(normed, parametrizations.weight_norm), rows, mean_square)
SHELF.add("spectral_norm", partial(normed, parametrizations.spectral_norm), rows, mean_square, refused=BY_VECTOR)
SHELF.add("orthogonal", partial(normed, parametrizations.orthogonal), rows, mean_square, refused=BY_MATRIX)
SHELF.add("old_weight_norm", partial(normed, nn.utils.weight_norm), rows, mean_square)
SHELF.add("old_spectral_norm", partial(normed, nn.utils.spectral_norm), rows, mean_square, refused=BY_VECTOR)


@SHELF.odd(lambda: {"embedding": nn.Embedding(32, DIM, sparse=True)}, ids)
def sparse_embedding(m: Any, given: Tensor) -> Tensor:
    return m.blocks(m.embedding(given))


@SHELF.odd(lambda: {"bag": Parameter(torch.randn(32, DIM))}, ids)
def sparse_bag(m: Any, given: Tensor) -> Tensor:
    return m.blocks(F.embedding_bag(given, m.bag, mode="sum", sparse=True))


def _tied() -> dict[str, Any]:
    embedding, head = nn.Embedding(32, DIM), nn.Linear(DIM, 32, bias=False)
    head.weight = embedding.weight
    return {"embedding": embedding, "head": head}


@SHELF.odd(_tied, ids)
def tied(m: Any, given: Tensor) -> Tensor:
    """Embedding and head are one parameter."""
    return m.head(m.blocks(m.embedding(given)))


def _low_rank() -> dict[str, Any]:
    a, b = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)
    nn.init.normal_(b.weight)
    return {"base": linear().requires_grad_(False), "a": a, "b": b}


@SHELF.odd(_low_rank)
def frozen(m: Any, x: Tensor) -> Tensor:
    """A frozen linear and its low-rank update."""
    x = m.blocks(x)
    return torch.tanh(m.base(x) + m.b(m.a(x)))


COMPLEX = (
    'filter is torch.complex64, of which param_dtype = "bfloat16" would drop the imaginary part, as FSDP2 does; '
    "leave param_dtype out, or hold real and imaginary parts as two parameters$"
)


def spectrum() -> dict[str, Any]:
    return {"filter": Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex64))}


@SHELF.odd(spectrum, plan=("blocks+filter",), refused={"bf16": COMPLEX})
def complex_parameter(m: Any, x: Tensor) -> Tensor:
    """A complex parameter, as in Fourier operators."""
    return torch.fft.irfft(torch.fft.rfft(m.blocks(x).float()) * m.filter, n=DIM)


# In a real reduce_dtype half of each gradient would be lost.
IN_FLOAT = {"parallel": {"dp_shard": 2, "reduce_dtype": "float32"}}
SHELF.put("complex_reduced", complex_parameter, spectrum, plan=("blocks+filter",), refused={"bf16": COMPLEX}, tables=IN_FLOAT)
SHELF.add("deepcopied", lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in [Block()] * 3)), rows, mean_square)


@SHELF.odd(lambda: {"never": linear()})
def unused_layer(m: Any, x: Tensor) -> Tensor:
    """A layer that forward never calls: eager gives its parameters no gradient."""
    return m.blocks(x)


@SHELF.odd(
    lambda: {"layer": linear(), "pooler": linear(), "more": Parameter(torch.empty(0, DIM))},
    plan=("blocks", "layer+pooler+more"),
)
def pooled(m: Any, x: Tensor) -> Tensor:
    """Computes what its loss does not read, as BERT's pooler in a language model; joins a weight to an empty one."""
    x = m.blocks(x) @ torch.cat([m.layer.weight.t(), m.more]) + m.layer.bias
    assert m.pooler(x).shape == x.shape
    return x


@SHELF.odd(
    lambda: {"scale": Parameter(torch.full((DIM,), 2.0))},
    refused={"": r"writes a parameter in place \(aten\.clamp_\.default\)"},
)
def clamped_parameter(m: Any, x: Tensor) -> Tensor:
    """Writes its parameter in forward."""
    with torch.no_grad():
        m.scale.clamp_(0.0, 1.0)
    return m.blocks(x) * m.scale


@SHELF.odd(lambda: {"linear": linear()})
def zeroed_bias(m: Any, x: Tensor) -> Tensor:
    """Without the middle of its bias, as attention without a bias for keys."""
    bias = m.linear.bias.clone()
    bias[2:4].zero_()
    return F.linear(m.blocks(x), m.linear.weight, bias)


@SHELF.odd(lambda: {"gate": nn.Linear(DIM, 3), "up": Parameter(torch.randn(3, DIM, DIM) / 4)}, plan=("blocks", "gate+up"))
def stacked_experts(m: Any, x: Tensor) -> Tensor:
    """Stacked experts by bmm, and an einsum that sums the sharded dimension."""
    made = torch.bmm(x.expand(3, *x.shape), m.up)
    return m.blocks(torch.einsum("end,ne->nd", made, m.gate(x).softmax(-1)))


@SHELF.odd(lambda: {"mix": Parameter(torch.randn(3, DIM, DIM) / 4)}, plan=("blocks", "mix"))
def einsum_over_shards(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("nd,edf->nf", m.blocks(x), m.mix) + torch.einsum("edf->f", m.mix)


@SHELF.odd(
    lambda: {"inner": Parameter(torch.randn(DIM, 4, 2)), "out": Parameter(torch.randn(4, 2, DIM))}, plan=("blocks", "inner+out")
)
def einsum_of_heads(m: Any, x: Tensor) -> Tensor:
    """Weights of heads, which einsum permutes before it multiplies."""
    return torch.einsum("bhd,hdm->bm", torch.einsum("bm,mhd->bhd", m.blocks(x), m.inner).tanh(), m.out)


@SHELF.odd(lambda: {"rows": Parameter(torch.randn(2, DIM, DIM) / 4)}, plan=("blocks", "rows"))
def row_by_row(m: Any, x: Tensor) -> Tensor:
    """Takes a parameter apart."""
    x = m.blocks(x)
    for row in m.rows:
        x = torch.tanh(x @ row)
    return x


@SHELF.odd(lambda: {"query": linear(), "key": linear()}, plan=("blocks", "query+key"))
def joined_linears(m: Any, x: Tensor) -> Tensor:
    """Two projections as one product, joined long before it."""
    weight, bias = (torch.cat([getattr(m.query, name), getattr(m.key, name)]) for name in ("weight", "bias"))
    query, key = F.linear(m.blocks(x), weight, bias).chunk(2, -1)
    return torch.tanh(query * key)


SHELF.add("plain_parameter_sum", lambda: nn.Sequential(Block(), nn.PReLU(), Block()), rows, mean_square)


def convolving() -> dict[str, Any]:
    return {"before": nn.Linear(DIM, 4), "after": nn.Linear(4, DIM), "conv": nn.Conv2d(4, 4, 3, padding=1, groups=4)}


@SHELF.odd(convolving)
def depthwise(m: Any, x: Tensor) -> Tensor:
    """A convolution between layers of rows: gradients of rows are looked at, those of its weights are launched."""
    made = m.before(torch.stack([x * number for number in range(6)], 1))
    made = m.conv(made.transpose(1, 2).view(-1, 4, 2, 3)).flatten(2).transpose(1, 2)
    return m.blocks(m.after(F.gelu(made)).sum(1))
