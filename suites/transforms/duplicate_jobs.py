"""Runs in the ranks: a layer that is used twice, its parameters gathered at each use, as a captured step that merges them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.transforms.add_before_reducing import add_before_reducing
from pytest_fxbucket.transforms.merge_duplicates import merge_duplicates
from suites.train_step.data_parallel_jobs import Gathered, Sharded, sharded
from suites.train_step.step_twins import Twins, adamw, batch


class Shared(nn.Module):
    """Its layer twice, and at the end the centre of the layer's weight, gathered once more without a gradient."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.layer = Sharded(rank, world)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = self.layer(self.layer(x))
        weight: torch.Tensor = Gathered.apply(self.layer.weight.detach(), self.layer.world)
        return functional.linear(once, weight - weight.mean())


def _model(rank: int, world: int) -> nn.Module:
    torch.manual_seed(0)
    return Shared(rank, world)


def _launches(twins: Twins) -> dict[str, int]:
    (step,) = twins.step.graphs
    found: dict[str, int] = {}
    for node in step.graphs["joint"].graph.nodes:
        kind = collectives.launch_kind(node)
        if kind is not None:
            found[kind] = found.get(kind, 0) + 1
    return found


def steps(rank: int, world: int, payload: dict[str, Any]) -> list[Any]:
    """Launches before and after, and what was told; fails where a bit is another than eager's."""
    found: list[Any] = []
    for transforms in ((), (merge_duplicates,), (partial(merge_duplicates, again=True),)):
        twins = Twins(adamw, sharded, lambda: _model(rank, world), transforms)
        for i in range(payload["steps"]):
            twins.same(batch(10 * i + rank)[0])
        assert twins.step.traces == 1
        found.append((_launches(twins), twins.step.graphs[0].transformed))
    return found


def added(rank: int, world: int, payload: dict[str, Any]) -> Any:
    """Launches and what was told where reductions are added before; the largest distance from eager's new parameters."""
    twins = Twins(adamw, sharded, lambda: _model(rank, world), (add_before_reducing, merge_duplicates))
    results = [run.step(batch(rank)[0]) for run in twins.each()]
    pairs = zip(*(run.model.parameters() for run in twins.each()), strict=True)
    apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return _launches(twins), twins.step.graphs[0].transformed, torch.equal(*results), apart
