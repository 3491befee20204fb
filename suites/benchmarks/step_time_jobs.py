"""Jobs of ``step_time`` in a module that ranks can import: torch's own FSDP2, timed in turn with the captured steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fixtures.reference.by_torch import fsdp2
from fixtures.reference.stepping import Call, imported, loss_of
from pytest_fxbucket.bench.job import RankTimes, Rounds, TimedStep, TimingTask, come_first, take_samples
from pytest_fxbucket.process import collector

FSDP2 = "FSDP2 eager"


@dataclass(frozen=True, slots=True)
class Beside:
    """A task, and what FSDP2 is given for the same step."""

    task: TimingTask
    payload: dict[str, Any]


class EagerStep:
    """A step of `fully_shard`: forward, loss and backward; no optimizer, as in the captured ones."""

    def __init__(self, rank: int, payload: dict[str, Any]) -> None:
        self.name = FSDP2
        self._loss: str | None = payload["loss"]
        self._batch = imported(payload["batch"])(rank, 0)
        model_and_call: tuple[nn.Module, Call] = fsdp2(payload)
        self._model, self._call = model_and_call

    def prepare(self) -> None:
        """Forget the gradients of the step before."""
        self._model.zero_grad(set_to_none=True)

    def call(self) -> None:
        """The step."""
        loss_of(self._call(self._batch, True), self._batch, self._loss).backward()

    def settle(self) -> None:
        """Nothing is left to do."""


def timed(rank: int, world: int, beside: Beside) -> RankTimes:
    """Samples of all captured variants and of FSDP2."""
    task = beside.task
    with collector.paused():
        steps = {name: TimedStep(name, rank, task.phases) for name in task.variants}
        found = RankTimes({name: step.digests for name, step in steps.items()})
        eager = EagerStep(rank, beside.payload)
        found.has_priority = come_first()
        take_samples(Rounds({**steps, FSDP2: eager}, world), task.pacing, found)
    return found
