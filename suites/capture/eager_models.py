"""Models that do what a graph might do otherwise than eager: read without grad, compute again, hook, write in place, count."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Layers(nn.Module):
    """Four layers; ``call`` says how each is called."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 4)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + self.call(layer, x)
        return self.head(x)


def batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * rank + step)),)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


def logs_first() -> nn.Module:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            assert isinstance(layer[0].weight.norm(), Tensor)
        return layer(x)

    return Layers(call)


def infers_first() -> nn.Module:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.inference_mode():
            assert isinstance(layer[0].weight.norm(), Tensor)
        return layer(x)

    return Layers(call)


def reentrant(dropout: float = 0.0) -> nn.Module:
    return Layers(lambda layer, x: checkpoint(layer, x, use_reentrant=True), dropout)


class Shared(nn.Module):
    """One layer, twice in each of three reentrant checkpoints: eager sums the gradients of each first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = checkpoint(lambda y: self.layer(torch.tanh(self.layer(y))) + y, x, use_reentrant=True)
        return x


class Nested(nn.Module):
    """Checkpoints within checkpoints, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._outer, self.embed(x), use_reentrant=True)

    def _outer(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self._inner, x, use_reentrant=True)) + F.dropout(x, 0.2)

    def _inner(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.a(x)), 0.5)


def selective() -> nn.Module:
    """Products are kept, the rest is computed again."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return Layers(lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=contexts), 0.5)


def logs_first_in_reentrant() -> nn.Module:
    def logged(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            assert isinstance(layer[0].weight.norm(), Tensor)
        return layer(x)

    return Layers(lambda layer, x: checkpoint(logged, layer, x, use_reentrant=True))


def reentrant_in_embedding() -> nn.Module:
    """What a reentrant checkpoint is given needs no gradient, so what is in it gets none."""
    model = Layers(lambda layer, x: layer(x))
    embed = model.embed.forward
    model.embed.forward = lambda x: checkpoint(embed, x, use_reentrant=True)
    return model


def saved(dropout: float = 0.0) -> nn.Module:
    return Layers(lambda layer, x: checkpoint(layer, x, use_reentrant=False), dropout)


def draws_anew() -> nn.Module:
    return Layers(lambda layer, x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False), 0.5)


def plain(dropout: float = 0.0) -> nn.Module:
    return Layers(lambda layer, x: layer(x), dropout)


class Reversible(nn.Module):
    """Draws the same mask twice, as reversible layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        x = F.dropout(self.a(x), 0.5)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            x = x + F.dropout(self.b(x), 0.5)
        return F.dropout(x, 0.5)


def hooked() -> nn.Module:
    model = plain()
    model.layers[1][0].weight.register_hook(lambda grad: grad * 0.1)
    model.layers[1][0].weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    model.head.bias.register_hook(lambda grad: None)
    return model


def hooked_behind() -> nn.Module:
    model = plain()
    model.layers[1][0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


class Recurrent(nn.Module):
    """RWKV's way: results of single positions are written into a tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.mix:
            out = torch.zeros_like(x)
            state = torch.zeros_like(x[0])
            for t in range(x.shape[0]):
                state = torch.tanh(layer(x[t]) + state)
                out[t] = state
            x = out
        return self.head(x)


class Clamps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)


class Detached(nn.Module):
    """``unused`` is read, and gets no gradient in eager either."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.unused(x).detach()


class Chance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class OwnChance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(7)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.generator.random() < 0.999 else x * 2


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls % 100 == 0 else x


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.last is None else x + self.last.detach()
        self.last = x
        return given


class Warms(nn.Module):
    """Another step the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_warm = False

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.is_warm else 0.5
        self.is_warm = True
        return x * scale


class Caches(nn.Module):
    """What it sets in forward changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[0])
        self.seen = x.detach()
        return x


class Seeds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x, 0.5)


class OneDnnRecurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[None])[0])


class Recurs(OneDnnRecurs):
    """By the operators that oneDNN's layer is made of; oneDNN itself rounds otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return super().forward(x)
        finally:
            torch._C._set_mkldnn_enabled(before)


class Turned(nn.Module):
    """Gradients that come turned into softplus, and are then looked at in two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, 2 * x])
        return self.outer(F.softplus(self.inner(x)).transpose(1, 2))


def between(name: str) -> nn.Module:
    """A module of this file between two layers."""
    return nn.Sequential(nn.Linear(8, 8), globals()[name](), nn.Linear(8, 2))
