"""Spans from what torch's profiler exports: from a trace of a GPU by hand, and from the profiler itself on the CPU."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.bench.timeline.marks import ActivityMark, Span
from pytest_fxbucket.bench.timeline.spans import exposed
from pytest_fxbucket.bench.timeline.traced_steps import profiled_steps, range_name, steps_of
from pytest_fxbucket.errors import BenchmarkError

MARKS = (
    ActivityMark("copy", "compute", "copy-in layers.0", "forward"),
    ActivityMark("launch", "launch", "all_gather layers.0", "forward", 0),
    ActivityMark("mm", "compute", "embed", "forward"),
    ActivityMark("wait", "wait", "all_gather layers.0", "forward", 0),
    ActivityMark("mm_1", "compute", "layers.0", "forward"),
)
BY_HAND = Path(__file__).with_name("cuda_by_hand.trace.json")
BASE = 1_700_000_000_000_000_000
Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def kernel(correlation: int, called: float, ts: float, dur: float, stream: int, name: str = "gemm") -> list[Event]:
    """A call on the host at ``called``, and its kernel, in microseconds."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", called, 1, correlation=correlation),
        event("kernel", name, ts, dur, correlation=correlation, stream=stream, device=0),
    ]


def step(at: float, correlation: int, gather_us: float) -> list[Event]:
    """Host: a range of 10 us for each mark. Stream 7 computes, stream 20 gathers for ``gather_us`` from 25 us on."""
    ranges = [event("user_annotation", range_name(i), at + 10 * i, 10) for i in range(len(MARKS))]
    on_gpu = [event("gpu_user_annotation", range_name(i), at + 40 * i, 10) for i in range(len(MARKS))]
    return [
        *ranges,
        *on_gpu,
        *kernel(correlation, at + 2, at + 5, 15, 7, "cat"),
        *kernel(correlation + 1, at + 12, at + 25, gather_us, 20, "ncclDevKernel_AllGather_RING_LL"),
        *kernel(correlation + 2, at + 22, at + 30, 20, 7),
        *kernel(correlation + 3, at + 24, at + 52, 8, 7),
        *kernel(correlation + 4, at + 42, at + max(60, 25 + gather_us), 30, 7),
    ]


def told(spans: tuple[Span, ...], begin_ns: int) -> list[tuple[str, str, str, float, float]]:
    """Kind, label, stream, and microseconds."""
    return [(s.kind, s.label, s.stream, (s.start_ns - begin_ns) / 1e3, (s.end_ns - begin_ns) / 1e3) for s in spans]


def trace(*events: Event) -> dict[str, Any]:
    return {"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_an_exposed_wait_goes_from_the_end_of_compute_to_the_end_of_the_collective() -> None:
    ((begin, spans),) = steps_of(trace(*step(100, 1, gather_us=75)), MARKS, 3)
    assert begin == BASE + 100_000
    assert told(spans, begin) == [
        ("compute", "copy-in layers.0", "stream 7", 5, 20),
        ("launch", "all_gather layers.0", "host", 10, 20),
        ("flight", "all_gather layers.0", "stream 20", 25, 100),
        ("compute", "embed", "stream 7", 30, 60),
        ("wait", "all_gather layers.0", "stream 7", 60, 100),
        ("compute", "layers.0", "stream 7", 100, 130),
    ]
    assert {span.rank for span in spans} == {3}
    found = exposed([[spans]])[0]
    assert (found.exposed_s, found.in_flight_s) == (pytest.approx(40e-6), pytest.approx(75e-6))


def test_a_collective_that_ends_before_compute_does_is_not_exposed() -> None:
    ((begin, spans),) = steps_of(trace(*step(100, 1, gather_us=10)), MARKS, 0)
    (wait,) = (span for span in spans if span.kind == "wait")
    assert told((wait,), begin) == [("wait", "all_gather layers.0", "stream 7", 60, 60)]


def test_the_second_of_two_waits_in_a_row_blocks_from_the_end_of_the_first_on() -> None:
    marks = (
        ActivityMark("l0", "launch", "a", "forward", 0), ActivityMark("l1", "launch", "b", "forward", 1),
        ActivityMark("mm", "compute", "m", "forward"),
        ActivityMark("w0", "wait", "a", "forward", 0), ActivityMark("w1", "wait", "b", "forward", 1),
    )  # fmt: skip
    ranges = [event("user_annotation", range_name(i), 10 * i, 10) for i in range(5)]
    events = [*kernel(1, 1, 20, 40, 20, "nccl"), *kernel(2, 11, 60, 30, 20, "nccl"), *kernel(3, 21, 25, 5, 7)]
    ((begin, spans),) = steps_of(trace(*ranges, *events), marks, 0)
    waits = tuple(span for span in spans if span.kind == "wait")
    assert told(waits, begin) == [("wait", "a", "stream 7", 30, 60), ("wait", "b", "stream 7", 60, 90)]


@pytest.mark.parametrize("start", [20, 500, 2000])
def test_steps_are_parted_and_one_that_is_not_whole_is_left_out(start: int) -> None:
    whole = [*step(100, 1, 75), *step(1000, 10, 10)]
    begun = [event("user_annotation", range_name(i), start + 10 * i, 10) for i in range(3)]
    found = steps_of(trace(*begun, *reversed(whole)), MARKS, 0)
    assert [begin - BASE for begin, _ in found] == [100_000, 1_000_000]
    assert [len(spans) for _, spans in found] == [6, 6]


def test_kernels_far_apart_are_spans_of_their_own_and_what_no_range_launched_is_none() -> None:
    stray = kernel(9, 700, 705, 5, 7)
    ((begin, spans),) = steps_of(trace(*step(100, 1, 75), *kernel(50, 126, 195, 5, 7), *stray), MARKS, 0)
    embed = tuple(span for span in spans if span.label == "embed")
    assert told(embed, begin) == [("compute", "embed", "stream 7", 30, 60), ("compute", "embed", "stream 7", 95, 100)]
    assert all(span.end_ns <= begin + 130_000 for span in spans)


def test_a_trace_as_kineto_writes_one_tells_flights_from_compute() -> None:
    """Written by hand after Kineto's format, calls without kernels, flows and all; it was not recorded on a GPU."""
    marks = (
        *MARKS,
        ActivityMark("launch_1", "launch", "reduce_scatter layers.0", "backward", 1),
        ActivityMark("wait_1", "wait", "reduce_scatter layers.0", "backward", 1),
        ActivityMark("add", "compute", "optimizer", "optimizer"),
    )
    ((begin, spans),) = steps_of(json.loads(BY_HAND.read_text(encoding="utf-8")), marks, 0)
    assert begin == BASE + 5_000_000
    assert told(spans, begin) == [
        ("compute", "copy-in layers.0", "stream 7", 10, 22),
        ("launch", "all_gather layers.0", "host", 20, 50),
        ("flight", "all_gather layers.0", "stream 20", 40, 100.5),
        ("compute", "embed", "stream 7", 60, 75),
        ("wait", "all_gather layers.0", "stream 7", 75, 100.5),
        ("launch", "reduce_scatter layers.0", "host", 100, 140),
        ("compute", "layers.0", "stream 7", 100.5, 130.5),
        ("compute", "reduce_scatter layers.0", "stream 7", 131.5, 136.5),  # its copy in
        ("wait", "reduce_scatter layers.0", "stream 7", 136.5, 177),
        ("flight", "reduce_scatter layers.0", "stream 24", 137, 177),
        ("compute", "optimizer", "stream 7", 177, 189),
    ]


def doubled() -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for mark in MARKS:
        value = graph.call_function(operator.add, (value, 1), name=mark.node)
    graph.output((value,))
    return fx.GraphModule({}, graph)


def test_torchs_own_profiler_on_the_cpu_where_waits_block_the_host() -> None:
    results: list[torch.Tensor] = []
    found = profiled_steps(doubled(), MARKS, lambda graph: results.append(graph(torch.zeros(3))[0]), 2, 0)
    assert [result.tolist() for result in results] == [[5.0] * 3] * 3
    assert len(found) == 2
    for begin, spans in found:
        kinds = [(span.kind, span.stream) for span in spans]
        assert sorted(kinds) == [("flight", "communication"), ("launch", "host"), ("wait", "host")]
        launch, wait, flight = (next(span for span in spans if span.kind == kind) for kind in ("launch", "wait", "flight"))
        assert begin <= launch.start_ns == flight.start_ns
        assert flight.end_ns == wait.end_ns
    assert found[0][0] < found[1][0]


def test_a_profiler_that_saw_too_little_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="torch's profiler saw 0 whole steps on rank 5, of 3 that ran"):
        profiled_steps(doubled(), MARKS, lambda graph: None, 2, 5)
