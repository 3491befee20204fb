"""What explain says of a plan that has a ``[cluster]``: how exposed each bucket is there, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.simulate.of_plan import NamedFlight, SimulatedRank, simulated_ranks
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase


@dataclass(frozen=True)
class Simulation:
    """The plan's step on its cluster."""

    cluster: str
    ranks: tuple[SimulatedRank, ...]

    def launches(self, rank: int, phase: Phase) -> Mapping[str, NamedFlight]:
        """What ``rank`` launches in the graph ``phase``, by the names of the nodes."""
        flights = next((one.flights for one in self.ranks if rank in one.ranks), ())
        return {one.flight.node: one for one in flights if one.flight.phase == phase}


def simulation_of(world: PlanOnMesh) -> Simulation | None:
    """Simulate ``world``; None if its plan has no cluster."""
    cluster = cluster_of(world.plan)
    return None if cluster is None else Simulation(cluster.name, tuple(simulated_ranks(world, cluster)))


def simulation_lines(found: Simulation) -> Iterator[str]:
    """How long the step takes there, and what of it is exposed."""
    for one in found.ranks:
        line = one.timeline
        of = f", rank {', '.join(map(str, one.ranks))}" if len(found.ranks) > 1 else ""
        yield (
            f"simulated on {found.cluster}{of}: {1000 * line.seconds:.3f} ms, {1000 * line.exposed:.3f} ms exposed, "
            f"{line.hidden} of {counted(len(line.flights), 'launch')} hidden"
        )
        yield from (f"  {flight.name}: {flight.told}" for flight in one.flights if not flight.flight.is_hidden)
