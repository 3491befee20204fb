"""One plan's step, timed: several sets of processes one after another, each running all variants in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pytest_fxbucket.bench.job import RankTimes, TimingTask
from pytest_fxbucket.bench.staged_tasks import pipeline_facts, stage_readings, staged_graphs, staged_task
from pytest_fxbucket.bench.stats import Pacing, Series
from pytest_fxbucket.bench.timed_graphs import TimedVariant, TimingPhase
from pytest_fxbucket.bench.timeline.marks import UNBUCKETED, labels_of, marks_of
from pytest_fxbucket.bench.timeline.spans import Steps, exposed, middle_step
from pytest_fxbucket.checks.bitwise.crossing import crosses, crossing_graphs
from pytest_fxbucket.checks.on_ranks import final_values
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.joined_step import as_run
from pytest_fxbucket.step.portable import digest
from pytest_fxbucket.step_runner import PhaseGraph, fields_of

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import BucketTime, GraphFacts, PipelineFacts
    from pytest_fxbucket.bench.timeline.marks import Span
    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.plan.schema_checks import Benchmark
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase


SETS = 4
"""How many sets of fresh processes are timed: processes differ, as by the layout of their memory, where the code does not."""
TRACED_STEPS = 5

Worlds = Mapping[str, "PlanOnMesh"]
"""By variant the world whose graphs it runs; the unbucketed variant runs those from before that world's pass."""
Runner = Callable[[Sequence[TimingTask]], list[object]]
"""Runs tasks on fresh ranks, one each, and gives their results."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured step time of a plan."""

    series: Series
    graphs: Mapping[str, GraphFacts]
    """By variant the facts that a record keeps of its graphs."""
    spans: Mapping[str, tuple[Span, ...]]
    """By variant one step of all ranks, the one of median length."""
    pipeline: PipelineFacts | None = None
    """Of a plan with pipeline stages."""


def measure(worlds: Worlds, options: Benchmark, run: Runner, say: Callable[[str], None] = lambda _: None) -> Measured:
    """Time the variants of ``worlds`` until their ratios are as precise as ``options`` asks, or its budget is used up.

    Raises :class:`BenchmarkError` if a rank ran another graph than the one that was checked.
    """
    # The mean over n sets is sqrt(n) times as precise as one set, so that each set may be less precise by that.
    pacing = Pacing(options.budget_s / SETS, options.precision * SETS**0.5)
    worlds = {name: as_run(world) for name, world in worlds.items()}
    series = Series()
    for number in range(SETS):
        say(f"timing {', '.join(worlds)} in processes {number + 1} of {SETS}")
        last = number == SETS - 1
        timed = cast("list[RankTimes]", run(tasks_of(worlds, pacing, TRACED_STEPS if last else 0)))
        _refuse_other_graphs(worlds, timed)
        first, has_priority = timed[0], all(one.has_priority for one in timed)
        peaks = {name: [one.peak_bytes[name] for one in timed] for name in first.samples}
        series.add_set(first.samples, first.warmup_rounds, first.is_stable, has_priority, peaks)
    # By now ``timed`` is that of the last set, the only one that was traced.
    graphs = {name: _facts(name, world, series, timed) for name, world in worlds.items()}
    spans = {name: [steps for one in timed for steps in one.spans[name]] for name in worlds}
    first_world = next(iter(worlds.values()))
    return Measured(series, graphs, _drawn(timed), pipeline_facts(first_world, spans))


def tasks_of(worlds: Worlds, pacing: Pacing, traced_steps: int = 0) -> list[TimingTask]:
    """The task of each rank; with ``traced_steps`` its graphs have marks for clocks."""
    first = next(iter(worlds.values()))
    return [
        TimingTask(
            variants=tuple(worlds),
            phases=tuple(
                TimingPhase(
                    variants={name: timed_variant(name, world, rank, phase) for name, world in worlds.items()},
                    marks={name: marks_of(world, rank, timed_phase(name, world, phase), name) for name, world in worlds.items()}
                    if traced_steps
                    else {},
                    **fields_of(first.plan, first.mesh, first.step(rank), phase),
                )
                for phase in ([] if first.plan.pipeline else first.step(rank).graphs)
            ),
            staged=staged_task(worlds, rank, traced_steps > 0) if first.plan.pipeline else None,
            pacing=pacing,
            traced_steps=traced_steps,
        )
        for rank in range(first.size)
    ]


def _refuse_other_graphs(worlds: Worlds, timed: Sequence[RankTimes]) -> None:
    for rank, one in enumerate(timed):
        for name, world in worlds.items():
            if one.digests[name] != digests(name, world, rank):
                raise BenchmarkError(f"rank {rank} timed another {name} graph than the one that it was sent")


def _facts(name: str, world: PlanOnMesh, series: Series, traced: Sequence[RankTimes]) -> GraphFacts:
    rows: list[BucketTime] = []
    if world.plan.pipeline is not None:
        for _, _, reading, before in stage_readings(name, world):
            rows += bucket_rows(reading, world.entry_of, name, [one.spans[name][0] for one in traced], before)
        readings = []
    elif name == UNBUCKETED:
        readings = list(world.reference_reading(0).values())
    else:
        phases = dict.fromkeys(timed_phase(name, world, phase) for phase in world.step(0).graphs)
        readings = [world.final(0)[phase].reading for phase in phases]
    for number, reading in enumerate(readings):
        rows += bucket_rows(reading, world.entry_of, name, [timed.spans[name][number] for timed in traced])
    return {
        # Only along pp do ranks run different parts of a step; otherwise rank 0 stands for all.
        "digest": " ".join(one for rank in world.mesh.ranks(0, "pp") for one in digests(name, world, rank)),
        "launches": len(rows),
        "bytes": sum(row["bytes"] for row in rows),
        "peak_bytes": list(series.peak_bytes[name]),
        "buckets": rows,
    }


def bucket_rows(
    reading: GraphAnalysis, entry_of: Mapping[str, str], variant: str, ranks: Sequence[Steps], first: int = 0
) -> list[BucketTime]:
    """The row that a record keeps of each launch of a graph, in order of launch.

    ``bytes`` are those of the larger of input and output. ``entry_of`` names launches, except in the unbucketed variant.
    ``first`` is the number that the graph's first bucket has in the spans.
    """
    labels = labels_of(reading.buckets, {} if variant == UNBUCKETED else entry_of)
    found = exposed(ranks)
    rows: list[BucketTime] = []
    for number, (label, bucket) in enumerate(zip(labels, reading.buckets, strict=True), first):
        exposed_s, in_flight_s = found.get(number, (0.0, 0.0))
        rows.append(
            {
                "label": label,
                "direction": bucket.direction,
                "bytes": bucket.bytes,
                "exposed_s": exposed_s,
                "in_flight_s": in_flight_s,
            }
        )
    return rows


def _drawn(timed: Sequence[RankTimes]) -> dict[str, tuple[Span, ...]]:
    """By variant one step to draw, its phases one after another."""
    # Each phase was traced on a clock and with bucket numbers of its own: both go on where the phase before ended.
    drawn = {}
    for name in timed[0].spans:
        spans: list[Span] = []
        for number in range(len(timed[0].spans[name])):
            shift = max((span.end_ns for span in spans), default=0)
            first = 1 + max((span.bucket for span in spans), default=-1)
            spans += [
                replace(
                    span,
                    start_ns=span.start_ns + shift,
                    end_ns=span.end_ns + shift,
                    bucket=span.bucket + first if span.bucket >= 0 else -1,
                )
                for span in middle_step([one.spans[name][number] for one in timed])
            ]
        drawn[name] = tuple(spans)
    return drawn


def timed_phase(name: str, world: PlanOnMesh, phase: Phase) -> Phase:
    """The graph that is timed as ``phase``: the steady one in a step whose work crosses iterations."""
    return "steady" if name != UNBUCKETED and crosses(world) else phase


def timed_variant(name: str, world: PlanOnMesh, rank: int, phase: Phase) -> TimedVariant:
    """The graphs that ``rank`` runs as the variant ``name``: as captured, or as passes and transformations made them."""
    step = world.step(rank)
    if name == UNBUCKETED:
        only = PhaseGraph(phase, world.unbucketed(rank, phase), step.inputs[phase], step.outputs[phase])
        return TimedVariant((only,), step.inputs[phase], step.outputs[phase], step.first_state)
    final, (inputs, outputs) = world.final_step(rank), final_values(world, rank, phase)
    graphs = crossing_graphs(world, rank) or (
        PhaseGraph(phase, world.final(rank)[phase].portable, final.inputs[phase], final.outputs[phase]),
    )
    return TimedVariant(graphs, inputs or step.inputs[phase], outputs or step.outputs[phase], final.first_state)


def digests(name: str, world: PlanOnMesh, rank: int) -> tuple[str, ...]:
    """The digests of the graphs that ``rank`` runs as the variant ``name``, in order of phases."""
    if world.plan.pipeline is not None:
        return tuple(digest(one.graph) for one in staged_graphs(name, world, rank).graphs)
    variants = (timed_variant(name, world, rank, phase) for phase in world.step(rank).graphs)
    return tuple(digest(one.graph) for variant in variants for one in variant.graphs)
