"""Calibrates a cluster by a trace file of a plan's step: one that torch's profiler wrote, or one from a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.bench.measure import digests
from pytest_fxbucket.bench.timeline.marks import BUCKETED, COMPUTE, UNBUCKETED, ActivityMark, marks_of
from pytest_fxbucket.bench.timeline.spans import span_name
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.joined_step import as_run
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.calibrate import CalibratedCluster, MeasuredStretch, calibrate
from pytest_fxbucket.simulate.of_plan import bare_step, bucketed_step, timed_step
from pytest_fxbucket.simulate.traces import cluster_from_events, read_trace
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.step.roles import Phase, StepGraph


def calibrated_by(path: Path, world: PlanOnMesh, cluster: Cluster) -> CalibratedCluster:
    """``cluster`` with figures from the trace in ``path``, of the step of ``world``, bucketed or not, on rank 0.

    A trace from a report is of the plan's ``[run]`` mesh, and not of the mesh of ``world``.

    Raises :class:`SimulationError` for a file that is no trace, a trace of another step, and a trace of a host if ``cluster``
    has devices, or the other way round.
    """
    if world.plan.pipeline is not None:
        raise SimulationError(f"{path}: the graphs of pipeline stages run many times a step, so no trace of them calibrates")
    trace = read_trace(path)
    about = trace.get("otherData")
    if isinstance(about, Mapping) and "variant" in about:
        mesh = mesh_of(world.plan, run=True)
        own = world if mesh == world.mesh else PlanOnMesh(CapturedPlan(world.plan, mesh, world.say), world.pass_name)
        ran = as_run(own)
        step, stretches = _of_report(path, trace, str(about["variant"]), ran, cluster)
        # Last, since an error about stretches says which one differs. A record without this graph gives no digest.
        if about.get("graphs", "") not in ("", " ".join(digests(str(about["variant"]), ran, 0))):
            raise SimulationError(
                f"{path}: the trace is of another graph: its launches are the same, but sizes or operators are not"
            )
        return calibrate(step, stretches, cluster)
    # A profiler's trace does not say of which variant it is. If it is of neither, the error is that of the bucketed one.
    try:
        return cluster_from_events(path, trace, bare_step(world, 0), cluster)
    except SimulationError as error:
        try:
            return cluster_from_events(path, trace, world.reference(0), cluster)
        except SimulationError:
            raise error from None


def _of_report(
    path: Path, trace: Mapping[str, Any], variant: str, world: PlanOnMesh, cluster: Cluster
) -> tuple[StepGraph, Sequence[MeasuredStretch]]:
    """The step that was measured, and its stretches, each the median over the ranks that have the graphs of rank 0."""
    if variant not in (BUCKETED, UNBUCKETED):
        raise SimulationError(f'{path} is of "{variant}"; take the trace of {BUCKETED} or {UNBUCKETED} beside it')
    step = world.reference(0) if variant == UNBUCKETED else timed_step(bucketed_step(world, 0))
    if not cluster.blocking:
        raise SimulationError(f"{path}: the trace is of ranks whose host computes, but {cluster.name} computes on devices")
    marks = [(phase, mark) for phase in step.graphs for mark in marks_of(world, 0, phase, variant)]
    alike = next(ranks for ranks, _ in world.distinct())
    measured = [_seconds(path, trace, rank, [mark for _, mark in marks]) for rank in alike]
    return step, [
        stretch
        for phase, module in step.graphs.items()
        for stretch in stretches_of(
            phase,
            module.graph,
            [mark for of, mark in marks if of == phase],
            [[each for each, (of, _) in zip(seconds, marks, strict=True) if of == phase] for seconds in measured],
        )
    ]


def _seconds(path: Path, trace: Mapping[str, Any], rank: int, marks: Sequence[ActivityMark]) -> list[float]:
    """The seconds of each mark on ``rank``. Raises :class:`SimulationError` if the trace's stretches are not those marks."""
    events = list(_own(trace, rank))
    if not events:
        raise SimulationError(
            f"{path} has no clocks of rank {rank} between the nodes of its graph, as of a GPU; calibrate by a trace of torch's "
            "profiler"
        )
    said = [(event.get("name"), event.get("args", {}).get("direction")) for event in events]
    wanted = [(span_name(mark.kind, mark.label, mark.direction), mark.direction) for mark in marks]
    if said != wanted:
        place = next((at for at, pair in enumerate(zip(said, wanted, strict=False)) if pair[0] != pair[1]), None)
        difference = (
            f"{counted(len(said), 'stretch')} are in it, and the graph has {len(wanted)}"
            if place is None
            else f"stretch {place + 1} is {said[place][0]}, and the graph has {wanted[place][0]} there"
        )
        raise SimulationError(f"{path}: the trace is of another graph: {difference}")
    return [float(event["dur"]) / 1e6 for event in events]


def _own(trace: Mapping[str, Any], rank: int) -> Iterator[Mapping[str, Any]]:
    """The events of the compute thread of ``rank``, in order."""
    of_rank = [event for event in trace["traceEvents"] if event.get("pid") == rank]
    names = [event for event in of_rank if event.get("ph") == "M" and event.get("name") == "thread_name"]
    threads = {event.get("tid") for event in names if event.get("args", {}).get("name") == COMPUTE}
    own = [event for event in of_rank if event.get("ph") == "X" and event.get("tid") in threads]
    # By end, too: a stretch of no length stands before the one that begins at the same time.
    yield from sorted(own, key=lambda event: (event["ts"], event["ts"] + event.get("dur", 0)))


def stretches_of(
    phase: Phase, graph: fx.Graph, marks: Sequence[ActivityMark], steps: Sequence[Sequence[float]]
) -> Iterator[MeasuredStretch]:
    """The stretches of ``graph`` from mark to mark; ``steps`` has the seconds of each mark in each step.

    A stretch has its median over steps, scaled so that all add up to the median step. Unscaled they would add up to less, since
    something holds up every step, but each time another part of it.
    """
    order = [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {name: number for number, name in enumerate(order)}
    begins = [*(place[mark.node] for mark in marks), len(order)]
    middles = [median(column) for column in zip(*steps, strict=True)]
    longer = median(map(sum, steps)) / (sum(middles) or 1.0)
    for (begin, end), seconds in zip(pairwise(begins), middles, strict=True):
        yield MeasuredStretch(phase, tuple(order[begin:end]), seconds * longer)
