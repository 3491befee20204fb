"""What is made of spans: exposed time, of the slowest rank in the median step; and a trace in the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from pytest_fxbucket.bench.measure import bucket_rows
from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.spans import BucketExposure, chrome_trace, exposed, middle_step, rows_of, to_json
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member


def waited(rank: int, launch_ns: int, wait_ns: int, end_ns: int, bucket: int = 0) -> tuple[Span, ...]:
    label = f"all_gather layers.{bucket}"
    return (
        Span(rank, "compute", "launch", label, "forward", launch_ns, launch_ns + 1, bucket),
        Span(rank, "compute", "compute", "layers.0", "forward", launch_ns + 1, wait_ns),
        Span(rank, "compute", "wait", label, "forward", wait_ns, end_ns, bucket),
        Span(rank, "communication", "flight", label, "forward", launch_ns, end_ns, bucket),
    )


def test_the_slowest_rank_of_each_step_and_the_median_of_steps() -> None:
    fast = [waited(0, 0, 10, 20), waited(0, 0, 10, 40), waited(0, 0, 10, 11)]
    slow = [waited(1, 5, 10, 110), waited(1, 5, 10, 12), waited(1, 5, 10, 1010)]
    assert exposed([fast, slow]) == {0: BucketExposure(pytest.approx(100e-9), pytest.approx(105e-9))}


def test_waits_of_one_bucket_add_up_on_a_rank_and_not_over_ranks() -> None:
    twice = (*waited(0, 0, 10, 20), Span(0, "compute", "wait", "all_gather layers.0", "forward", 30, 35, 0))
    assert exposed([[twice], [waited(1, 0, 10, 21)]])[0].exposed_s == pytest.approx(15e-9)


def test_what_nobody_waits_for_is_not_exposed() -> None:
    launch = Span(0, "compute", "launch", "all_gather layers.0", "forward", 3, 4, 7)
    assert exposed([[(launch,)]]) == {7: BucketExposure(0.0, 0.0)}


def test_waits_for_another_graphs_launches_belong_to_no_bucket() -> None:
    wait = Span(0, "compute", "wait", "what another graph launched", "backward", 3, 4)
    assert exposed([[(wait,)]]) == {}


def test_no_steps_say_nothing() -> None:
    assert exposed([]) == {}
    assert middle_step([]) == middle_step([[], []]) == ()


def test_the_step_that_is_drawn_is_the_median_one_of_all_ranks() -> None:
    first = [waited(0, 0, 10, length) for length in (90, 20, 50)]
    second = [waited(1, 0, 10, length) for length in (15, 15, 15)]
    drawn = middle_step([first, second])
    assert max(span.end_ns for span in drawn) == 50
    assert {span.rank for span in drawn} == {0, 1}
    assert max(span.end_ns for span in middle_step([first[:2]])) == 20


def bucket(fqn: str, size: int) -> Bucket:
    return Bucket(
        kind="all_gather", op="", group="0", dtype=None, numel=size, bytes=size, parts=2,
        members=(Member(fqn, 0, size // 2, 23),), direction="forward", launch=0, wait=1, first_use=None, backward_use=None,
        node="gather",
    )  # fmt: skip


def test_rows_are_launches_in_order_named_by_entry_or_unbucketed_by_parameter() -> None:
    reading = GraphAnalysis((bucket("layers.0.w", 8), bucket("layers.0.b", 4)), (), (), 9)
    steps = [[waited(0, 0, 10, 20, bucket=1)]]
    entries = {"layers.0.w": "layers.0", "layers.0.b": "layers.0"}
    rows = bucket_rows(reading, entries, "bucketed", steps)
    assert [(row["label"], row["direction"], row["bytes"]) for row in rows] == [
        ("all_gather layers.0", "forward", 8), ("all_gather layers.0 #2", "forward", 4),
    ]  # fmt: skip
    assert [row["exposed_s"] for row in rows] == [0.0, pytest.approx(10e-9)]
    assert [row["in_flight_s"] for row in rows] == [0.0, pytest.approx(20e-9)]
    assert [row["label"] for row in bucket_rows(reading, entries, "unbucketed", steps)] == [
        "all_gather layers.0.w", "all_gather layers.0.b",
    ]  # fmt: skip


def span(rank: int, stream: str, kind: Any, label: str, start: int, end: int, bucket: int = -1) -> Span:
    return Span(rank, stream, kind, label, "forward", start, end, bucket)


def traced(rank: int) -> list[Span]:
    return [
        span(rank, "compute", "launch", "all_gather a", 0, 1_500, 0),
        span(rank, "compute", "launch", "all_gather b", 1_500, 2_001, 1),
        span(rank, "compute", "wait", "all_gather a", 2_001, 9_000, 0),
        span(rank, "compute", "compute", "a", 9_000, 20_000),
        span(rank, "compute", "compute", "", 20_000, 20_000),
        span(rank, "compute", "wait", "all_gather b", 20_000, 20_500, 1),
        span(rank, "communication", "flight", "all_gather a", 0, 9_000, 0),
        span(rank, "communication", "flight", "all_gather b", 1_500, 20_500, 1),
    ]


SPANS = [*traced(10), *traced(2)]
TRACE = json.loads(to_json(chrome_trace(SPANS, {"plan": "llama <b>"})))
EVENTS: list[dict[str, Any]] = TRACE["traceEvents"]


def test_every_span_is_one_complete_event_in_microseconds() -> None:
    found = [(e["pid"], e["ts"], e["dur"], e["args"]["direction"]) for e in EVENTS if e["ph"] == "X"]
    wanted = [(s.rank, s.start_ns / 1000, (s.end_ns - s.start_ns) / 1000, "forward") for s in SPANS]
    assert sorted(found) == sorted(wanted)


def test_events_of_a_thread_never_overlap() -> None:
    threads = defaultdict(list)
    for event in EVENTS:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 6
    for events in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(events))


def test_ranks_and_streams_have_names_and_stand_in_order() -> None:
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in EVENTS if e["name"] == "thread_name"}
    assert [named[key] for key in sorted(named)] == ["compute", "communication", "communication (2)"] * 2
    processes = [(e["args"]["name"], e["pid"]) for e in EVENTS if e["name"] == "process_name"]
    assert processes == [("rank 2", 2), ("rank 10", 10)]
    assert len({(e["pid"], e["tid"]) for e in EVENTS if e["ph"] == "X"} - set(named)) == 0


def test_a_flow_begins_in_each_launch_and_ends_in_its_wait() -> None:
    starts = {e["id"]: e for e in EVENTS if e["ph"] == "s"}
    ends = {e["id"]: e for e in EVENTS if e["ph"] == "f"}
    assert len(starts) == len(ends) == 4
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"], start["pid"]) == (end["name"], end["cat"], end["pid"])
        assert end["bp"] == "e"
        (launch,) = (e for e in EVENTS if e["ph"] == "X" and _holds(e, start))
        (wait,) = (e for e in EVENTS if e["ph"] == "X" and _holds(e, end) and e["dur"])
        assert (launch["name"], wait["name"]) == (f"launch {start['name']}", f"wait {start['name']}")


def test_exposed_waits_are_coloured_and_compute_without_a_module_has_a_name() -> None:
    assert {e.get("cname") for e in EVENTS if e["name"].startswith("wait ")} == {"terrible"}
    assert {e["name"] for e in EVENTS if e["ph"] == "X" and e["cat"].startswith("compute")} == {"a", "(forward)"}
    assert all(not e["name"].startswith("wait") for e in EVENTS if e.get("cname") == "thread_state_runnable")


def test_equal_spans_in_any_order_give_equal_bytes() -> None:
    assert to_json(chrome_trace(SPANS[::-1])) == to_json(chrome_trace(SPANS))
    assert TRACE["otherData"] == {"plan": "llama <b>"}


def test_streams_of_a_gpu_stand_by_number_behind_the_host() -> None:
    streams = ["stream 20", "host", "stream 7", "odd"]
    spans = [span(0, stream, "compute", "a", 0, 1) for stream in streams]
    assert [stream for _, stream, _ in rows_of(spans)] == ["host", "odd", "stream 7", "stream 20"]


def _holds(event: dict[str, Any], end: dict[str, Any]) -> bool:
    same = (event["pid"], event["tid"]) == (end["pid"], end["tid"])
    return bool(same and event["ts"] <= end["ts"] < event["ts"] + max(event["dur"], 0.001))
