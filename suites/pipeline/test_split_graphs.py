"""Graphs that somebody else traced are split as the model is, and balanced cuts are proposed for both."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline import proposed_cuts, split_stages
from pytest_fxbucket.pipeline.propose import smallest_largest
from suites.pipeline.running import assert_bits, eagerly
from suites.pipeline.stage_models import DIM, SPLITS, linears, rows

EXPORTED = {
    "Many": ["layers.1", "layers.10"],
    "Nested": ["layers.0", "layers.1"],
    "Skips": ["layers.1", "layers.3"],
    "Keywords": ["first.linear", "first"],
    "WithoutGrad": ["layers.0", "layers.1"],
    "Sequential": ["1", "4"],
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_graph_is_split_as_its_model(name: str) -> None:
    torch.manual_seed(0)
    model, batch = SPLITS[name].build(), SPLITS[name].batch()
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    if name == "Nested":
        torch.export.register_dataclass(type(model(*args)), serialized_type_name="suites.Given")
    graph = torch.export.export(model, args, kwargs).module()
    stages = split_stages(graph, EXPORTED[name], batch)
    assert stages[0].summary.modules == split_stages(model, EXPORTED[name], batch)[0].summary.modules
    assert_bits(stages, graph, batch, eagerly(graph, batch))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](self.layers[0](x)))


def test_an_exported_graph_tells_a_second_call() -> None:
    graph = torch.export.export(Twice(), rows()).module()
    with pytest.raises(StageError, match=r'^cut "layers\.0" is called 2 times in forward'):
        split_stages(graph, ["layers.0"], rows())


# Proposed cuts.


class Uneven(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, DIM)
        widths = [width * DIM for width in (4, 4, 8, 4)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, width), nn.Linear(width, DIM)) for width in widths)
        self.head = nn.Linear(DIM, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight
            for index in (1, 3):
                self.layers[index][0].weight = self.layers[0][0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens() -> tuple[Tensor]:
    return (torch.randint(0, 64, (2, 4)),)


@pytest.mark.parametrize(("count", "by", "tied"), [(2, "flops", False), (3, "parameters", True)])
def test_no_other_cuts_have_a_smaller_largest_stage(count: int, by: Any, tied: bool) -> None:
    model, batch = Uneven(tied), tokens()

    def largest(cuts: Any) -> int:
        stages = split_stages(model, cuts, batch)
        if by == "flops":
            return max(stage.summary.flops for stage in stages)
        return max(sum(parameter.numel() for parameter in stage.parameters()) for stage in stages)

    proposed = proposed_cuts(model, count, batch, by=by)
    every = [list(cuts) for cuts in combinations([f"layers.{index}" for index in range(4)], count - 1)]
    assert proposed in every
    assert largest(proposed) == min(map(largest, every))
    assert proposed == proposed_cuts(model, count, batch, by=by)


def test_few_numbered_modules_are_helped_by_any_others() -> None:
    assert proposed_cuts(Uneven(), 7, tokens())[0] == "embed"
    with pytest.raises(StageError, match=r"^the model has 9 modules to cut behind, too few for 11 stages; 10 is the most$"):
        proposed_cuts(Uneven(), 11, tokens())


def test_what_cannot_be_proposed() -> None:
    with pytest.raises(StageError, match=r'^by is "time", expected "parameters", "flops" or "seconds"$'):
        proposed_cuts(Uneven(), 2, tokens(), by="time")  # type: ignore[arg-type]
    with pytest.raises(StageError, match=r"^count is 1, expected a number of stages, 2 or more$"):
        proposed_cuts(Uneven(), 1, tokens())


def test_the_largest_run_is_as_small_as_can_be() -> None:
    sizes = [5, 1, 1, 1, 4, 3]
    costs = [[sum(sizes[i : j + 1]) for j in range(i, len(sizes))] for i in range(len(sizes))]
    assert smallest_largest(costs, 3) == [1, 4]
    assert smallest_largest(costs, 2) == [2]
    assert [len(smallest_largest([[0] * size for size in range(6, 0, -1)], count)) for count in (2, 3, 6)] == [1, 2, 5]
