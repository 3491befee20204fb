"""Runs in the ranks: a step with clocks between its nodes; on a GPU under torch's profiler, since its host sees no kernels.

The clocks are calls in a copy of the graph (some 60 ns each), not an interpreter around it, so that the code that runs is the
code that is timed elsewhere. They return plain integers and touch no tensor.

The profiler's events are read from the JSON that it exports. The format is Kineto's: complete events of category
``user_annotation`` (ours, one around each mark, named by :func:`range_name`), ``cuda_runtime`` and ``cuda_driver`` (a call that
launches a kernel), ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` (work that ran, with its stream). Work has the
``args.correlation`` of the call that launched it. Times are microseconds after ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed, fx
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_fxbucket.bench.timeline.marks import COMMUNICATION, COMPUTE, Span
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.ranks import device

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import ActivityMark


HOST = "host"
"""The stream of the CPU's own work beside a GPU: launches, and waits that block it."""
Stamps = tuple[int, ...]
"""Nanoseconds on the rank's clock at each mark, in order, and at the end of the graph."""
Step = tuple[int, tuple[Span, ...]]
"""(when a step began, its spans), in nanoseconds on the one clock of all processes of a machine."""
Firsts = Sequence[int]
"""From one rank: a number for its machine, then the begin of each step on that machine's clock."""
_RANGE = re.compile(r"fxbucket:(\d+)")
_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_ONE_RUN_NS = 10_000
"""Kernels of one mark with gaps no longer than this are one span: such a gap is only the time to launch the next kernel."""


def traced_steps(
    graph_module: fx.GraphModule, marks: Sequence[ActivityMark], run_step: Callable[[fx.GraphModule], None], steps: int
) -> tuple[tuple[Span, ...], ...]:
    """Run ``steps`` steps of ``graph_module`` with clocks at ``marks`` (on a GPU, profiled); the spans of each step.

    ``run_step`` runs one step with the graph that it is given, a copy of ``graph_module`` with equal results. It lets all ranks
    begin together and keeps state. All ranks call this alike. On every rank the times of a step count from when the first rank
    of its machine began it. Raises :class:`BenchmarkError` if the graph lacks a marked node.
    """
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    if device() == "cpu":
        taken: list[Stamps] = []
        clocked = with_clocks(graph_module, marks, taken.append)
        for _ in range(steps):
            run_step(clocked)
        found = [(stamps[0], spans_of(rank, marks, stamps)) for stamps in taken]
    else:
        found = profiled_steps(graph_module, marks, run_step, steps, rank)
    begins = shared_begins([first for first, _ in found])
    return tuple(since(begin, spans) for begin, (_, spans) in zip(begins, found, strict=True))


def with_clocks(graph_module: fx.GraphModule, marks: Sequence[ActivityMark], take: Callable[[Stamps], None]) -> fx.GraphModule:
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
    # One call at the end hands over all times, so that only the clock itself is read between the nodes.
    graph.call_function(keep, tuple(stamps))
    graph.output(returned)
    return fx.GraphModule(graph_module, graph)


def spans_of(rank: int, marks: Sequence[ActivityMark], stamps: Stamps) -> tuple[Span, ...]:
    """Spans of one step, by start, from the times of its marks, on the clock of ``stamps``.

    A collective counts as in flight from its launch to the end of its last wait; one without a wait has no flight.
    """
    spans = []
    launched: dict[int, tuple[ActivityMark, int]] = {}
    landed: dict[int, int] = {}
    for mark, (start, end) in zip(marks, pairwise(stamps), strict=True):
        spans.append(mark.span(rank, COMPUTE, start, end))
        if mark.kind == "launch":
            launched[mark.bucket] = mark, start
        elif mark.bucket in launched:
            landed[mark.bucket] = end
    for bucket, end in landed.items():
        mark, start = launched[bucket]
        spans.append(mark.span(rank, COMMUNICATION, start, end, "flight"))
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.stream, span.end_ns)))


def since(begin_ns: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    """``spans`` on a clock that starts at ``begin_ns``."""
    return tuple(replace(span, start_ns=span.start_ns - begin_ns, end_ns=span.end_ns - begin_ns) for span in spans)


def begins_of(mine: Firsts, everybody: Sequence[Firsts]) -> list[int]:
    """When each step began on the machine of ``mine``: when its first rank did.

    Only ranks of one machine are compared, since they share its monotonic clock.
    """
    return [min(column) for column in zip(*(firsts for machine, *firsts in everybody if machine == mine[0]), strict=True)]


def shared_begins(firsts: Sequence[int]) -> list[int]:
    """When each step began on this machine; ``firsts`` are the begins on this rank. All ranks call this alike."""
    # A tensor carries integers only, so the machine is named by 7 bytes of a digest, which fit into int64.
    mine = [int.from_bytes(sha256(_boot_id().encode()).digest()[:7], "big"), *firsts]
    if not distributed.is_initialized():
        return begins_of(mine, [mine])
    own = torch.tensor(mine, dtype=torch.int64, device=device())
    every = own.new_empty(distributed.get_world_size() * len(mine))
    distributed.all_gather_into_tensor(every, own)
    return begins_of(mine, every.view(-1, len(mine)).tolist())


def _boot_id() -> str:
    """A name of the machine until its next boot; a random one if the system has none, so that no other rank shares it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


class GraphWithoutOutput(NamedTuple):
    """A copy of a graph without its output node."""

    graph: fx.Graph
    first: list[fx.Node]
    """The node at which each mark begins."""
    returned: Any
    """The argument that the output node is to have."""


def opened(graph_module: fx.GraphModule, marks: Sequence[ActivityMark]) -> GraphWithoutOutput:
    """A copy of the graph, to add calls to. Raises :class:`BenchmarkError` if the graph lacks a marked node."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(graph_module.graph, copies)
    by_name = {node.name: copies[node] for node in graph_module.graph.nodes if node in copies}
    for mark in marks:
        if mark.node not in by_name:
            raise BenchmarkError(
                f"the graph that was sent has no node {mark.node}, at which {mark.kind} {mark.label} begins; "
                "the rank runs another graph than the one that was read"
            )
    return GraphWithoutOutput(graph, [by_name[mark.node] for mark in marks], returned)


def profiled_steps(
    graph_module: fx.GraphModule,
    marks: Sequence[ActivityMark],
    run_step: Callable[[fx.GraphModule], None],
    steps: int,
    rank: int,
) -> list[Step]:
    """Run ``steps`` steps under the profiler; the begin and spans of each.

    One step before them is thrown away, since the profiler starts in it. Raises :class:`BenchmarkError` if the profiler did not
    see all steps whole.
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


def with_ranges(graph_module: fx.GraphModule, marks: Sequence[ActivityMark]) -> fx.GraphModule:
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
    started.__enter__()
    return started


def _end(started: record_function) -> None:
    started.__exit__(None, None, None)


class StreamWork(NamedTuple):
    """A kernel, or a copy, on a stream."""

    start: int
    end: int
    stream: str
    name: str


class Range(NamedTuple):
    """One mark in one step, on the host."""

    start: int
    end: int
    mark: int


def range_name(mark: int) -> str:
    """Name of the profiler's range around mark number ``mark``."""
    return f"fxbucket:{mark}"


def steps_of(trace: Mapping[str, Any], marks: Sequence[ActivityMark], rank: int) -> list[Step]:
    """Each step of which ``trace`` has all ranges.

    A collective is in flight while its kernels run. A wait is exposed from when compute's stream has run all compute before the
    wait until the collective's kernels end. A collective without kernels, such as gloo's, blocks the host in its wait.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(_ranges(events, base))
    work = _work_by_range(events, ranges, base)
    size = len(marks)
    steps = []
    for first in (number for number, one in enumerate(ranges) if one.mark == 0):
        own = ranges[first : first + size]
        if [one.mark for one in own] == list(range(size)):  # if a range was lost, another stands in its place
            spans = _Reader(rank, marks, own, [work.get(first + i, []) for i in range(size)]).spans()
            steps.append((own[0].start, tuple(sorted(spans, key=lambda s: (s.start_ns, s.stream, s.end_ns)))))
    return steps


def _ranges(events: Sequence[Mapping[str, Any]], base: int) -> Iterator[Range]:
    for event in events:
        match = _RANGE.fullmatch(event.get("name", "")) if event.get("cat") == "user_annotation" else None
        if match is not None:
            yield Range(*_times(event, base), int(match[1]))


def _work_by_range(events: Sequence[Mapping[str, Any]], ranges: Sequence[Range], base: int) -> dict[int, list[StreamWork]]:
    """Kernels and copies, by the number of the range in which the call that launched them lies."""
    # First each call finds its range by time, then each piece of work its call by the correlation number.
    starts = [one.start for one in ranges]
    called: dict[int, int] = {}
    for event in events:
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {}):
            start, _ = _times(event, base)
            number = bisect_right(starts, start) - 1
            if number >= 0 and start < ranges[number].end:
                called[event["args"]["correlation"]] = number
    found: dict[int, list[StreamWork]] = {}
    for event in events:
        if event.get("cat") in _WORK and event.get("args", {}).get("correlation") in called:
            args = event["args"]
            one = StreamWork(*_times(event, base), f"stream {args['stream']}", event.get("name", ""))
            found.setdefault(called[args["correlation"]], []).append(one)
    return {number: sorted(work) for number, work in found.items()}


def _times(event: Mapping[str, Any], base: int) -> tuple[int, int]:
    start = base + round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0) * 1000)


class _Reader:
    """Makes spans of one step on one rank, mark by mark.

    ``stream`` is the stream with most of compute's kernels, and ``cursor`` the time up to which it has run what came before.
    """

    def __init__(
        self, rank: int, marks: Sequence[ActivityMark], ranges: Sequence[Range], work: Sequence[Sequence[StreamWork]]
    ) -> None:
        self.rank, self.marks, self.ranges, self.work = rank, marks, ranges, work
        ran = [one.stream for mark, each in zip(marks, work, strict=True) if mark.kind == "compute" for one in each]
        self.stream = max(sorted(set(ran)), key=ran.count, default=HOST)  # sorted: of equally many always the same
        self.cursor = ranges[0].start
        self.landed: dict[int, int] = {}
        self.launched: dict[int, int] = {}

    def spans(self) -> Iterator[Span]:
        for mark, one, work in zip(self.marks, self.ranges, self.work, strict=True):
            if mark.kind == "launch":
                yield from self._launch(mark, one, work)
            elif mark.kind == "wait":
                yield from self._wait(mark, one)
            else:
                yield from self._computes(mark, work)

    def _launch(self, mark: ActivityMark, one: Range, work: Sequence[StreamWork]) -> Iterator[Span]:
        self.launched[mark.bucket] = one.start
        yield mark.span(self.rank, HOST, one.start, one.end)
        # A launch's range may also hold kernels on compute's stream: only those on another stream, or NCCL's, communicate.
        sending = [each for each in work if each.stream != self.stream or each.name.lower().startswith("nccl")]
        for each in sending:
            self.landed[mark.bucket] = max(self.landed.get(mark.bucket, 0), each.end)
            yield mark.span(self.rank, each.stream, each.start, each.end, "flight")
        yield from self._computes(mark, [each for each in work if each not in sending])

    def _wait(self, mark: ActivityMark, one: Range) -> Iterator[Span]:
        landed = self.landed.get(mark.bucket)
        if landed is not None:
            # The host does not block here. The stream does, from when its earlier work is done: that is the exposed time.
            yield mark.span(self.rank, self.stream, self.cursor, max(self.cursor, landed))
            self.cursor = max(self.cursor, landed)
            return
        yield mark.span(self.rank, HOST, one.start, one.end)
        if mark.bucket in self.launched:
            yield mark.span(self.rank, COMMUNICATION, self.launched[mark.bucket], one.end, "flight")

    def _computes(self, mark: ActivityMark, work: Sequence[StreamWork]) -> Iterator[Span]:
        runs: list[StreamWork] = []
        for each in work:
            self.cursor = max(self.cursor, each.end if each.stream == self.stream else 0)
            if runs and runs[-1].stream == each.stream and each.start - runs[-1].end <= _ONE_RUN_NS:
                runs[-1] = runs[-1]._replace(end=max(runs[-1].end, each.end))
            else:
                runs.append(each)
        for run in runs:
            # Kernels that a launch's range has beside the collective, such as copies, are no part of the bucket's time.
            yield replace(mark.span(self.rank, run.stream, run.start, run.end, "compute"), bucket=-1)
