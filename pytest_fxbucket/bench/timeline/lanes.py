"""Spans side by side: rows in which none overlaps another, as a picture or a trace of threads needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.span import Span

_FIRST = ("host", "compute", "communication")

Row = tuple[int, str, int]
"""Rank, stream, and number of the lane, from 1 on."""


def rows_of(spans: Iterable[Span]) -> dict[Row, list[Span]]:
    """Spans by row, in order of rank, stream and lane; within a row none overlaps. As few lanes as can be: first fit by start.

    A rank's own thread stands before what is in flight; other streams follow by their numbers.
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
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns, span.bucket, span.label)):
        free = next((lane for lane in lanes if lane[-1].end_ns <= span.start_ns), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _place(stream: str) -> tuple[int, int, str]:
    if stream in _FIRST:
        return _FIRST.index(stream), 0, stream
    number = stream.rpartition(" ")[2]
    return len(_FIRST), int(number) if number.isdecimal() else -1, stream
