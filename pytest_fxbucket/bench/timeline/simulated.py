"""A simulated step as pieces to draw, and as spans with the labels and buckets that measured ones have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.bench.timeline.marks import BUCKETED, COMMUNICATION, ActivityMark, Span, marks_of
from pytest_fxbucket.bench.timeline.spans import lane_of
from pytest_fxbucket.cost.costs import own_cost
from pytest_fxbucket.simulate.of_plan import bucketed_step
from pytest_fxbucket.simulate.simulator import COMPUTE, COPIES, simulate
from pytest_fxbucket.simulate.stages import WORK, simulate_stages

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.simulate.stages import StagedTimeline
    from pytest_fxbucket.simulate.timeline import Timeline
    from pytest_fxbucket.step.roles import Phase

SIMULATED = "simulated on "
Marked = Mapping[tuple["Phase", str], ActivityMark]
"""By graph and node the mark that the node belongs to."""


def simulated_step(world: PlanOnMesh, cluster: Cluster) -> dict[str, tuple[Span, ...]]:
    """The bucketed step of ``world`` simulated on ``cluster``, on rank 0 (with stages also on those beside it along pp).

    It is given as the spans of one more variant, by the variant's name.
    """
    places = [bucketed_step(world, rank) for rank in (world.mesh.ranks(0, "pp") if world.plan.pipeline is not None else [0])]
    if world.plan.pipeline is not None:
        timeline = simulate_stages(places, cluster, lambda step: own_cost(world.plan, step, cluster))
        spans = [span for place, step in enumerate(places) for span in _staged(staged_pieces(timeline, place), step.rank)]
    else:
        # Buckets are numbered through all graphs, as in the list of a record.
        marked: dict[tuple[Phase, str], ActivityMark] = {}
        first = 0
        for phase, module in places[0].graphs.items():
            marks = [mark.renumbered(first) for mark in marks_of(world, 0, phase, BUCKETED)]
            first = 1 + max([first - 1, *(mark.bucket for mark in marks)])  # as before if there is no launch in the graph
            marked |= {(phase, node): mark for node, mark in nodes_of_marks(module.graph, marks)}
        timeline_of_rank = simulate(places[0], cluster, own_cost(world.plan, places[0], cluster))
        spans = list(spans_of_pieces(list(pieces_of(timeline_of_rank)), marked))
    return {f"{SIMULATED}{cluster.name}": tuple(spans)}


def nodes_of_marks(graph: fx.Graph, marks: Sequence[ActivityMark]) -> Iterator[tuple[str, ActivityMark]]:
    """(name of a node, the last mark at or before it), for each node from the first mark on."""
    begins = {mark.node: mark for mark in marks}
    current = None
    for node in graph.nodes:
        current = begins.get(node.name, current)
        if current is not None and node.op != "placeholder":
            yield node.name, current


def spans_of_pieces(pieces: Sequence[SimulatedStretch], marked: Marked) -> Iterator[Span]:
    """A span of rank 0 for each of ``pieces``; consecutive compute of one mark on one stream becomes one span."""
    current: Span | None = None
    mark_of_current: ActivityMark | None = None
    for piece in pieces:
        mark = marked.get((piece.phase, piece.node))
        if mark is None:
            continue
        if piece.kind != "compute":
            stream = COMMUNICATION if piece.kind == "flight" else COMPUTE
            yield mark.span(0, stream, piece.start_ns, piece.end_ns, piece.kind)
            continue
        if current is not None and mark is mark_of_current and current.stream == piece.stream:
            current = replace(current, end_ns=piece.end_ns)
            continue
        if current is not None:
            yield current
        current, mark_of_current = mark.span(0, piece.stream, piece.start_ns, piece.end_ns), mark
    if current is not None:
        yield current


def _staged(pieces: Iterator[SimulatedStretch], rank: int) -> Iterator[Span]:
    for piece in pieces:
        direction = "forward" if piece.phase.startswith("forward") else "backward"
        stream = lane_of(int(piece.stream.partition(" ")[2]))
        yield Span(rank, stream, "compute", piece.phase, direction, piece.start_ns, piece.end_ns)


@dataclass(frozen=True, slots=True)
class SimulatedStretch:
    """A stretch of a simulated step."""

    stream: str
    """compute, host copies, or the name of a process group; in a step with stages ``stage 0``."""
    kind: Literal["compute", "flight", "launch", "wait"]
    """A flight lasts while its collective communicates, a wait while it blocks compute; a launch is a moment."""
    phase: Phase
    """The graph; in a step with stages the work and its microbatch, ``forward 0``."""
    node: str
    """The node that runs; for a flight, its launch and its wait the launching node; empty in a step with stages."""
    start_ns: int
    """Since the step began."""
    end_ns: int


def pieces_of(timeline: Timeline) -> Iterator[SimulatedStretch]:
    """All pieces of one rank's step: the nodes that ran, in order, then launches, and waits that blocked."""
    for ran in timeline.ran:
        kind: Literal["compute", "flight"] = "compute" if ran.stream in (COMPUTE, COPIES) else "flight"
        yield SimulatedStretch(ran.stream, kind, ran.phase, ran.node, _ns(ran.start), _ns(ran.end))
    for flight in timeline.flights:
        launched = _ns(flight.launched)
        yield SimulatedStretch(COMPUTE, "launch", flight.phase, flight.node, launched, launched)
        if not flight.is_hidden:
            yield SimulatedStretch(
                COMPUTE, "wait", flight.phase, flight.node, _ns(flight.waited), _ns(flight.waited + flight.exposed)
            )


def staged_pieces(timeline: StagedTimeline, place: int) -> Iterator[SimulatedStretch]:
    """The scheduled work of the rank at ``place`` along pp."""
    for one in timeline.done:
        if one.rank == place:
            yield SimulatedStretch(
                f"stage {one.stage}", "compute", f"{WORK[one.kind]} {one.microbatch}", "", _ns(one.start), _ns(one.end)
            )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
