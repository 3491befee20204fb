"""A simulated step as plain stretches on streams, which whoever draws measured ones can draw beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.simulate.simulator import COMPUTE, COPIES

if TYPE_CHECKING:
    from pytest_fxbucket.simulate.stages import StagedTimeline
    from pytest_fxbucket.simulate.timeline import Timeline
    from pytest_fxbucket.step.roles import Phase

_WORK = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a simulated step."""

    stream: str
    """compute, host copies, the name of a process group; ``stage 0`` of a step in stages."""
    kind: Literal["compute", "flight", "launch", "wait"]
    """A flight lasts while its collective communicates, a wait while it blocks compute; a launch is a moment."""
    phase: Phase
    """The graph; of a step in stages what is done, such as ``forward 0``, of microbatch 0."""
    node: str
    """What runs; of a flight, its launch and its wait the launching node; empty of a step in stages."""
    start_ns: int
    """Since the step began."""
    end_ns: int


def pieces_of(timeline: Timeline) -> Iterator[Piece]:
    """All stretches of one rank's step: what ran by stream, in order, and then launches, and waits that blocked."""
    for ran in timeline.ran:
        kind: Literal["compute", "flight"] = "compute" if ran.stream in (COMPUTE, COPIES) else "flight"
        yield Piece(ran.stream, kind, ran.phase, ran.node, _ns(ran.start), _ns(ran.end))
    for flight in timeline.flights:
        launched = _ns(flight.launched)
        yield Piece(COMPUTE, "launch", flight.phase, flight.node, launched, launched)
        if not flight.is_hidden:
            yield Piece(COMPUTE, "wait", flight.phase, flight.node, _ns(flight.waited), _ns(flight.waited + flight.exposed))


def staged_pieces(timeline: StagedTimeline, place: int) -> Iterator[Piece]:
    """What the rank at ``place`` along pp does of its schedule."""
    for one in timeline.done:
        if one.rank == place:
            yield Piece(
                f"stage {one.stage}", "compute", f"{_WORK[one.kind]} {one.microbatch}", "", _ns(one.start), _ns(one.end)
            )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
