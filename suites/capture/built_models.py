"""Factories as people write them: casts, initialisers, values that are read, copies, models that live elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def batch(rank: int, step: int) -> tuple[Tensor]:
    return (torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(100 * rank + step)),)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


class Casts(nn.Module):
    """Computes in its weights' dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(next(iter(self.model.parameters())).dtype))


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def bfloat16() -> nn.Module:
    return Casts(two().to(torch.bfloat16))


def double() -> nn.Module:
    return Casts(two().double())


def half_with_a_tie() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    return Casts(model.half())


def from_meta() -> nn.Module:
    with torch.device("meta"):
        model = two()
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    return model


def truncated() -> nn.Module:
    model = two()
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    return model


class DropsPaths(nn.Module):
    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self.layers, self.rates = nn.ModuleList(nn.Linear(8, 8) for _ in rates), rates

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.layers, self.rates, strict=True):
            x = x + layer(x) * (1 - rate)
        return x


def drop_path() -> nn.Module:
    return DropsPaths(torch.linspace(0, 0.5, 3).tolist())


def scaled_by_a_weight() -> nn.Module:
    model = two()
    scale = float(model[0].weight.norm())
    with torch.no_grad():
        model[0].weight.div_(scale)
    return model


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def copied() -> nn.Module:
    block = two()[:2]
    return nn.Sequential(block, copy.deepcopy(block))


AT_IMPORT = two()


def at_import() -> nn.Module:
    return AT_IMPORT


def reads_a_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if model[1].weight.sum() > 0:
        nn.init.zeros_(model[1].bias)
    return model


FACTORIES = (
    bfloat16,
    double,
    half_with_a_tie,
    from_meta,
    truncated,
    drop_path,
    scaled_by_a_weight,
    transformer,
    copied,
    at_import,
)
