"""Tasks of the ranks that time a plan with pipeline stages, and the facts that a record keeps of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pytest_fxbucket.bench.staged import StagedTask
from pytest_fxbucket.bench.timeline.marks import UNBUCKETED, ActivityMark, marks_in
from pytest_fxbucket.bench.timeline.spans import measured_bubble
from pytest_fxbucket.checks.bitwise.crossing import stage_graphs
from pytest_fxbucket.checks.on_ranks import final_values
from pytest_fxbucket.pipeline.played import bubble, bubble_by_the_book
from pytest_fxbucket.pipeline.running import PipelinedTask
from pytest_fxbucket.pipeline.schedules import table_of
from pytest_fxbucket.step.portable import encode
from pytest_fxbucket.step_runner import PhaseGraph, fields_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fxbucket.bench.record import PipelineFacts
    from pytest_fxbucket.bench.timeline.spans import Steps
    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh

_WHOLE = "joint"
"""The one graph of a step that is not in stages."""


def staged_task(worlds: Mapping[str, PlanOnMesh], rank: int, traced: bool) -> StagedTask:
    """The task of ``rank``: its stages' graphs in each variant, with marks for clocks if the step is ``traced``."""
    world = next(iter(worlds.values()))
    inputs, outputs = final_values(world, rank, _WHOLE)
    of_step = fields_of(world.plan, world.mesh, world.reference(rank), _WHOLE)
    of_step |= {"inputs": inputs, "outputs": outputs, "first_state": world.final_step(rank).first_state}
    return StagedTask(
        pipelined={name: staged_graphs(name, one, rank) for name, one in worlds.items()},
        marks={name: _marks(name, one, rank) for name, one in worlds.items()} if traced else {},
        **of_step,
    )


def staged_graphs(name: str, world: PlanOnMesh, rank: int) -> PipelinedTask:
    """The graphs of ``rank``'s stages: before the pass for the unbucketed variant, else as ``world``'s pass made them."""
    if name != UNBUCKETED:
        task = stage_graphs(world, rank)
        assert task is not None
        return task
    step = world.versions(rank).step
    assert step.pipelined is not None
    graphs = (
        PhaseGraph(phase, encode(graph.graph, graph, ()), step.inputs[phase], step.outputs[phase])
        for phase, graph in step.graphs.items()
    )
    return PipelinedTask.of(step.pipelined, world.mesh.at(rank, "pp"), graphs)


def stage_readings(name: str, world: PlanOnMesh) -> Iterator[tuple[int, str, GraphAnalysis, int]]:
    """(place along pp, phase, the graph's reading, number of buckets before it), for rank 0 and those beside it along pp."""
    # Buckets are numbered through all graphs of all places, so that a number means one bucket in the spans of all ranks.
    count = 0
    for rank in world.mesh.ranks(0, "pp"):
        for phase, reading in _readings(name, world, rank).items():
            yield world.mesh.at(rank, "pp"), phase, reading, count
            count += len(reading.buckets)


def _readings(name: str, world: PlanOnMesh, rank: int) -> Mapping[str, GraphAnalysis]:
    if name == UNBUCKETED:
        return world.reading(rank)
    return {phase: one.reading for phase, one in world.final(rank).items()}


def _marks(name: str, world: PlanOnMesh, rank: int) -> dict[str, tuple[ActivityMark, ...]]:
    """The marks of each graph of ``rank``, with buckets numbered through all places."""
    place = world.mesh.at(rank, "pp")
    before = {phase: count for own, phase, _, count in stage_readings(name, world) if own == place}
    entry_of = {} if name == UNBUCKETED else world.entry_of
    return {
        phase: tuple(mark.renumbered(before[phase]) for mark in marks_in(one, entry_of))
        for phase, one in _readings(name, world, rank).items()
    }


def pipeline_facts(world: PlanOnMesh, spans: Mapping[str, Sequence[Steps]]) -> PipelineFacts | None:
    """The facts of a record about the schedule; ``spans``: by variant the traced steps of each rank. None without stages."""
    if (how := world.final_step(0).pipelined) is None:
        return None
    pp = world.mesh.degree("pp")
    return {
        "schedule": how.schedule,
        "stages": how.stages,
        "ranks": pp,
        "microbatches": how.microbatches,
        "bubble": {name: measured_bubble(ranks) for name, ranks in spans.items()},
        "bubble_of_table": bubble(table_of(how.schedule, how.stages, pp, how.microbatches)),
        "bubble_by_book": bubble_by_the_book(how.schedule, pp, how.microbatches),
    }
