"""Reorders launches and waits so that communication hides behind compute; only what must move moves.

All-gathers, each direction on its own: a stage's gathers are launched before the stage ``prefetch`` ahead of it is waited for.
Reductions: a stage is waited for behind the launches of the next one. A stage is an entry: its buckets are needed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.reading import Direction
from pytest_fxbucket.passes.moves import hoist, sink
from pytest_fxbucket.passes.pack import Merged
from pytest_fxbucket.passes.report import LeftAlone

Stage = list[Merged]


def prefetch_gathers(buckets: Sequence[Merged], direction: Direction, depth: int) -> list[LeftAlone]:
    """Launch each stage's gathers ``depth`` stages ahead; 0 leaves them. Returns what could not move, and why."""
    gathers = [b for b in buckets if b.first.kind == "all_gather" and b.first.direction == direction]
    stages = sorted(_stages(gathers), key=lambda stage: min(bucket.wait for bucket in stage))
    left: list[LeftAlone] = []
    if depth == 0:
        return left
    waits = [min(bucket.wait for bucket in stage) for stage in stages]
    for index, stage in enumerate(stages[1:], start=1):
        anchor = waits[max(0, index - depth)]
        for bucket in sorted(stage, key=lambda bucket: bucket.launch):
            if bucket.launch < anchor:
                continue
            try:
                hoist([bucket.launch], anchor)
            except PassError as error:
                left.append(LeftAlone(f"launch of {bucket.first.entry} ({direction})", str(error)))
    return left


def defer_reductions(buckets: Sequence[Merged]) -> list[LeftAlone]:
    """Wait for each stage's reductions behind the next stage's launches. Returns what could not move, and why."""
    reductions = [bucket for bucket in buckets if bucket.first.kind == "reduce_scatter"]
    stages = sorted(_stages(reductions), key=lambda stage: max(bucket.launch for bucket in stage))
    left: list[LeftAlone] = []
    for stage, following in pairwise(stages):
        anchor = max(bucket.launch for bucket in following)
        for bucket in sorted(stage, key=lambda bucket: bucket.wait, reverse=True):
            try:
                sink(bucket.wait, anchor)
            except PassError as error:
                left.append(LeftAlone(f"wait of {bucket.first.entry}'s reduction", str(error)))
    return left


def _stages(buckets: Sequence[Merged]) -> list[Stage]:
    """Buckets by entry."""
    stages: dict[str, Stage] = {}
    for bucket in buckets:
        stages.setdefault(bucket.first.entry, []).append(bucket)
    return list(stages.values())
