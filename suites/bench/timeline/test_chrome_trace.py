"""The trace holds to the Trace Event Format: threads without overlap, named processes, flows that end in their waits."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.spans import chrome_trace, rows_of, to_json


def span(rank: int, stream: str, kind: Any, label: str, start: int, end: int, bucket: int = -1) -> Span:
    return Span(rank, stream, kind, label, "forward", start, end, bucket)


def step(rank: int) -> list[Span]:
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


SPANS = [*step(10), *step(2)]
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
