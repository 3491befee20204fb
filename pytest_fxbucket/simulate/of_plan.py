"""A plan's step, simulated on its cluster: every distinct rank, with the names of its buckets, and the step before the pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.cost.costs import own_cost
from pytest_fxbucket.golden.schedule import named_buckets
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.simulate.stages import StagedTimeline, simulate_stages
from pytest_fxbucket.simulate.timeline import Flight, Timeline
from pytest_fxbucket.step.mesh import GROUPED
from pytest_fxbucket.step.pipelined import TIES, UPDATE

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.graph.buckets import Bucket, Member
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Direction, Phase, StepGraph

_REPEATED = "steady"
"""The graph that a step whose work crosses iterations runs over and over."""
_OF_STAGES: Mapping[Phase, Direction] = {TIES: "backward", UPDATE: "optimizer"}
"""Directions of the graphs of pipeline stages whose launches have none in their meta."""


@dataclass(frozen=True, slots=True)
class NamedFlight:
    """One collective, with the name that people know it by."""

    flight: Flight
    name: str
    """``forward all_gather layers.0``; if it is not known what the launch carries, its module and node instead of the entry."""
    direction: Direction
    behind: str
    """Name of the launch before it on its stream, if it is exposed because of that one; else empty."""

    @property
    def reason(self) -> str:
        """Why it is exposed, as a clause; empty if it is hidden."""
        return f"{self.behind} is in flight before it" if self.behind else _CLAUSES[self.flight.why]

    @property
    def exposed_clause(self) -> str:
        """A clause: how many milliseconds of it are exposed, and why."""
        often = f", {self.flight.times} times" if self.flight.times > 1 else ""
        flying = f"{1000 * self.flight.seconds:.3f} ms in flight{often}"
        if self.flight.is_hidden:
            return f"hidden, {flying}"
        return f"{1000 * self.flight.exposed:.3f} ms exposed, {flying}: {self.reason}"

    def as_data(self) -> dict[str, Any]:
        """For JSON: bytes, and seconds since the step began."""
        flight = self.flight
        times = {key: getattr(flight, key) for key in ("launched", "start", "end", "waited", "exposed")}
        return {"why": flight.why or None, "behind": self.behind or None, **times}


_CLAUSES = {
    "": "",
    "too little compute": "too little compute runs beside it",
    "waited for too early": "waited for too early, what it brings is read later",
    "behind another launch": "another launch is in flight before it",
    "launched too late": "launched too late, what it sends was there before",
    "memory": "what it brings would not fit into memory any earlier",
}


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """The simulated step of ranks that all do the same."""

    ranks: tuple[int, ...]
    timeline: Timeline
    flights: tuple[NamedFlight, ...]
    """In the order of their launches."""


def simulated_ranks(world: PlanOnMesh, cluster: Cluster, *, believed: bool = False) -> list[SimulatedRank]:
    """The simulated step of each group of ranks with equal timelines and names, the group of rank 0 first.

    ``believed``: take the groups of :meth:`PlanOnMesh.alike`, without proof that the ranks of one have the same graphs.

    Raises SimulationError if the plan's own cost model gives no number of seconds.
    """
    # Ranks whose graphs differ may still have equal timelines: these are joined.
    found: list[SimulatedRank] = []
    for together, graphs in world.ranks_alike() if believed else world.distinct():
        step = bare_step(world, together[0])
        for ranks in by_layout(together, world, cluster):
            timeline = _simulated(world.plan, replace(step, rank=ranks[0]), cluster)
            flights = tuple(_named(timeline, graphs, world, step.has_roles, believed))
            alike = next((at for at, one in enumerate(found) if (one.timeline, one.flights) == (timeline, flights)), None)
            if alike is None:
                found.append(SimulatedRank(tuple(ranks), timeline, flights))
            else:
                found[alike] = replace(found[alike], ranks=tuple(sorted((*found[alike].ranks, *ranks))))
    return found


def by_layout(ranks: Sequence[int], world: PlanOnMesh, cluster: Cluster) -> list[list[int]]:
    """``ranks`` in sets whose process groups lie alike on the nodes of ``cluster``: one graph takes them equally long."""
    mesh, layouts = world.mesh, dict[int, list[list[int]]]((rank, []) for rank in ranks)
    for name in (name for name in GROUPED if 1 < mesh.degree(name) < mesh.size):
        known: dict[int, list[int]] = {}
        for rank in ranks:
            if rank not in known:
                group = mesh.ranks(rank, name)
                known |= dict.fromkeys(group, cluster.on_nodes(group))
            layouts[rank].append(known[rank])
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(str(layouts[rank]), []).append(rank)
    return list(found.values())


def bucketed(world: PlanOnMesh, rank: int, cluster: Cluster) -> Timeline:
    """The step that ``rank`` runs, simulated; its launches get no names, which saves time.

    Raises as :func:`simulated_ranks`.
    """
    return _simulated(world.plan, bare_step(world, rank), cluster)


def unbucketed(world: PlanOnMesh, rank: int, cluster: Cluster) -> Timeline:
    """The step of ``rank`` before the pass, simulated."""
    return _simulated(world.plan, replace(world.versions(rank).step, rank=rank), cluster)


def in_schedule(world: PlanOnMesh, cluster: Cluster) -> StagedTimeline | None:
    """The step of rank 0 and the ranks beside it along pp, in the order of the plan's schedule; None for a plan without stages.

    Raises as :func:`simulated_ranks`.
    """
    if world.plan.pipeline is None:
        return None
    places = [bare_step(world, rank) for rank in world.mesh.ranks(0, "pp")]
    return simulate_stages(places, cluster, lambda step: own_cost(world.plan, step, cluster))


def bucketed_step(world: PlanOnMesh, rank: int) -> StepGraph:
    """The step that ``rank`` runs, as the pass left it; the trace of the model is shared by all ranks."""
    graphs = {phase: one.bucketed.graph_module for phase, one in world.final(rank).items()}
    return replace(world.final_step(rank), graphs=graphs, rank=rank)


def bare_step(world: PlanOnMesh, rank: int) -> StepGraph:
    """:func:`bucketed_step` without the nodes that only keep its order; its graphs are compiled only when called."""
    bare = {phase: uncompiled(one.bucketed.root, one.graph) for phase, one in world.final(rank).items()}
    return replace(world.final_step(rank), graphs=bare, rank=rank)


def timed_step(step: StepGraph) -> StepGraph:
    """The part of ``step`` whose time counts: of work that crosses iterations the graph that runs over and over."""
    return replace(step, graphs={_REPEATED: step.graphs[_REPEATED]}) if _REPEATED in step.graphs else step


def _simulated(plan: Plan, step: StepGraph, cluster: Cluster) -> Timeline:
    timed = timed_step(step)
    return simulate(timed, cluster, own_cost(plan, timed, cluster))


def _named(
    timeline: Timeline, graphs: Mapping[Phase, Passed], world: PlanOnMesh, has_roles: bool, believed: bool
) -> Sequence[NamedFlight]:
    phases = {flight.phase for flight in timeline.flights}
    names: dict[tuple[Phase, str], tuple[str, Direction]] = {}
    for phase in phases:
        buckets = _buckets_of(graphs[phase]) if believed else graphs[phase].reading.buckets
        where = f" in {phase}" if len(phases) > 1 else ""
        named = dict(named_buckets(buckets, world.entry_of, dict.fromkeys((one.group for one in buckets), "")))
        for one in buckets:
            direction: Direction = _OF_STAGES.get(phase, one.direction)
            known = any(one.fqns) or one.direction == "optimizer" or (one.module and has_roles)
            name = named[one.node].name if known else f"{direction} {one.kind} {_bare_name(one)}"
            names[phase, one.node] = name + where, direction
    found = []
    for flight in timeline.flights:
        name, direction = names[flight.phase, flight.node]
        behind = _behind(flight, timeline, names) if flight.behind else ""
        found.append(NamedFlight(flight, name, direction, behind))
    return found


def _buckets_of(one: Passed) -> Sequence[Bucket]:
    """The buckets of the final graph by the pass's own report, where there is one; else read from the graph.

    To follow all bytes takes half of the command's time. A report may be believed here, since names are all that is made of it.
    """
    if one.bucketed.report is None or one.before is None:
        return one.reading.buckets
    known = {bucket.node: bucket for bucket in one.before.buckets}
    parts: dict[tuple[str, str, str], tuple[Bucket, Member]] = {
        (bucket.direction, bucket.kind, member.fqn): (bucket, member) for bucket in known.values() for member in bucket.members
    }
    # Several launches, such as the gathers of each microbatch, may have one triple of direction, kind and FQN. Names need only
    # the triples of a bucket, and times come from the flights. Rounds, levels and groups here may be those of another launch.
    for said in one.bucketed.report.buckets:
        found = [parts[said.direction, said.kind, fqn] for fqn in said.members if (said.direction, said.kind, fqn) in parts]
        if len(found) < len(said.members) or not found:  # as where a parameter has several names
            return one.reading.buckets
        known[said.launch] = replace(found[0][0], node=said.launch, members=tuple(member for _, member in found))
    return [known[node.name] for node in one.graph.nodes if launch_kind(node) is not None]


def _bare_name(bucket: Bucket) -> str:
    """A name for a bucket if it is not known what it carries: its module and its node."""
    return f"of {bucket.module} ({bucket.node})" if bucket.module else bucket.node


def _behind(flight: Flight, timeline: Timeline, names: Mapping[tuple[Phase, str], tuple[str, Direction]]) -> str:
    """Name of the launch that ``flight`` queues behind, which may be in the graph before."""
    before = [one for one in timeline.flights if one.node == flight.behind and one.start <= flight.start]
    # Graphs may have nodes of one name: the last launch of that name that began before is meant.
    return names[before[-1].phase, flight.behind][0]
