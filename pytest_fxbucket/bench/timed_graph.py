"""The graph of a step that is timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.bench.timeline.marks import UNBUCKETED
from pytest_fxbucket.errors import BenchmarkError

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Phase
    from pytest_fxbucket.graph.portable import PortableGraph
    from pytest_fxbucket.world import World


def timed_graph(name: str, world: World, rank: int, phase: Phase) -> PortableGraph:
    """What rank ``rank`` runs as ``name``: the step as captured, or as passes and transformations made it.

    Raises :class:`BenchmarkError` for a step whose work crosses iterations.
    """
    if name == UNBUCKETED:
        return world.unbucketed(rank, phase)
    final = world.final(rank)
    if phase not in final:
        raise BenchmarkError(
            f"{world.plan.path}: the step runs as graphs {', '.join(final)}, which cannot be timed as one step; leave "
            "[[transform]] next_iteration out to time it"
        )
    return final[phase].portable
