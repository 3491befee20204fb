"""Jobs that time steps on ranks by a clock that the test sets, so that nothing depends on speed; and one for priorities."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pytest_fxbucket.bench import job
from pytest_fxbucket.bench.job import RankTimes, TimingTask, come_first, peak_bytes_of


@dataclass(frozen=True, slots=True)
class Clocked:
    """A task, and what each call of a step takes on this rank: seconds by variant, in turn."""

    task: TimingTask
    seconds: tuple[tuple[float, ...], ...]
    fails_at: int = -1
    """Number of the step that raises on this rank."""


def timed(rank: int, world: int, clocked: Clocked) -> tuple[RankTimes, list[str]]:
    """The job itself, with a clock of our own; and the order in which variants ran."""
    ran: list[str] = []
    counts: dict[str, int] = {}

    def seconds_of(step: Callable[[], None], device: str) -> float:
        step()
        name = step.__self__.name
        if len(ran) == clocked.fails_at:
            raise RuntimeError("this step fails")
        ran.append(name)
        own = clocked.seconds[clocked.task.variants.index(name)]
        counts[name] = counts.get(name, -1) + 1
        return own[counts[name] % len(own)]

    original, job.seconds_of = job.seconds_of, seconds_of
    try:
        return job.run(rank, world, clocked.task), ran
    finally:
        job.seconds_of = original


def states(rank: int, world: int, task: TimingTask) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's first parameter before and after a step."""
    step = job.TimedStep("bucketed", rank, task.phases)
    before = step.states[0][0].clone()
    step.run()
    return before, step.states[0][0]


def trained(rank: int, world: int, task: TimingTask) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """State behind steps of the bucketed step, finished, and behind as many of the unbucketed one: set-up is a step, too."""
    last = "in_one_call" if "in_one_call" in task.variants else "unbucketed"
    found = []
    for name, steps in (("bucketed", 3), (last, 4 if last == "in_one_call" else 3)):
        step = job.TimedStep(name, rank, task.phases)
        for _ in range(steps):
            step.run()
        step.finish()
        found.append(step.states[0])
    return found[0], found[1]


def met(rank: int, world: int, task: TimingTask) -> list[str]:
    """What happened, in order: the ranks met, and the clock was read around a step."""
    seen: list[str] = []
    barrier, seconds_of = job.dist.barrier, job.seconds_of

    def meet() -> None:
        seen.append("barrier")
        barrier()

    def clock(step: Callable[[], None], device: str) -> float:
        seen.append("clock")
        step()
        return 1.0

    job.dist.barrier, job.seconds_of = meet, clock
    try:
        job.run(rank, world, task)
    finally:
        job.dist.barrier, job.seconds_of = barrier, seconds_of
    return seen


def peaks(rank: int, world: int, nothing: None) -> tuple[int, int]:
    """Peak memory of what takes 256 MiB, and of nothing after it."""

    def large() -> None:
        bytearray(256 << 20)

    return peak_bytes_of(large, "cpu"), peak_bytes_of(lambda: None, "cpu")


def priorities(rank, world, is_allowed):
    if not is_allowed:
        resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
        os.setresuid(65534, 65534, 65534)  # as nobody, who may not even ask
    answer = come_first()
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    found = {thread: (os.sched_getscheduler(thread), os.sched_getparam(thread).sched_priority) for thread in threads}
    main = found.pop(os.getpid())
    return answer, main, sorted(set(found.values()))
