"""What ranks idle while a pipeline schedule runs, read off the lanes of its stages. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timeline.marks import Span
    from pytest_fxbucket.bench.timeline.spans import Steps

ALL_STAGES = "all stages"
"""The lane of what a rank does once for all of its stages."""
SCHEDULED = ("forward", "backward", "input", "weight")
"""What a schedule orders: its time is from the first of these to the last, on any rank."""


def lane_of(stage: int | None) -> str:
    """The stream of the spans of ``stage``; None: of all stages."""
    return ALL_STAGES if stage is None else f"stage {stage}"


def idle_share(spans: Sequence[Span], ranks: int) -> float | None:
    """The share of the time of ``ranks`` ranks, from 0 to 1, in which none of a rank's stages computes; None without any span.

    Of one step, in the time of its schedule. Gathering and reducing parameters in that time is no idling.
    """
    works = [span for span in spans if span.kind == "compute" and span.stream.startswith("stage ")]
    scheduled = [span for span in works if span.label.partition(" ")[0] in SCHEDULED]
    if not scheduled:
        return None
    begin, end = min(span.start_ns for span in scheduled), max(span.end_ns for span in scheduled)
    busy = sum(max(0, min(span.end_ns, end) - max(span.start_ns, begin)) for span in works)
    return 1 - busy / (ranks * max(1, end - begin))


def measured_bubble(ranks: Sequence[Steps]) -> float | None:
    """The median over steps of what ``ranks`` idled; None if no step was traced."""
    steps = [[span for spans in step for span in spans] for step in zip(*ranks, strict=True)]
    shares = [share for spans in steps if (share := idle_share(spans, len(ranks))) is not None]
    return median(shares) if shares else None
