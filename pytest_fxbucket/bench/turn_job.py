"""Runs in the ranks of one side: steps when it is this side's turn; a sample is the slowest rank's time of one step."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_fxbucket import collector
from pytest_fxbucket.bench.clock import seconds_of
from pytest_fxbucket.bench.job import Step
from pytest_fxbucket.bench.memory import peak_bytes_of
from pytest_fxbucket.bench.priority import come_first
from pytest_fxbucket.bench.task import PhaseTask
from pytest_fxbucket.bench.turns import REST_STEPS, Turn
from pytest_fxbucket.ranks import device, mark


@dataclass(frozen=True, slots=True)
class TurnTask:
    """What one rank of a side is to run: steps of one variant."""

    variant: str
    phases: tuple[PhaseTask, ...]
    address: str
    """Where rank 0 sits down to take turns."""


@dataclass(frozen=True, slots=True)
class TurnsTaken:
    """What one rank brings back; the times went to the table."""

    digests: tuple[str, ...]
    peak_bytes: int
    """Largest resident size of its process during one step; on a GPU, most memory of it that its tensors took."""
    has_priority: bool
    """Whether it ran before everything else on the machine."""


def run(rank: int, world: int, task: TurnTask) -> TurnsTaken:
    """Run steps whenever rank 0 is told to, until it is told that it is over."""
    with collector.paused(), contextlib.ExitStack() as stack:
        step = Step(task.variant, rank, task.phases)
        gc.collect()
        gc.freeze()
        has_priority = come_first()
        _timed(step)  # what is only ever done once is done before anybody waits
        turn = Turn(task.address) if rank == 0 else None
        if turn is not None:
            stack.callback(turn.close)
        while count := _told(turn):
            mark(f"turn of {task.variant}")
            seconds = [_timed(step) for _ in range(REST_STEPS + count)][REST_STEPS:]
            own = torch.tensor(seconds, dtype=torch.float64, device=device())
            dist.all_reduce(own, dist.ReduceOp.MAX)
            if turn is not None:
                turn.done(own.tolist())
        return TurnsTaken(step.digests, peak_bytes_of(step.run, device()), has_priority)


def _told(turn: Turn | None) -> int:
    """How many steps rank 0 was told to time, on every rank; 0: it is over."""
    mark("waiting for its turn")
    told = torch.tensor([turn.wait() if turn is not None else 0], device=device())
    dist.broadcast(told, 0)
    return int(told.item())


def _timed(step: Step) -> float:
    step.prepare()
    dist.barrier()
    seconds = seconds_of(step.call, device())
    step.settle()
    return seconds
