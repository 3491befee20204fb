"""Runs in the ranks: a step with clocks between its nodes.

The clocks are calls in a copy of the graph (some 60 ns each), not an interpreter around it, so that what runs is
what is measured elsewhere. They return plain integers and touch no tensor. On GPUs torch's profiler takes their place.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed, fx

from pytest_fxbucket.bench.timeline.inserted import opened
from pytest_fxbucket.bench.timeline.span import Span
from pytest_fxbucket.ranks import device

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Mark

COMPUTE, COMMUNICATION = "compute", "communication"
Stamps = tuple[int, ...]
"""Nanoseconds on the rank's clock at each mark, in order, and at the end."""


def traced_steps(
    graph_module: fx.GraphModule, marks: Sequence[Mark], run_step: Callable[[fx.GraphModule], None], steps: int
) -> tuple[tuple[Span, ...], ...]:
    """Run ``steps`` steps of ``graph_module`` with clocks at ``marks`` (on a GPU, profiled); the spans of each step.

    ``run_step`` runs one step of the graph it is given, whose results are those of ``graph_module``: it lets all ranks begin
    together and keeps state. All ranks call this alike. Steps begin, on every rank of a machine, when the first of its ranks
    begins. Raises :class:`BenchmarkError` if the graph lacks a marked node.
    """
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    if device() == "cpu":
        taken: list[Stamps] = []
        clocked = with_clocks(graph_module, marks, taken.append)
        for _ in range(steps):
            run_step(clocked)
        found = [(stamps[0], spans_of(rank, marks, stamps)) for stamps in taken]
    else:
        from pytest_fxbucket.bench.timeline.profiled import profiled_steps

        found = profiled_steps(graph_module, marks, run_step, steps, rank)
    begins = _begins([first for first, _ in found])
    return tuple(since(begin, spans) for begin, (_, spans) in zip(begins, found, strict=True))


def with_clocks(graph_module: fx.GraphModule, marks: Sequence[Mark], take: Callable[[Stamps], None]) -> fx.GraphModule:
    """A copy of ``graph_module`` that gives ``take`` the times at which ``marks`` begin, and at which the last one ends.

    Raises :class:`BenchmarkError` if the graph lacks a marked node.
    """
    graph, first, returned = opened(graph_module, marks)
    stamps = []
    for node in first:
        with graph.inserting_before(node):
            stamps.append(graph.call_function(time.monotonic_ns))

    def keep(*times: int) -> None:
        take(times)

    stamps.append(graph.call_function(time.monotonic_ns))
    graph.call_function(keep, tuple(stamps))
    graph.output(returned)
    return fx.GraphModule(graph_module, graph)


def spans_of(rank: int, marks: Sequence[Mark], stamps: Stamps) -> tuple[Span, ...]:
    """Spans of one step, by start, from the times of its marks; each launch that is waited for is in flight until then.

    On the clock of ``stamps``.
    """
    spans = []
    launched: dict[int, tuple[Mark, int]] = {}
    landed: dict[int, int] = {}
    for mark, (start, end) in zip(marks, pairwise(stamps), strict=True):
        spans.append(Span(rank, COMPUTE, mark.kind, mark.label, mark.direction, start, end, mark.bucket))
        if mark.kind == "launch":
            launched[mark.bucket] = mark, start
        elif mark.bucket in launched:
            landed[mark.bucket] = end
    for bucket, end in landed.items():
        mark, start = launched[bucket]
        spans.append(Span(rank, COMMUNICATION, "flight", mark.label, mark.direction, start, end, bucket))
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.stream, span.end_ns)))


def since(begin_ns: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    """``spans`` on a clock that starts at ``begin_ns``."""
    return tuple(replace(span, start_ns=span.start_ns - begin_ns, end_ns=span.end_ns - begin_ns) for span in spans)


Firsts = Sequence[int]
"""A number for a rank's machine, and on its clock the begin of each step."""


def begins_of(mine: Firsts, everybody: Sequence[Firsts]) -> list[int]:
    """When each step began: when the first rank of my machine did. All processes of one machine share its monotonic clock."""
    return [min(column) for column in zip(*(firsts for machine, *firsts in everybody if machine == mine[0]), strict=True)]


def _begins(firsts: Sequence[int]) -> list[int]:
    mine = [int.from_bytes(sha256(_boot_id().encode()).digest()[:7], "big"), *firsts]
    if not distributed.is_initialized():
        return begins_of(mine, [mine])
    own = torch.tensor(mine, dtype=torch.int64, device=device())
    every = own.new_empty(distributed.get_world_size() * len(mine))
    distributed.all_gather_into_tensor(every, own)
    return begins_of(mine, every.view(-1, len(mine)).tolist())


def _boot_id() -> str:
    """The machine, until it is started anew; a random one where the system tells none, so that nobody shares its clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
