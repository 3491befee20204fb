"""Runs in the ranks: steps under torch's profiler, with a range around each mark: the host's clock does not see kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_fxbucket.bench.timeline.inserted import opened
from pytest_fxbucket.bench.timeline.kineto import Step, range_name, steps_of
from pytest_fxbucket.errors import BenchmarkError

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Mark


def profiled_steps(
    graph_module: fx.GraphModule, marks: Sequence[Mark], run_step: Callable[[fx.GraphModule], None], steps: int, rank: int
) -> list[Step]:
    """Run ``steps`` steps, after one that is thrown away since the profiler starts in it; what it saw of each.

    Raises :class:`BenchmarkError` if the profiler did not see all of them whole.
    """
    ranged = with_ranges(graph_module, marks)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        for _ in range(steps + 1):
            run_step(ranged)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="fxbucket-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        found = steps_of(json.loads(path.read_text(encoding="utf-8")), marks, rank)
    if len(found) != steps + 1:
        raise BenchmarkError(f"torch's profiler saw {len(found)} whole steps on rank {rank}, of {steps + 1} that ran")
    return found[1:]


def with_ranges(graph_module: fx.GraphModule, marks: Sequence[Mark]) -> fx.GraphModule:
    """A copy of ``graph_module`` with a profiler's range around each mark.

    Raises :class:`BenchmarkError` if the graph lacks a marked node.
    """
    graph, first, returned = opened(graph_module, marks)
    range_ = None
    for number, node in enumerate(first):
        with graph.inserting_before(node):
            if range_ is not None:
                graph.call_function(_end, (range_,))
            range_ = graph.call_function(_begin, (range_name(number),))
    if range_ is not None:
        graph.call_function(_end, (range_,))
    graph.output(returned)
    return fx.GraphModule(graph_module, graph)


def _begin(name: str) -> record_function:
    started = record_function(name)
    started.__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
    return started


def _end(started: record_function) -> None:
    started.__exit__(None, None, None)
