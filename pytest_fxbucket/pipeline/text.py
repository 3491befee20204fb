"""The lines of a golden on a step in pipeline stages, beside its graphs: where stages are, what crosses, the schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.pipeline.schedules import table_of, text_of
from pytest_fxbucket.step.pipelined import Crossing, Pipelined
from pytest_fxbucket.words import counted

_MOST_RANKS = 8
"""Up to so many ranks a golden has the schedule's table; for more ranks it has a digest of the table."""


def stage_lines(how: Pipelined) -> list[str]:
    """A line for each stage and each tensor that crosses, then the schedule's table."""
    lines = [f"pipeline {how.schedule}, {counted(how.stages, 'stage')}, {counted(how.microbatches, 'microbatch')}"]
    for stage, place in enumerate(how.pp_places):
        lines.append(f"  stage {stage} on pp {place}")
        if stage + 1 < how.stages:
            lines += _crossing_lines(f"forward to stage {stage + 1}", how.forward[stage])
        if stage:
            lines += _crossing_lines(f"back to stage {stage - 1}", how.backward[stage - 1])
    lines += [f"  {fqn} in stages {', '.join(map(str, stages))}" for fqn, stages in how.ties]
    return [*lines, *_table_lines(how)]


def _crossing_lines(where: str, flow: Sequence[Crossing]) -> Iterator[str]:
    yield f"    {where}: {counted(len(flow), 'tensor')}, {sum(one.bytes for one in flow)} bytes"
    for one in flow:
        shape = "x".join(map(str, one.shape)) or "scalar"
        yield f"      {one.module or 'root'} of stage {one.stage}, {dtype_name(str(one.dtype))} {shape}"


def _table_lines(how: Pipelined) -> list[str]:
    table = table_of(how.schedule, how.stages, max(how.pp_places) + 1, how.microbatches)
    text = text_of(table)
    if table.pp > _MOST_RANKS:
        return [f"  schedule of {table.pp} ranks: sha256 {hashlib.sha256(text.encode()).hexdigest()}"]
    return [f"  {line}" for line in text.splitlines()[1:]]
