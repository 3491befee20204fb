"""How long each bucket's waits blocked, and how long it was in flight: from the spans of several steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fxbucket.bench.timeline.marks import UNBUCKETED, labels_of

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.span import Kind, Span
    from pytest_fxbucket.graph.buckets import Reading

Steps = Sequence[Sequence["Span"]]
"""Spans of each step of one rank."""
_S = 1e-9


class Exposed(NamedTuple):
    """Of one bucket, the median over steps of the slowest rank's."""

    exposed_s: float
    """Seconds that its waits blocked; 0 if nobody waited."""
    in_flight_s: float
    """Seconds from its launch to the end of its last wait; 0 if nobody waited."""


def exposed(ranks: Sequence[Steps]) -> dict[int, Exposed]:
    """Of each bucket that was launched, by its index; ``ranks``: the steps of each rank, equally many."""
    of_steps = [(_slowest(step, "wait"), _slowest(step, "flight")) for step in zip(*ranks, strict=True)]
    buckets = {span.bucket for steps in ranks for step in steps for span in step if span.bucket >= 0}
    return {
        bucket: Exposed(
            median(waited.get(bucket, 0) for waited, _ in of_steps) * _S,
            median(flown.get(bucket, 0) for _, flown in of_steps) * _S,
        )
        for bucket in sorted(buckets)
    }


def bucket_rows(
    reading: Reading, entry_of: Mapping[str, str], variant: str, ranks: Sequence[Steps]
) -> tuple[Mapping[str, Any], ...]:
    """What a record keeps of each launch of a graph, in order of launch: label, direction, bytes, exposed_s, in_flight_s.

    ``bytes`` are those of the larger side; ``entry_of`` names launches of any variant but the unbucketed one.
    """
    labels = labels_of(reading.buckets, {} if variant == UNBUCKETED else entry_of)
    found = exposed(ranks)
    return tuple(
        {
            "label": label,
            "direction": bucket.direction,
            "bytes": bucket.bytes,
            **found.get(number, Exposed(0.0, 0.0))._asdict(),
        }
        for number, (label, bucket) in enumerate(zip(labels, reading.buckets, strict=True))
    )


def middle_step(ranks: Sequence[Steps]) -> tuple[Span, ...]:
    """Spans, of all ranks, of the step whose length is the median (the earlier of two): the one to draw."""
    steps = [tuple(span for spans in step for span in spans) for step in zip(*ranks, strict=True)]
    if not steps:
        return ()
    lengths = sorted((max((span.end_ns for span in step), default=0), number) for number, step in enumerate(steps))
    return steps[lengths[(len(lengths) - 1) // 2][1]]


def _slowest(step: Iterable[Sequence[Span]], kind: Kind) -> dict[int, int]:
    """By bucket the longest that any rank's spans of ``kind`` took together."""
    longest: dict[int, int] = {}
    for spans in step:
        took: dict[int, int] = {}
        for span in spans:
            if span.kind == kind and span.bucket >= 0:
                took[span.bucket] = took.get(span.bucket, 0) + span.end_ns - span.start_ns
        for bucket, ns in took.items():
            longest[bucket] = max(longest.get(bucket, 0), ns)
    return longest
