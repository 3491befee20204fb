"""A timeline in the Trace Event Format, which Chrome's tracing and Perfetto read.

The format: "Trace Event Format", Google, 2016. Complete events (``X``), metadata (``M``), and a flow (``s``, ``f``) from each
launch to its wait. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.timeline.lanes import Row, rows_of

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.span import Span

_COLOURS = {"wait": "terrible", "launch": "thread_state_runnable", "flight": "thread_state_iowait"}
"""Of Chrome's own palette: what is exposed is red."""


def chrome_trace(spans: Iterable[Span], about: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The trace of one step: a process for each rank, a thread for each stream. ``about``: what else is to be said of it.

    What is in flight at once on one stream stands on several threads, since a thread's events may not overlap.
    """
    rows = rows_of(spans)
    thread = {row: number for number, row in enumerate(rows)}
    events = [*_names(thread)]
    for row, row_spans in rows.items():
        events += [_event(span, thread[row]) for span in row_spans]
    events += _flows(rows, thread)
    return {"displayTimeUnit": "ms", "otherData": dict(about or {}), "traceEvents": events}


def to_json(trace: Mapping[str, Any]) -> str:
    """``trace`` as text, the same for an equal one."""
    return json.dumps(trace, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def _names(thread: Mapping[Row, int]) -> Iterator[dict[str, Any]]:
    for rank in dict.fromkeys(rank for rank, _, _ in thread):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for (rank, stream, lane), tid in thread.items():
        name = f"{stream} ({lane})" if lane > 1 else stream
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}


def _event(span: Span, tid: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": f"{span.kind} {span.label}" if span.kind in ("launch", "wait") else span.label or f"({span.direction})",
        "cat": f"{span.kind},{span.direction}",
        "pid": span.rank,
        "tid": tid,
        "ts": _us(span.start_ns),
        "dur": _us(span.end_ns - span.start_ns),
        "args": {"direction": span.direction, **({"bucket": span.bucket} if span.bucket >= 0 else {})},
    }
    if span.kind in _COLOURS:
        event["cname"] = _COLOURS[span.kind]
    return event


def _flows(rows: Mapping[Row, Iterable[Span]], thread: Mapping[Row, int]) -> Iterator[dict[str, Any]]:
    """An arrow from each launch to each wait for it; both ends lie within their events, by which viewers find them."""
    launches = {
        (span.rank, span.bucket): (span, thread[row]) for row, spans in rows.items() for span in spans if span.kind == "launch"
    }
    number = 0
    for row, spans in rows.items():
        for wait in spans:
            if wait.kind == "wait" and (wait.rank, wait.bucket) in launches:
                launch, tid = launches[wait.rank, wait.bucket]
                number += 1
                shared = {"name": wait.label, "cat": "flow", "id": number, "pid": wait.rank}
                yield {**shared, "ph": "s", "tid": tid, "ts": _us(launch.start_ns)}
                yield {**shared, "ph": "f", "bp": "e", "tid": thread[row], "ts": _us(wait.start_ns)}


def _us(ns: int) -> float:
    return round(ns / 1000, 3)
