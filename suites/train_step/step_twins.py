"""A user's step run by eager and, on a twin of its model, as a captured step; every bit of both compared. For tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pytest_fxbucket.compat.dtensors import local_of, spec_of
from pytest_fxbucket.train_step import CapturedStep, capture_step
from suites.capture.functional_graphs import bytes_of

Optimizers = list[torch.optim.Optimizer]
Step = Callable[..., Any]
MakeStep = Callable[[nn.Module, Optimizers], Step]


def net(seed: int = 0) -> nn.Sequential:
    """BatchNorm with its buffers, dropout, LayerNorm, and linear layers."""
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def usual(model: nn.Module, optimizers: Optimizers) -> Step:
    """zero_grad, forward, backward, clipping, step: as most training loops have it."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def batch(seed: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=draw), torch.randint(0, 3, (rows,), generator=draw)


@dataclass
class Run:
    """One model with its optimizers, and the step that trains it."""

    model: nn.Module
    optimizers: Optimizers
    step: Any

    def facts(self) -> dict[str, Any]:
        """Everything a step may change, as bytes; None where there is no tensor."""
        found: dict[str, Any] = {fqn: tensor for fqn, tensor in self.model.state_dict().items()}
        found |= {f"{fqn}.grad": p.grad for fqn, p in self.model.named_parameters()}
        for i, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                found |= {f"optimizers.{i}.{number}.{key}": value for key, value in state.items()}
        return {name: _bytes(value) for name, value in found.items()}


def differing(one: Run, other: Run) -> list[str]:
    """What of two runs is not the same bits, by name; DDP's own name of what it wraps aside."""
    facts = [{name.replace("module.", ""): value for name, value in run.facts().items()} for run in (one, other)]
    return [name for name in facts[0] | facts[1] if facts[0].get(name, 0) != facts[1].get(name, 0)]


class Twins:
    """Eager and captured, begun alike."""

    def __init__(
        self,
        make_optimizers: Callable[[nn.Module], Any],
        make_step: MakeStep = usual,
        make_model: Callable[[], nn.Module] = net,
        transforms: Sequence[Any] = (),
        overrides: Mapping[Any, Any] = {},
        guards: Any = (),
    ) -> None:
        self.eager = self._run(make_model, make_optimizers, make_step)
        self.captured = self._run(make_model, make_optimizers, make_step)
        given = self.captured
        rest: dict[str, Any] = {"transforms": transforms, "overrides": overrides, "guards": guards}
        given.step = capture_step(given.step, model=given.model, optimizers=given.optimizers, **rest)

    @property
    def step(self) -> CapturedStep:
        return self.captured.step

    def each(self) -> tuple[Run, Run]:
        return self.eager, self.captured

    def same(self, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
        """Take one step of both; fails unless results, parameters, buffers, gradients and state are the same bits."""
        results = []
        for run in self.each():
            torch.manual_seed(seed)
            given = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            results.append(torch.utils._pytree.tree_map(_bytes, run.step(*given, **kwargs)))
            drawn = torch.get_rng_state()
            results[-1] = (results[-1], _bytes(drawn), [_bytes(arg) for arg in given])
        assert results[0] == results[1]
        assert differing(*self.each()) == []
        return results[0][0]

    def train(self, steps: int) -> None:
        """Take ``steps`` of both, each on a batch of its own."""
        for number in range(steps):
            self.same(*batch(number))

    @staticmethod
    def _run(make_model: Callable[[], nn.Module], make_optimizers: Any, make_step: MakeStep) -> Run:
        model = make_model()
        made = make_optimizers(model)
        optimizers = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        return Run(model, optimizers, make_step(model, optimizers))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options})


def _bytes(value: Any) -> Any:
    """Of a DTensor what this rank holds, and how it is placed."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), str(spec_of(value)), bytes_of(local_of(value))
