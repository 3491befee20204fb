"""Jobs of ``simulated_time`` in a module that ranks can import: steps of all variants in turn, each with clocks in it."""

from __future__ import annotations

from itertools import pairwise

import torch.distributed as dist

from pytest_fxbucket.bench.job import TimedStep, TimingTask, come_first
from pytest_fxbucket.bench.timeline.traced_steps import Stamps, with_clocks
from pytest_fxbucket.process import collector

WARM_UP = 4


def clocked(rank: int, world: int, given: tuple[TimingTask, int]) -> dict[str, list[list[float]]]:
    """Of each variant and round the seconds that each mark took; the order of variants changes from round to round."""
    task, rounds = given
    (phase,) = task.phases
    taken: dict[str, list[Stamps]] = {name: [] for name in task.variants}
    with collector.paused():
        steps = {name: TimedStep(name, rank, task.phases) for name in task.variants}
        graphs = {name: with_clocks(step.graphs[0], phase.marks[name], taken[name].append) for name, step in steps.items()}
        come_first()
        for number in range(WARM_UP + rounds):
            names = list(steps) if number % 2 else list(steps)[::-1]
            first = number // 2 % len(names)
            for name in names[first:] + names[:first]:
                steps[name].prepare()
                dist.barrier()
                steps[name].call([graphs[name]])
                steps[name].settle()
    return {
        name: [[(end - begin) / 1e9 for begin, end in pairwise(stamps)] for stamps in every[WARM_UP:]]
        for name, every in taken.items()
    }
