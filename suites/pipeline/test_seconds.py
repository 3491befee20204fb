"""What parts of a model take: by a clock that tells what it is told, and without a trace left in the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, count

import pytest
import torch
from torch import Tensor, nn

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.propose import RUNS, proposed_cuts, seconds_of_parts
from pytest_fxbucket.pipeline.split import forward_of


class Net(nn.Module):
    """Draws, and counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        first = x
        for layer in self.layers:
            x = self.drop(layer(x))
        return {"y": (x + first).masked_fill(mask, 0.0), "number": mask.sum()}


BATCH = (torch.randn(6, 4), torch.zeros(6, 4, dtype=torch.bool))
CUTS = ["layers.0", "layers.1"]


def measured(model: nn.Module, clock: Callable[[], float]) -> list[float]:
    return seconds_of_parts(partial(forward_of, model, BATCH), BATCH, {}, CUTS, clock)


def telling(runs: list[list[float]]) -> Callable[[], float]:
    """A clock, read twice for each, on which a stage's forward takes what ``runs`` say, its backward ten times that.

    Backwards go from the last stage to the first.
    """
    spent = [second for run in runs for second in (*run, *(10 * one for one in reversed(run)))]
    times = accumulate(value for second in spent for value in (100.0, second))
    return partial(next, iter(times))


def test_seconds_are_medians_of_runs_behind_the_first_of_forward_and_backward() -> None:
    first = [1000.0, 1000.0, 1000.0]
    runs = [[1.0, 20.0, 300.0], [2.0, 10.0, 200.0], [9.0, 90.0, 100.0], [4.0, 40.0, 400.0], [3.0, 30.0, 300.0]]
    assert len(runs) == RUNS
    assert measured(Net(), telling([first, *runs])) == [3.0 * 11, 30.0 * 11, 300.0 * 11]


def test_a_model_that_was_measured_is_as_it_was() -> None:
    torch.manual_seed(3)
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draws = torch.random.get_rng_state()
    measured(model, partial(next, count(0.0)))
    assert {name: tensor.equal(before[name]) for name, tensor in model.state_dict().items()} == dict.fromkeys(before, True)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    assert torch.random.get_rng_state().equal(draws)


def test_a_model_without_values_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(StageError) as caught:
        proposed_cuts(model, 2, (torch.randn(2, 4, device="meta"),), by="seconds")
    assert str(caught.value) == (
        "seconds cannot be measured: 0.weight has no values; balance by flops, or measure a smaller model"
    )


class Counts(nn.Module):
    """A buffer that two modules write: no stage could be cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.calls += 1
        return x


def test_modules_that_cannot_be_parted_one_by_one_are_told() -> None:
    with pytest.raises(StageError, match=r"^seconds of modules cannot be measured one by one: calls is written .*; balance by"):
        proposed_cuts(Counts(), 2, (torch.randn(2, 4),), by="seconds")


class Slow(nn.Module):
    """The first of four modules sorts two million numbers, with the parameters and FLOPs of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.new_ones(2_000_000).cumsum(0).sort(descending=True).values[-1]
        for layer in self.layers:
            x = layer(x)
        return x


def test_cuts_by_seconds_are_others_than_by_what_is_counted() -> None:
    batch = (torch.randn(2, 4),)
    assert proposed_cuts(Slow(), 2, batch) == proposed_cuts(Slow(), 2, batch, by="flops") == ["layers.1"]
    assert proposed_cuts(Slow(), 2, batch, by="seconds") == ["layers.0"]
