"""What torch's profiler saw of steps on a GPU, as spans: from the JSON that it exports, and nothing else.

The format is Kineto's: complete events of category ``user_annotation`` (ours, one around each mark, named by
:func:`range_name`), ``cuda_runtime`` and ``cuda_driver`` (a call that launches a kernel), ``kernel``, ``gpu_memcpy`` and
``gpu_memset`` (what ran, with the stream). What was launched has the ``args.correlation`` of its call. Times are microseconds
after ``baseTimeNanoseconds``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fxbucket.bench.timeline.span import Span

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Mark

HOST = "host"
"""Stream of what the CPU does: launches, and waits that block it."""
_RANGE = re.compile(r"fxbucket:(\d+)")
_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_ONE_RUN_NS = 10_000
"""Kernels of one mark that are no further apart are one span: it is the launch of each that takes this long."""


class Work(NamedTuple):
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


Step = tuple[int, tuple[Span, ...]]
"""When a step began, and its spans; nanoseconds on one clock for all processes of a machine."""


def range_name(mark: int) -> str:
    """Name of the profiler's range around mark number ``mark``."""
    return f"fxbucket:{mark}"


def steps_of(trace: Mapping[str, Any], marks: Sequence[Mark], rank: int) -> list[Step]:
    """Each step that ``trace`` has whole.

    A collective is in flight while its kernels run. A wait is exposed from where its stream has run all compute before it
    until the collective's kernels end. A collective without kernels, as gloo's, blocks the host in its wait.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(_ranges(events, base))
    work = _work_by_range(events, ranges, base)
    size = len(marks)
    steps = []
    for first in range(0, len(ranges) - size + 1, size or 1):
        own = ranges[first : first + size]
        if own and [one.mark for one in own] == list(range(size)):
            spans = _Reader(rank, marks, own, [work.get(first + i, []) for i in range(size)]).spans()
            steps.append((own[0].start, tuple(sorted(spans, key=lambda s: (s.start_ns, s.stream, s.end_ns)))))
    return steps


def _ranges(events: Sequence[Mapping[str, Any]], base: int) -> Iterator[Range]:
    for event in events:
        match = _RANGE.fullmatch(event.get("name", "")) if event.get("cat") == "user_annotation" else None
        if match is not None:
            yield Range(*_times(event, base), int(match[1]))


def _work_by_range(events: Sequence[Mapping[str, Any]], ranges: Sequence[Range], base: int) -> dict[int, list[Work]]:
    """Work by the number of the range in which its launching call stands."""
    starts = [one.start for one in ranges]
    called: dict[int, int] = {}
    for event in events:
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {}):
            start, _ = _times(event, base)
            number = bisect_right(starts, start) - 1
            if number >= 0 and start < ranges[number].end:
                called[event["args"]["correlation"]] = number
    found: dict[int, list[Work]] = {}
    for event in events:
        if event.get("cat") in _WORK and event.get("args", {}).get("correlation") in called:
            args = event["args"]
            one = Work(*_times(event, base), f"stream {args['stream']}", event.get("name", ""))
            found.setdefault(called[args["correlation"]], []).append(one)
    return {number: sorted(work) for number, work in found.items()}


def _times(event: Mapping[str, Any], base: int) -> tuple[int, int]:
    start = base + round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0) * 1000)


class _Reader:
    """One step on one rank, mark by mark; ``cursor`` is where compute's stream has got to."""

    def __init__(self, rank: int, marks: Sequence[Mark], ranges: Sequence[Range], work: Sequence[Sequence[Work]]) -> None:
        self.rank, self.marks, self.ranges, self.work = rank, marks, ranges, work
        ran = [one.stream for mark, each in zip(marks, work, strict=True) if mark.kind == "compute" for one in each]
        self.stream = max(sorted(set(ran)), key=ran.count, default=HOST)
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

    def _launch(self, mark: Mark, one: Range, work: Sequence[Work]) -> Iterator[Span]:
        self.launched[mark.bucket] = one.start
        yield self._span(HOST, mark, one.start, one.end)
        sending = [each for each in work if each.stream != self.stream or each.name.lower().startswith("nccl")]
        for each in sending:
            self.landed[mark.bucket] = max(self.landed.get(mark.bucket, 0), each.end)
            yield Span(self.rank, each.stream, "flight", mark.label, mark.direction, each.start, each.end, mark.bucket)
        yield from self._computes(mark, [each for each in work if each not in sending])

    def _wait(self, mark: Mark, one: Range) -> Iterator[Span]:
        landed = self.landed.get(mark.bucket)
        if landed is not None:
            yield self._span(self.stream, mark, self.cursor, max(self.cursor, landed))
            self.cursor = max(self.cursor, landed)
            return
        yield self._span(HOST, mark, one.start, one.end)
        if mark.bucket in self.launched:
            begin = self.launched[mark.bucket]
            yield Span(self.rank, "communication", "flight", mark.label, mark.direction, begin, one.end, mark.bucket)

    def _computes(self, mark: Mark, work: Sequence[Work]) -> Iterator[Span]:
        run: Work | None = None
        for each in work:
            self.cursor = max(self.cursor, each.end if each.stream == self.stream else 0)
            if run is not None and run.stream == each.stream and each.start - run.end <= _ONE_RUN_NS:
                run = run._replace(end=max(run.end, each.end))
                continue
            if run is not None:
                yield self._compute(mark, run)
            run = each
        if run is not None:
            yield self._compute(mark, run)

    def _compute(self, mark: Mark, run: Work) -> Span:
        return Span(self.rank, run.stream, "compute", mark.label, mark.direction, run.start, run.end)

    def _span(self, stream: str, mark: Mark, start: int, end: int) -> Span:
        return Span(self.rank, stream, mark.kind, mark.label, mark.direction, start, end, mark.bucket)
