"""Runs in the ranks: steps of a plan's graphs with clocks in them, and without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, fx

from pytest_fxbucket.bench.timeline.marks import ActivityMark, Span
from pytest_fxbucket.bench.timeline.traced_steps import traced_steps
from pytest_fxbucket.checks.bitwise.job import BitwiseTask, bits, state_and_batches
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.step.mesh import make_groups
from pytest_fxbucket.step.portable import decode


@dataclass(frozen=True)
class Traced:
    task: BitwiseTask
    marks: dict[str, tuple[ActivityMark, ...]]
    """Of the unbucketed and of the bucketed graph."""


def trace(rank: int, world: int, traced: Traced) -> tuple[dict[str, tuple[tuple[Span, ...], ...]], list[str]]:
    """Spans of each step by variant; names of what differs from a run of the same graph without clocks."""
    task = traced.task
    make_groups(task.mesh, rank)
    start, batches = state_and_batches(rank, task)
    spans, different = {}, []
    for variant, portable in (("unbucketed", task.unbucketed), ("bucketed", task.bucketed)):
        graph = decode(portable)
        ensure_twins(graph.graph)
        seen: list[list[torch.Tensor]] = []

        def run_step(module: fx.GraphModule, seen: list[list[torch.Tensor]] = seen) -> None:
            given = [tensor.clone() for tensor in (*start, *batches(0))]
            distributed.barrier()
            torch.manual_seed(0)
            results: Any = module(*given)
            seen.append([*given, *results])

        run_step(graph)
        spans[variant] = traced_steps(graph, traced.marks[variant], run_step, task.steps)
        assert len(seen) == task.steps + 1
        for clocked in seen[1:]:
            pairs = zip(seen[0], clocked, strict=True)
            different += [f"{variant} {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(bits(a), bits(b))]
    return spans, different
