"""Runs in the ranks: a step in pipeline stages as the benchmark times it, all its variants in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pytest_fxbucket.bench.timeline.staged_steps import ClockedRun, traced_stages
from pytest_fxbucket.capture.from_plan import import_model
from pytest_fxbucket.checks.devices import place
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.pipeline.running import PipelinedRun, PipelinedTask
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.step.mesh import make_groups
from pytest_fxbucket.step.portable import decode, digest, encode_module
from pytest_fxbucket.step_runner import StepTask, Took, state_and_batches, update

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Mark, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTask(StepTask):
    """A step in pipeline stages in all its variants; inputs and outputs are those of one rank."""

    pipelined: Mapping[str, PipelinedTask]
    """By variant."""
    marks: Mapping[str, Mapping[str, tuple[Mark, ...]]] = field(default_factory=dict)
    """By variant and graph, where the clock is read in a traced step."""


class StagedStep:
    """One variant of the step with state of its own, which its steps update as training would."""

    def __init__(self, name: str, rank: int, task: StagedTask) -> None:
        self.name = name
        self._rank, self._task, self._pipelined = rank, task, task.pipelined[name]
        if task.model is not None:
            import_model(task.model, task.where)  # it may register operators that the graphs call
        self._graphs = {one.phase: decode(one.graph) for one in self._pipelined.graphs}
        self.digests = tuple(digest(encode_module(graph)) for graph in self._graphs.values())
        make_groups(task.mesh, rank)
        for graph in self._graphs.values():
            ensure_twins(graph.graph)
            place(graph, device())
        start, batches = state_and_batches(rank, task)
        self._batch = [tensor.to(device()) for tensor in batches(0)]
        state = [tensor.to(device(), copy=True) for tensor in start]
        self._run = PipelinedRun(self._graphs, self._pipelined, state, task)
        self._given: list[torch.Tensor] = []
        self._took: Took | None = None

    @property
    def state(self) -> Sequence[torch.Tensor]:
        """What it keeps, in input order."""
        return self._run.state

    def run(self) -> None:
        """One step, and the update of its state."""
        self.prepare()
        self.call()
        self.settle()

    def prepare(self) -> None:
        """Everything before the step that does not count."""
        torch.manual_seed(self._task.seed)
        self._given = [tensor.clone() for tensor in self._batch]

    def call(self) -> None:
        """The step itself: the whole schedule, and what comes after it."""
        self._took = self._run.taken(self._given, f"of {self.name}")

    def settle(self) -> None:
        """What the step made becomes the state, outside of the clock."""
        assert self._took is not None
        update(self._run.state, self._took.results, self._task)
        self._given, self._took = [], None

    def finish(self) -> None:
        """Nothing is left of a step."""

    def traced(self, steps: int) -> tuple[tuple[tuple[Span, ...], ...], ...]:
        """The spans of some steps with clocks in them, as those of one phase."""
        mark(f"timeline of {self.name}")
        marks = self._task.marks[self.name]
        clocked = ClockedRun(self._rank, self._graphs, marks, self._pipelined, self._run.state, self._task)
        return (traced_stages(clocked, self._begun, steps),)

    def _begun(self) -> Sequence[torch.Tensor]:
        self.prepare()
        dist.barrier()
        return self._given
