"""Runs in the ranks: captured steps whose work crosses iterations, beside eager ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.transforms.next_iteration import next_iteration
from suites.train_step.data_parallel_jobs import Sharded, sharded
from suites.train_step.step_twins import Optimizers, Step, Twins, _bytes

LAYERS = 4


def model_of(rank: int, world: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Sharded(rank, world) for _ in range(LAYERS)))


def usual(model: nn.Module, optimizers: Optimizers) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizers[0].zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


def optimizer_of(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    groups = [{"params": list(layer.parameters())} for layer in model]  # type: ignore[union-attr]
    return torch.optim.AdamW(groups, lr=0.01, fused=fused)


def bucketed(step: StepGraph, state: dict[str, torch.Tensor]) -> StepGraph:
    manual_overlap_bucketing(step.graphs["joint"], [str(layer) for layer in range(LAYERS)])
    return step


MOVED = [bucketed, partial(next_iteration, entries=["2", "3"])]


def twins(rank: int, world: int, transforms: Sequence[Any] = MOVED, make_step: Any = usual) -> Twins:
    return Twins(optimizer_of, make_step, partial(model_of, rank, world), transforms=transforms)


def batch(rank: int, number: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def differing(rank: int, world: int, payload: tuple[str, bool, Sequence[int]]) -> dict[int, list[str]]:
    """For each count of steps what differs from eager when the last of them is told so; learning rates change every step.

    ``payload``: the kind of step, whether its optimizer is fused, the counts, one behind the other on one model.
    """
    kind, fused, counts = payload
    found: dict[int, list[str]] = {}
    pair = Twins(partial(optimizer_of, fused=fused), STEPS[kind], partial(model_of, rank, world), transforms=MOVED)
    for count in counts:
        found[count] = [f"loss {n}" for n in range(count) if len({_bytes(loss) for loss in stepped(pair, rank, n, count)}) > 1]
        found[count] += unlike(pair)
    return found


def stepped(pair: Twins, rank: int, number: int, count: int, rows: int = 3) -> list[torch.Tensor]:
    """Losses of eager and captured."""
    losses = []
    for run, more in zip(pair.each(), ({}, {"last_step": number == count - 1}), strict=True):
        for group in run.optimizers[0].param_groups:
            group["lr"] = 0.01 / (number + 1)
        losses.append(run.step(batch(rank, number, rows), **more))
    return losses


def unlike(pair: Twins) -> list[str]:
    eager, captured = (run.facts() for run in pair.each())
    return [name for name in eager | captured if eager.get(name, 0) != captured.get(name, 0)]


def later(rank: int, world: int, _: Any) -> dict[str, Any]:
    """What is behind before the last step; and steps after it, of another signature in between, and after a failed call."""
    pair = twins(rank, world)
    for number in range(2):
        stepped(pair, rank, number, 9)
    found: dict[str, Any] = {"behind": unlike(pair)}
    stepped(pair, rank, 2, 9, rows=5)  # another signature finishes what the one before left
    found["of the rest"] = [name for name in unlike(pair) if not name.startswith(("2.", "3."))]
    pair.step.retrace()
    try:
        pair.step(torch.zeros(3, 5), last_step=True)
    except Exception as error:
        found["raised"] = isinstance(error, FxbucketError)
    stepped(pair, rank, 3, 4)
    found["finished"] = unlike(pair)
    stepped(pair, rank, 4, 6)
    stepped(pair, rank, 5, 6)
    found["begun anew"] = unlike(pair)
    return found


def changed(rank: int, world: int, _: Any) -> list[str]:
    """What is said where a parameter, then state, is written to while its update is to come."""
    return [_refused(rank, world, change) for change in (_parameter, _state, _load)]


def _refused(rank: int, world: int, change: Callable[[Twins], None]) -> str:
    pair = twins(rank, world)
    stepped(pair, rank, 0, 9)
    with torch.no_grad():
        change(pair)
    before = pair.captured.facts()
    try:
        pair.step(batch(rank, 1))
    except FxbucketError as error:
        return str(error) if pair.captured.facts() == before else "something was changed"
    return ""


def _parameter(pair: Twins) -> None:
    pair.captured.model[3].weight.mul_(2)  # type: ignore[index]


def _state(pair: Twins) -> None:
    optimizer = pair.captured.optimizers[0]
    optimizer.state[pair.captured.model[2].bias]["exp_avg"].zero_()  # type: ignore[index]


def _load(pair: Twins) -> None:
    optimizer = pair.captured.optimizers[0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def refused(rank: int, world: int, _: Any) -> str:
    """What is said of a step that adds to the gradients of the one before."""
    try:
        twins(rank, world, make_step=_adding).step(batch(rank, 0))
    except FxbucketError as error:
        return str(error)
    return ""


def _adding(model: nn.Module, optimizers: Optimizers) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizers[0].step()
        return loss.detach()

    return step


STEPS = {"cleared first": usual, "cleared last": sharded}
