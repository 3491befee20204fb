"""Runs in the ranks: steps of several variants in turn, each timed on every rank; a sample is the slowest rank's time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Protocol

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket import collector
from pytest_fxbucket.bench.clock import seconds_of
from pytest_fxbucket.bench.memory import peak_bytes_of
from pytest_fxbucket.bench.pace import Pacing, has_settled, is_enough, is_warm
from pytest_fxbucket.bench.priority import come_first
from pytest_fxbucket.bench.task import PhaseTask, Task, Timed
from pytest_fxbucket.bench.timeline.record import traced_steps
from pytest_fxbucket.bench.timeline.span import Span
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.capture.mesh import make_groups
from pytest_fxbucket.checks.placing import place
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.graph.portable import decode, digest, encode_module
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.stepping import state_and_batches, update


def run(rank: int, world: int, task: Task) -> Timed:
    """Warm up, take samples until there are enough, then a step of each variant for its memory, and some for its timeline."""
    with collector.paused():
        steps = {name: Step(name, rank, task.phases) for name in task.variants}
        timed = Timed({name: step.digests for name, step in steps.items()}, has_priority=come_first())
        take_samples(Rounds(steps, world), task.pacing, timed)
        timed.peak_bytes = {name: peak_bytes_of(step.run, device()) for name, step in steps.items()}
        if task.traced_steps:
            timed.spans = {name: step.traced(task.traced_steps) for name, step in steps.items()}
    return timed


def take_samples(rounds: Rounds, pacing: Pacing, timed: Timed) -> None:
    """Warm up, and take samples until there are enough; both go to ``timed``. All ranks call this alike."""
    begin, warm = time.monotonic(), rounds.fresh()
    while not is_warm(warm, rounds.shared_s(begin), pacing):
        rounds.add_one(warm)
    timed.warmup_rounds, timed.is_stable = len(next(iter(warm.values()))), has_settled(warm)
    timed.samples = rounds.fresh()
    while not is_enough(timed.samples, rounds.shared_s(begin), pacing):
        rounds.add_one(timed.samples)


class Timeable(Protocol):
    """A step that can be timed: only ``call`` counts."""

    name: str

    def prepare(self) -> None:
        """Everything before."""

    def call(self) -> None:
        """The step."""

    def settle(self) -> None:
        """Everything after."""


class Step:
    """One variant of the step with state of its own, which its steps update as training would."""

    def __init__(self, name: str, rank: int, phases: Sequence[PhaseTask]) -> None:
        self.name = name
        self._phases = phases
        for phase in phases:
            if phase.model is not None:
                import_model(phase.model, phase.where)  # it may register operators that the graph calls
        self.graphs = [decode(phase.graphs[name]) for phase in phases]
        self.digests = tuple(digest(encode_module(graph)) for graph in self.graphs)
        self._states: list[list[torch.Tensor]] = []
        self._batches = []
        for phase, graph in zip(phases, self.graphs, strict=True):
            make_groups(phase.mesh, rank)
            ensure_twins(graph.graph)
            place(graph, device())
            start, batches = state_and_batches(rank, phase)
            self._states.append([tensor.to(device(), copy=True) for tensor in start])
            self._batches.append([tensor.to(device()) for tensor in batches(0)])
        self._seed = phases[0].seed

    def run(self) -> None:
        """One step, and the update of its state."""
        self.prepare()
        self.call()
        self.settle()

    def traced(self, steps: int) -> tuple[tuple[tuple[Span, ...], ...], ...]:
        """Of each phase the spans of some steps with clocks in it."""
        mark(f"timeline of {self.name}")
        return tuple(
            traced_steps(graph, phase.marks[self.name], partial(self._run_with, number), steps)
            for number, (phase, graph) in enumerate(zip(self._phases, self.graphs, strict=True))
        )

    def _run_with(self, number: int, graph: fx.GraphModule) -> None:
        """One step with another graph as its phase ``number``; ranks begin together."""
        self.prepare()
        dist.barrier()
        self.call([graph if number == other else own for other, own in enumerate(self.graphs)])
        self.settle()

    def prepare(self) -> None:
        """Everything before the step that does not count."""
        torch.manual_seed(self._seed)
        self._given = [
            [*state, *(tensor.clone() for tensor in batch)] for state, batch in zip(self._states, self._batches, strict=True)
        ]

    def call(self, graphs: Sequence[fx.GraphModule] | None = None) -> None:
        """The step itself: every phase."""
        self._results = [graph(*given) for graph, given in zip(graphs or self.graphs, self._given, strict=True)]

    def settle(self) -> None:
        """What the step made becomes the state, outside of the clock, since a graph hands it out and others would keep it."""
        for phase, state, results in zip(self._phases, self._states, self._results, strict=True):
            update(state, list(results) if isinstance(results, list | tuple) else [results], phase)
        self._given, self._results = [], []


class Rounds:
    """Rounds of all variants, a step each; their order changes from round to round, so that none always follows another."""

    def __init__(self, steps: Mapping[str, Timeable], world: int) -> None:
        self._steps, self._world = steps, world
        self._number = count()

    def fresh(self) -> dict[str, list[float]]:
        """No samples yet."""
        return {name: [] for name in self._steps}

    def add_one(self, samples: dict[str, list[float]]) -> None:
        """Run a round and add each variant's sample."""
        number = next(self._number)
        own = {step.name: self._seconds(step, number) for step in self._in_turn(number)}
        mark(f"sharing times of round {number + 1}")
        for name, seconds in zip(samples, self._slowest([own[name] for name in samples]), strict=True):
            samples[name].append(seconds)

    def shared_s(self, begin: float) -> float:
        """Seconds since ``begin`` on rank 0's clock."""
        elapsed = torch.tensor([time.monotonic() - begin], dtype=torch.float64, device=device())
        dist.broadcast(elapsed, 0)
        return float(elapsed)

    def _in_turn(self, number: int) -> Iterator[Timeable]:
        steps = list(self._steps.values())
        first = number // 2 % len(steps)
        turned = steps[first:] + steps[:first]
        return iter(turned if number % 2 == 0 else turned[::-1])

    def _seconds(self, step: Timeable, number: int) -> float:
        mark(f"{step.name} round {number + 1}")
        step.prepare()
        dist.barrier()
        seconds = seconds_of(step.call, device())
        step.settle()
        return seconds

    def _slowest(self, own: Sequence[float]) -> list[float]:
        mine = torch.tensor(own, dtype=torch.float64, device=device())
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()
