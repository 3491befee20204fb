"""Runs in the ranks: a step in pipeline stages with clocks around its graphs, in them, and around waits for transfers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.bench.timeline.bubble import lane_of
from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.traced_steps import shared_begins, since, spans_of, with_clocks
from pytest_fxbucket.compat.pipelining import Transfer, watched_waits
from pytest_fxbucket.pipeline.running import PipelinedRun, PipelinedTask
from pytest_fxbucket.ranks import device
from pytest_fxbucket.step.pipelined import UPDATE, stage_of
from pytest_fxbucket.step_runner import StepTask, update

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from pytest_fxbucket.bench.timeline.marks import Mark
    from pytest_fxbucket.bench.timeline.traced_steps import Stamps


class ClockedRun(PipelinedRun):
    """Takes steps as it does, and keeps the spans of the last one."""

    def __init__(
        self,
        rank: int,
        graphs: Mapping[str, fx.GraphModule],
        marks: Mapping[str, Sequence[Mark]],
        pipelined: PipelinedTask,
        state: list[torch.Tensor],
        task: StepTask,
    ) -> None:
        """On a GPU ``marks`` are not read: a host's clock between two launches says nothing of kernels."""
        stamps: list[Stamps] = []
        if is_on_cpu := device() == "cpu":
            graphs = {phase: with_clocks(graph, marks[phase], stamps.append) for phase, graph in graphs.items()}
        super().__init__(graphs, pipelined, state, task)
        self._rank, self._marks, self._is_on_cpu, self._stamps = rank, marks, is_on_cpu, stamps
        self.spans: list[Span] = []

    def taken(self, batch: Sequence[torch.Tensor], step: str) -> Any:
        """Take a step, with what is waited for."""
        self.spans.clear()
        with watched_waits(self._waiting):
            return super().taken(batch, step)

    def run_graph(self, phase: str, graph: fx.GraphModule, microbatch: int | None, given: Sequence[Any]) -> list[Any]:
        """Results of the graph ``phase``; spans of it, and of what is in it."""
        stage = stage_of(phase)
        work = phase if stage is None else phase.split(" ", 2)[2]
        self._stamps.clear()
        start = self._now()
        results = super().run_graph(phase, graph, microbatch, given)
        label = work if microbatch is None else f"{work} {microbatch}"
        direction = "optimizer" if phase == UPDATE else "forward" if work in ("unshard", "forward") else "backward"
        self.spans.append(Span(self._rank, lane_of(stage), "compute", label, direction, start, self._now()))
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
            torch.cuda.synchronize()  # work is over when its kernels are
        return time.monotonic_ns()


def traced_stages(run: ClockedRun, begin: Callable[[], Sequence[torch.Tensor]], steps: int) -> tuple[tuple[Span, ...], ...]:
    """The spans of ``steps`` steps, each of which ``begin`` gives the batch for when all ranks begin together.

    All ranks call this alike. Steps begin when the first rank of this machine does.
    """
    found = []
    for _ in range(steps):
        took = run.taken(begin(), "traced")
        update(run.state, took.results, run.task)
        found.append(sorted(run.spans, key=lambda span: (span.start_ns, span.stream, span.end_ns)))
    begins = shared_begins([spans[0].start_ns for spans in found])
    return tuple(since(first, spans) for first, spans in zip(begins, found, strict=True))
