"""What was measured between marks, as the simulator's calibration takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from pytest_fxbucket.simulate.calibrate import Stretch

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.bench.timeline.marks import Mark
    from pytest_fxbucket.bench.timeline.spans import Steps
    from pytest_fxbucket.step.roles import Phase


def stretches_of(phase: Phase, graph: fx.Graph, marks: Sequence[Mark], steps: Sequence[Sequence[float]]) -> Iterator[Stretch]:
    """What of ``graph`` ran from mark to mark, with the median over ``steps``; each has seconds by mark.

    Steps are as long as the median one: since something holds up every step, though never all of it, medians of parts are less.
    """
    order = [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {name: number for number, name in enumerate(order)}
    begins = [*(place[mark.node] for mark in marks), len(order)]
    middles = [median(column) for column in zip(*steps, strict=True)]
    longer = median(map(sum, steps)) / (sum(middles) or 1.0)
    for (begin, end), seconds in zip(pairwise(begins), middles, strict=True):
        yield Stretch(phase, tuple(order[begin:end]), seconds * longer)


def seconds_of(steps: Steps, stream: str = "compute") -> list[list[float]]:
    """Seconds by mark of each step of one rank without a GPU, whose thread does all but what is in flight, on ``stream``."""
    return [[(span.end_ns - span.start_ns) / 1e9 for span in spans if span.stream == stream] for spans in steps]
