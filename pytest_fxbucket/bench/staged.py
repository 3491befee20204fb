"""Runs in the ranks: a step in pipeline stages, timed by the benchmark or traced with clocks in its graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_fxbucket.bench.timed_graphs import ready_graphs
from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.spans import lane_of
from pytest_fxbucket.bench.timeline.traced_steps import shared_begins, since, spans_of, with_clocks
from pytest_fxbucket.compat.pipelining import Transfer, watched_waits
from pytest_fxbucket.pipeline.running import PipelinedRun, PipelinedTask
from pytest_fxbucket.ranks import device, mark
from pytest_fxbucket.step.pipelined import UPDATE, stage_of
from pytest_fxbucket.step_runner import StepOutcome, StepTask, placed, state_and_batches, update

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from pytest_fxbucket.bench.timeline.marks import ActivityMark
    from pytest_fxbucket.bench.timeline.traced_steps import Stamps


class ClockedRun(PipelinedRun):
    """A pipelined run with clocks in it, which keeps the spans of its last step."""

    def __init__(
        self,
        rank: int,
        graphs: Mapping[str, fx.GraphModule],
        marks: Mapping[str, Sequence[ActivityMark]],
        pipelined: PipelinedTask,
        state: list[torch.Tensor],
        task: StepTask,
    ) -> None:
        """On a GPU ``marks`` are not used: the host's clock between two launches does not say when kernels run."""
        stamps: list[Stamps] = []
        if is_on_cpu := device() == "cpu":
            graphs = {phase: with_clocks(graph, marks[phase], stamps.append) for phase, graph in graphs.items()}
        super().__init__(graphs, pipelined, state, task)
        self._rank, self._marks, self._is_on_cpu, self._stamps = rank, marks, is_on_cpu, stamps
        self.spans: list[Span] = []

    def taken(self, batch: Sequence[torch.Tensor], step: str) -> Any:
        """Take a step, and note its waits for other stages as spans."""
        self.spans.clear()
        with watched_waits(self._waiting):
            return super().taken(batch, step)

    def run_graph(self, phase: str, graph: fx.GraphModule, microbatch: int | None, given: Sequence[Any]) -> list[Any]:
        """Run the graph ``phase`` and give its results; note a span of it, and spans of the marks in it."""
        stage = stage_of(phase)
        work = phase if stage is None else phase.split(" ", 2)[2]  # "stage 3 forward": forward
        self._stamps.clear()
        start = self._now()  # on a GPU this waits for the kernels before, which are no part of this graph's span
        results = super().run_graph(phase, graph, microbatch, given)
        label = work if microbatch is None else f"{work} {microbatch}"
        direction = "optimizer" if phase == UPDATE else "forward" if work in ("unshard", "forward") else "backward"
        self.spans.append(Span(self._rank, lane_of(stage), "compute", label, direction, start, self._now()))
        # On a GPU the graphs have no clocks, and each stays a single span.
        for stamps in self._stamps:
            self.spans += spans_of(self._rank, self._marks[phase], stamps)
        return results

    @contextmanager
    def _waiting(self, transfers: Sequence[Transfer]) -> Iterator[None]:
        start = self._now()
        yield
        end, first = self._now(), transfers[0]
        label = " and ".join(f"{one.kind} {one.direction} {one.microbatch}" for one in transfers)
        self.spans.append(Span(self._rank, lane_of(first.stage), "wait", label, first.direction, start, end))

    def _now(self) -> int:
        if not self._is_on_cpu:
            torch.cuda.synchronize()  # a graph is over when its kernels are
        return time.monotonic_ns()


def traced_stages(run: ClockedRun, begin: Callable[[], Sequence[torch.Tensor]], steps: int) -> tuple[tuple[Span, ...], ...]:
    """The spans of ``steps`` steps; ``begin`` lets all ranks begin a step together and gives its batch.

    All ranks call this alike. Times count from when the first rank of this machine began the step.
    """
    found = []
    for _ in range(steps):
        took = run.taken(begin(), "traced")
        update(run.state, took.results, run.task)
        found.append(sorted(run.spans, key=lambda span: (span.start_ns, span.stream, span.end_ns)))
    begins = shared_begins([spans[0].start_ns for spans in found])
    return tuple(since(first, spans) for first, spans in zip(begins, found, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTask(StepTask):
    """A step in pipeline stages in all its variants; inputs and outputs are those of one rank."""

    pipelined: Mapping[str, PipelinedTask]
    """By variant."""
    marks: Mapping[str, Mapping[str, tuple[ActivityMark, ...]]] = field(default_factory=dict)
    """By variant and graph, where the clock is read in a traced step."""


class StagedVariant:
    """One variant of the step with state of its own, which its steps update as training would."""

    def __init__(self, name: str, rank: int, task: StagedTask) -> None:
        self.name = name
        self._rank, self._task, self._pipelined = rank, task, task.pipelined[name]
        self._graphs, self.digests, numbers = ready_graphs(rank, task, self._pipelined.graphs)
        start, batches = state_and_batches(rank, task)
        self._batch = [tensor.to(device()) for tensor in batches(0)]
        state = placed(start, task.inputs, numbers)
        self._run = PipelinedRun(self._graphs, self._pipelined, state, task)
        self._given: list[torch.Tensor] = []
        self._took: StepOutcome | None = None

    @property
    def state(self) -> Sequence[torch.Tensor]:
        """The tensors that it keeps between steps, in input order."""
        return self._run.state

    def run(self) -> None:
        """One step, and the update of its state."""
        self.prepare()
        self.call()
        self.settle()

    def prepare(self) -> None:
        """Seed, and get the inputs of the step."""
        torch.manual_seed(self._task.seed)
        self._given = [tensor.clone() for tensor in self._batch]

    def call(self) -> None:
        """Run the step itself: the whole schedule, then ties and the update."""
        self._took = self._run.taken(self._given, f"of {self.name}")

    def settle(self) -> None:
        """Make the results of the step the new state, which is not timed."""
        assert self._took is not None
        update(self._run.state, self._took.results, self._task)
        self._given, self._took = [], None

    def finish(self) -> None:
        """Do nothing, since a step in stages leaves no work to the next one."""

    def traced(self, steps: int) -> tuple[tuple[tuple[Span, ...], ...], ...]:
        """Run some steps with clocks in their graphs; their spans, as if the whole step were one phase."""
        mark(f"timeline of {self.name}")
        marks = self._task.marks[self.name]
        clocked = ClockedRun(self._rank, self._graphs, marks, self._pipelined, self._run.state, self._task)
        return (traced_stages(clocked, self._begun, steps),)

    def _begun(self) -> Sequence[torch.Tensor]:
        self.prepare()
        dist.barrier()
        return self._given
