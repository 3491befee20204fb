"""Odd but ordinary modules: what backward meets, and what is computed again for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fixtures.models import chunked
from suites.zoo.draws import tokens, vectors
from suites.zoo.odd_modules import DIM, Block, HandsOn, OddShelf, sequence

SHELF = OddShelf(__name__)
TWO_PARTS = {"step": {"microbatches": 2}}


def layers() -> dict[str, Any]:
    """Layers with dropout behind the blocks, whose input needs a gradient."""
    return {"layers": nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(2))}


def checkpointed(m: Any, x: Tensor, **how: Any) -> Tensor:
    x = m.blocks(x)
    for layer in m.layers:
        x = checkpoint(layer, x, **how)
    return x


def products_kept(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The rest is computed again."""
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


HOW: dict[str, dict[str, Any]] = {
    "checkpoint_dropout": {"use_reentrant": False},
    "checkpoint_reentrant": {"use_reentrant": True},
    "checkpoint_draws_anew": {"use_reentrant": False, "preserve_rng_state": False},
    "checkpoint_selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, products_kept),
    },
}
for name, how in HOW.items():
    SHELF.put(name, partial(checkpointed, **how), layers)
SHELF.put("checkpoint_microbatches", partial(checkpointed, use_reentrant=False), layers, tables=TWO_PARTS)


@SHELF.odd(lambda: {"layers": nn.ModuleList(map(HandsOn, layers()["layers"]))}, tables={"step": {"checkpoint": ["layers.*"]}})
def checkpoint_of_the_plan(m: Any, x: Tensor) -> Tensor:
    """Of modules that wrap others and hand attributes on to them."""
    x = m.blocks(x)
    for layer in m.layers:
        x = layer(x)
    return x


@SHELF.odd(lambda: {"first": nn.Linear(DIM, DIM)})
def checkpoint_of_the_batch(m: Any, x: Tensor) -> Tensor:
    """What a reentrant checkpoint is given needs no gradient, so what is in it gets none."""
    return m.blocks(checkpoint(m.first, x, use_reentrant=True))


@SHELF.odd(lambda: {"layer": nn.Linear(DIM, DIM)})
def checkpoint_shared_layer(m: Any, x: Tensor) -> Tensor:
    """One layer, twice in each of three reentrant checkpoints: eager sums the gradients of each first."""
    x = m.blocks(x)
    for _ in range(3):
        x = checkpoint(lambda y: m.layer(torch.tanh(m.layer(y))) + y, x, use_reentrant=True)
    return x


@SHELF.odd(lambda: {"a": nn.Linear(DIM, DIM), "b": nn.Linear(DIM, DIM)})
def checkpoint_nested(m: Any, x: Tensor) -> Tensor:
    """Checkpoints within checkpoints, both with dropout."""

    def inner(x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(m.a(x)), 0.5)

    def outer(x: Tensor) -> Tensor:
        return m.b(checkpoint(inner, x, use_reentrant=True)) + F.dropout(x, 0.2)

    return checkpoint(outer, m.blocks(x), use_reentrant=True)


@SHELF.odd(layers)
def checkpoint_logged(m: Any, x: Tensor) -> Tensor:
    """A weight is first read for logging in what is computed again."""

    def logged(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            assert isinstance(layer[0].up.weight.norm(), Tensor)  # type: ignore[index]
        return layer(x)

    x = m.blocks(x)
    for layer in m.layers:
        x = checkpoint(logged, layer, x, use_reentrant=True)
    return x


@SHELF.odd(lambda: {"last": nn.Linear(DIM, DIM)})
def read_under_no_grad(m: Any, x: Tensor) -> Tensor:
    """Weights are first read without gradient, as for a clamp or logging."""
    with torch.no_grad():
        scale = m.last.weight.float().norm() + m.blocks[0].up.weight.float().norm()
    return m.last(m.blocks(x)) / scale.to(x.dtype)


@SHELF.odd(lambda: {"last": nn.Linear(DIM, DIM)})
def read_in_inference_mode(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        assert isinstance(m.last.weight.norm(), Tensor)
    return m.last(m.blocks(x))


@SHELF.odd(lambda: {"a": nn.Linear(DIM, DIM), "b": nn.Linear(DIM, DIM)})
def generator_set_back(m: Any, x: Tensor) -> Tensor:
    """Draws the same mask twice, as reversible layers do."""
    state = torch.get_rng_state()
    x = F.dropout(m.a(m.blocks(x)), 0.5)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        x = x + F.dropout(m.b(x), 0.5)
    return F.dropout(x, 0.5)


def hooked() -> dict[str, Any]:
    layer = Block()
    layer.up.weight.register_hook(lambda gradient: gradient * 0.1)
    layer.up.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    layer.up.bias.register_hook(lambda gradient: None)
    return {"layer": layer}


def gradient_hook(m: Any, x: Tensor) -> Tensor:
    """Hooks on parameters change their gradients, or leave them."""
    return m.layer(m.blocks(x))


SHELF.put("gradient_hook", gradient_hook, hooked)
SHELF.put("gradient_hook_microbatches", gradient_hook, hooked, tables=TWO_PARTS)


def hooked_behind() -> dict[str, Any]:
    layer = Block()
    layer.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return {"layer": layer}


BEHIND = {"": r"parameter layer\.up\.weight has a hook of register_post_accumulate_grad_hook"}
SHELF.put("post_accumulate_hook", gradient_hook, hooked_behind, refused=BEHIND)


@SHELF.odd(lambda: {"step": nn.Linear(DIM, DIM), "head": Block()}, sequence)
def writes_rows(m: Any, x: Tensor) -> Tensor:
    """Writes the output row by row into zeros, as RWKV's does."""
    x = m.blocks(x)
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = torch.tanh(m.step(state) + x[:, t])
        out[:, t] = state
    return m.head(out)


@SHELF.odd(lambda: {"unused": nn.Linear(DIM, DIM)})
def detached_result(m: Any, x: Tensor) -> Tensor:
    """``unused`` is read, and gets no gradient in eager either."""
    return m.blocks(x) + m.unused(x).detach()


@SHELF.odd(lambda: {"inner": nn.Linear(DIM, 4), "outer": nn.Linear(6, 6)}, vectors(6, DIM))
def turned_gradients(m: Any, x: Tensor) -> Tensor:
    """Gradients that come turned into softplus, and are then looked at in two dimensions."""
    x = m.blocks(x)
    return m.outer(F.softplus(m.inner(torch.stack([x, 2 * x]))).transpose(1, 2))


@SHELF.odd(lambda: {"head": nn.Linear(DIM, 1)}, loss=None)
def gradient_penalty(m: Any, x: Tensor) -> Tensor:
    """The norm of its output's gradient by its input, as in WGAN-GP."""
    x = x.detach().requires_grad_()
    score = m.head(m.blocks(x)).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (gradient.float().norm(dim=-1) - 1).square().mean()


class Scaled(torch.autograd.Function):
    """Multiplies by a weight, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def kept() -> dict[str, Any]:
    scale, shift = (nn.Parameter(torch.rand(DIM) + 1) for _ in range(2))
    return {"scale": scale, "shift": shift, "kept": [scale, shift]}


@SHELF.odd(kept, plan=("blocks", "scale+shift"))
def function_of_a_list(m: Any, x: Tensor) -> Tensor:
    """An autograd.Function of parameters that the module keeps in a list of its own."""
    return Scaled.apply(m.blocks(x), m.kept[0]) + m.kept[1]


def labelled_tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = tokens(generator, 4, 8, high=chunked.VOCAB)
    return drawn, drawn.roll(-1, 1)


SHELF.add(  # and of what backward reaches again
    "backward_in_forward",
    partial(chunked.build, way="backward", tied=True),
    labelled_tokens,
    tables=TWO_PARTS,
    plan=("embed+norm+head", "layers.*"),
    near=True,
    rounds="what parameters are given within forward is added in the dtype that it is reduced in",
)
