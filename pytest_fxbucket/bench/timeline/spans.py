"""Uses of spans: exposed time of each bucket, the bubble of a schedule, rows to draw without overlaps, and a trace file.

Imports no torch, since an option of pytest asks at start-up whether a report can be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Kind, Span

Steps = Sequence[Sequence["Span"]]
"""Spans of each step of one rank."""
Row = tuple[int, str, int]
"""Rank, stream, and number of the lane, from 1 on."""
MOST_RANKS = 8
MOST_SPANS = 6000
COPIES = ("copy-in ", "copy-out ")
_S = 1e-9
_FIRST = ("host", "compute", "communication")
_STAGES = re.compile(r"(all stages|stage (\d+))")
_COLOURS = {"wait": "terrible", "launch": "thread_state_runnable", "flight": "thread_state_iowait"}
"""Names from Chrome's own palette: exposed time is red."""


class BucketExposure(NamedTuple):
    """Times of one bucket: each is the slowest rank's, and the median over steps."""

    exposed_s: float
    """Seconds that its waits blocked; 0 without a wait."""
    in_flight_s: float
    """Seconds from its launch to the end of its last wait; 0 without a wait."""


def exposed(ranks: Sequence[Steps]) -> dict[int, BucketExposure]:
    """The times of each launched bucket, by its index; ``ranks`` has the steps of each rank, equally many."""
    of_steps = [(_slowest(step, "wait"), _slowest(step, "flight")) for step in zip(*ranks, strict=True)]
    buckets = {span.bucket for steps in ranks for step in steps for span in step if span.bucket >= 0}
    return {
        bucket: BucketExposure(*(median(ns[kind].get(bucket, 0) for ns in of_steps) * _S for kind in (0, 1)))
        for bucket in sorted(buckets)
    }


def middle_step(ranks: Sequence[Steps]) -> tuple[Span, ...]:
    """The spans of all ranks in the step of median length, which is the one to draw; of two middle ones the shorter."""
    steps = [tuple(span for spans in step for span in spans) for step in zip(*ranks, strict=True)]
    if not steps:
        return ()
    lengths = sorted((max((span.end_ns for span in step), default=0), number) for number, step in enumerate(steps))
    return steps[lengths[(len(lengths) - 1) // 2][1]]


def _slowest(step: Iterable[Sequence[Span]], kind: Kind) -> dict[int, int]:
    """By bucket the total time of its spans of ``kind``, on the rank where that is longest."""
    longest: dict[int, int] = {}
    for spans in step:
        took: dict[int, int] = {}
        for span in spans:
            if span.kind == kind and span.bucket >= 0:
                took[span.bucket] = took.get(span.bucket, 0) + span.end_ns - span.start_ns
        for bucket, ns in took.items():
            longest[bucket] = max(longest.get(bucket, 0), ns)
    return longest


def rows_of(spans: Iterable[Span]) -> dict[Row, list[Span]]:
    """Spans by row, in order of rank, stream and lane; spans of one row do not overlap.

    Lanes are as few as possible, by first fit in order of start. A rank's own thread comes before its communication, and other
    streams follow by their numbers.
    """
    by_stream: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        by_stream.setdefault((span.rank, span.stream), []).append(span)
    rows: dict[Row, list[Span]] = {}
    for rank, stream in sorted(by_stream, key=lambda key: (key[0], _place(key[1]))):
        for number, lane in enumerate(_lanes(by_stream[rank, stream]), 1):
            rows[rank, stream, number] = lane
    return rows


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    # Bucket and label decide between equal times, so that lanes do not depend on the order of ``spans``.
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns, span.bucket, span.label)):
        free = next((lane for lane in lanes if lane[-1].end_ns <= span.start_ns), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _place(stream: str) -> tuple[int, int, str]:
    # Stages stand first, the lane of all stages (-1) before them; then a rank's own streams, then a GPU's by number.
    if stage := _STAGES.fullmatch(stream):
        return -1, int(stage[2] or -1), stream
    if stream in _FIRST:
        return _FIRST.index(stream), 0, stream
    number = stream.rpartition(" ")[2]
    return len(_FIRST), int(number) if number.isdecimal() else -1, stream


@dataclass(frozen=True, slots=True)
class DrawnSpans:
    """The part of a step that is drawn."""

    spans: tuple[Span, ...]
    left_out: tuple[str, ...]
    """Sentences on what is left out; empty if all is drawn."""


def drawn(spans: Sequence[Span], most_ranks: int = MOST_RANKS, most_spans: int = MOST_SPANS) -> DrawnSpans:
    """At most ``most_ranks`` ranks and ``most_spans`` spans of a step.

    If there are too many spans, compute is merged by ever shorter module names, down to two parts. Then ranks are left out,
    then the shortest spans, waits last of all. The rank that ends last is always drawn, beside the first ones.
    """
    ends: dict[int, int] = {}
    for span in spans:
        ends[span.rank] = max(ends.get(span.rank, 0), span.end_ns)
    found = _fewer_ranks(spans, ends, most_ranks)
    full = depth = max((span.label.count(".") + 1 for span in spans if span.kind == "compute"), default=1)
    while len(found) > most_spans and depth > 2:
        depth -= 1
        found = merged(found, depth)
    ranks = min(most_ranks, len(ends))
    while len(found) > most_spans and ranks > 1:
        ranks -= 1
        found = _fewer_ranks(found, ends, ranks)
    shortest = max(0, len(found) - most_spans)
    if shortest:
        # Waits are kept first, since a reader looks for them. Of equally long spans some are kept from everywhere in the step.
        weight = [(span.kind != "wait", span.start_ns - span.end_ns, jitter(at)) for at, span in enumerate(found)]
        found = [found[at] for at in sorted(sorted(range(len(found)), key=weight.__getitem__)[:most_spans])]
    left_out = []
    if ranks < len(ends):
        slowest = max(ends, key=lambda rank: (ends[rank], -rank))
        left_out.append(f"{ranks} of {len(ends)} ranks are drawn, among them rank {slowest}, which ends last")
    if depth < full:
        left_out.append(f"compute is drawn by modules of {depth} names at most")
    if shortest:
        left_out.append(f"{shortest} of the shortest spans are not drawn")
    return DrawnSpans(tuple(found), tuple(left_out))


def jitter(number: int) -> float:
    """Between -0.5 and 0.5, spread evenly and always the same: multiples of the golden ratio (Weyl)."""
    return round((number * 0.6180339887498949) % 1.0 - 0.5, 4)


def _fewer_ranks(spans: Sequence[Span], ends: Mapping[int, int], most: int) -> Sequence[Span]:
    if len(ends) <= most:
        return spans
    slowest = max(ends, key=lambda rank: (ends[rank], -rank))
    kept = {slowest, *[rank for rank in sorted(ends) if rank != slowest][: most - 1]}
    return [span for span in spans if span.rank in kept]


def merged(spans: Iterable[Span], depth: int) -> list[Span]:
    """Spans with module names of compute cut to ``depth`` parts; consecutive compute of one name on a stream is one span."""
    result: list[Span] = []
    last: dict[tuple[int, str], int] = {}
    for span in sorted(spans, key=lambda span: (span.rank, span.stream, span.start_ns, span.end_ns)):
        key = span.rank, span.stream
        if span.kind == "compute":
            label = span.label if span.label.startswith(COPIES) else ".".join(span.label.split(".")[:depth])
            before = result[last[key]] if key in last else None
            span = replace(span, label=label)
            if before is not None and before == replace(span, start_ns=before.start_ns, end_ns=span.start_ns):  # it goes on
                result[last[key]] = replace(before, end_ns=span.end_ns)
                continue
        last[key] = len(result)
        result.append(span)
    return result


def chrome_trace(spans: Iterable[Span], about: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The trace of one step: a process for each rank, a thread for each stream. ``about`` becomes ``otherData``.

    It is in the Trace Event Format (Google, 2016), which Chrome's tracing and Perfetto read: complete events (``X``), metadata
    (``M``), and a flow (``s``, ``f``) from each launch to its wait, in microseconds.

    A stream on which several collectives are in flight at once has several threads, since a thread's events may not overlap.
    """
    rows = rows_of(spans)
    thread = {row: number for number, row in enumerate(rows)}
    events = [*_names(thread)]
    for row, row_spans in rows.items():
        events += [_event(span, thread[row]) for span in row_spans]
    events += _flows(rows, thread)
    return {"displayTimeUnit": "ms", "otherData": dict(about or {}), "traceEvents": events}


def to_json(trace: Mapping[str, Any]) -> str:
    """``trace`` as text; equal traces give equal text."""
    return json.dumps(trace, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def _names(thread: Mapping[Row, int]) -> Iterator[dict[str, Any]]:
    for rank in dict.fromkeys(rank for rank, _, _ in thread):
        yield from _named("process", rank, 0, f"rank {rank}", rank)
    for (rank, stream, lane), tid in thread.items():
        yield from _named("thread", rank, tid, f"{stream} ({lane})" if lane > 1 else stream, tid)


def _named(what: str, rank: int, tid: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    shared = {"ph": "M", "pid": rank, "tid": tid}
    yield {**shared, "name": f"{what}_name", "args": {"name": name}}
    yield {**shared, "name": f"{what}_sort_index", "args": {"sort_index": place}}


def _event(span: Span, tid: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": span_name(span.kind, span.label, span.direction),
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


def span_name(kind: Kind, label: str, direction: str) -> str:
    """The name of a span in a trace."""
    return f"{kind} {label}" if kind in ("launch", "wait") else label or f"({direction})"


def _flows(rows: Mapping[Row, Iterable[Span]], thread: Mapping[Row, int]) -> Iterator[dict[str, Any]]:
    """An arrow from each launch to each of its waits. Each end lies within its event, which is how viewers attach it."""
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
                # By ``bp`` e the arrow ends in the event around its end, and not in the next one that begins.
                yield {**shared, "ph": "f", "bp": "e", "tid": thread[row], "ts": _us(wait.start_ns)}


def _us(ns: int) -> float:
    return round(ns / 1000, 3)


# The share of time that ranks idle while a pipeline schedule runs, from the lanes of its stages.


ALL_STAGES = "all stages"
"""The lane of the work that a rank does once for all of its stages."""
SCHEDULED = ("forward", "backward", "input", "weight")
"""The kinds of work that a schedule orders; the schedule's time is from the first of these to the last, on any rank."""


def lane_of(stage: int | None) -> str:
    """The stream of the spans of ``stage``; for None that of all stages."""
    return ALL_STAGES if stage is None else f"stage {stage}"


def idle_share(spans: Sequence[Span], ranks: int) -> float | None:
    """The share of all ranks' time, from 0 to 1, in which none of a rank's stages computes; None without scheduled spans.

    ``spans`` are of one step on ``ranks`` ranks, and the time is that of its schedule. Gathering and reducing parameters within
    that time does not count as idling.
    """
    works = [span for span in spans if span.kind == "compute" and span.stream.startswith("stage ")]
    scheduled = [span for span in works if span.label.partition(" ")[0] in SCHEDULED]
    if not scheduled:
        return None
    begin, end = min(span.start_ns for span in scheduled), max(span.end_ns for span in scheduled)
    busy = sum(max(0, min(span.end_ns, end) - max(span.start_ns, begin)) for span in works)
    return 1 - busy / (ranks * max(1, end - begin))


def measured_bubble(ranks: Sequence[Steps]) -> float | None:
    """The median over steps of the ranks' :func:`idle_share`; None if no step was traced."""
    steps = [[span for spans in step for span in spans] for step in zip(*ranks, strict=True)]
    shares = [share for spans in steps if (share := idle_share(spans, len(ranks))) is not None]
    return median(shares) if shares else None
