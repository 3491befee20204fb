"""A simulated step as spans, with the labels and buckets that measured ones have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fxbucket.bench.timeline.bubble import lane_of
from pytest_fxbucket.bench.timeline.marks import Mark, Span, marks_of
from pytest_fxbucket.simulate.drawing import pieces_of, staged_pieces
from pytest_fxbucket.simulate.of_plan import bucketed_step
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.simulate.stages import simulate_stages

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.cost.costs import CostModel
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.simulate.drawing import Piece
    from pytest_fxbucket.step.roles import Phase

SIMULATED = "simulated on "
COMPUTE, COMMUNICATION = "compute", "communication"
Marked = Mapping[tuple["Phase", str], Mark]
"""By graph and node what the node is of."""


def simulated_step(world: PlanOnMesh, cluster: Cluster, cost: CostModel | None = None) -> dict[str, tuple[Span, ...]]:
    """The bucketed step of ``world`` on ``cluster``, on the first rank (with stages on all along pp), as one variant more."""
    places = [bucketed_step(world, rank) for rank in (world.mesh.ranks(0, "pp") if world.plan.pipeline is not None else [0])]
    if world.plan.pipeline is not None:
        timeline = simulate_stages(places, cluster, cost)
        spans = [span for place, step in enumerate(places) for span in _staged(staged_pieces(timeline, place), step.rank)]
    else:
        marked: dict[tuple[Phase, str], Mark] = {}
        first = 0
        for phase, module in places[0].graphs.items():
            marks = [_moved(mark, first) for mark in marks_of(world, 0, phase, "bucketed")]
            first = 1 + max([first - 1, *(mark.bucket for mark in marks)])
            marked |= {(phase, node): mark for node, mark in nodes_of_marks(module.graph, marks)}
        spans = list(spans_of_pieces(list(pieces_of(simulate(places[0], cluster, cost))), marked))
    return {f"{SIMULATED}{cluster.name}": tuple(spans)}


def nodes_of_marks(graph: fx.Graph, marks: Sequence[Mark]) -> Iterator[tuple[str, Mark]]:
    """Each node from the first mark on, with the last mark at or before it."""
    begins = {mark.node: mark for mark in marks}
    current = None
    for node in graph.nodes:
        current = begins.get(node.name, current)
        if current is not None and node.op != "placeholder":
            yield node.name, current


def spans_of_pieces(pieces: Sequence[Piece], marked: Marked, rank: int = 0) -> Iterator[Span]:
    """``pieces`` by what they are of: compute of one mark that follows on itself is one span."""
    current: Span | None = None
    mark_of_current: Mark | None = None
    for piece in pieces:
        mark = marked.get((piece.phase, piece.node))
        if mark is None:
            continue
        if piece.kind != "compute":
            stream = COMMUNICATION if piece.kind == "flight" else COMPUTE
            yield mark.span(rank, stream, piece.start_ns, piece.end_ns, piece.kind)
            continue
        stream = COMPUTE if piece.stream == COMPUTE else piece.stream
        if current is not None and mark is mark_of_current and current.stream == stream:
            current = replace(current, end_ns=piece.end_ns)
            continue
        if current is not None:
            yield current
        current, mark_of_current = mark.span(rank, stream, piece.start_ns, piece.end_ns), mark
    if current is not None:
        yield current


def _moved(mark: Mark, first: int) -> Mark:
    return replace(mark, bucket=mark.bucket + first) if mark.bucket >= 0 else mark


def _staged(pieces: Iterator[Piece], rank: int) -> Iterator[Span]:
    for piece in pieces:
        direction = "forward" if piece.phase.startswith("forward") else "backward"
        stream = lane_of(int(piece.stream.partition(" ")[2]))
        yield Span(rank, stream, "compute", piece.phase, direction, piece.start_ns, piece.end_ns)
