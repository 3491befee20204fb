"""What a pass made of a plan, as data: a report of each graph, read off the graph if the pass gives none, labels of buckets,
and how exposed each bucket is on a cluster."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.buckets import gathered_lives, peak_bytes
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.graph.order import compute_names, displaced, order_of
from pytest_fxbucket.graph.updates import readiness, updates_between
from pytest_fxbucket.passes.compute import overlapped
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import UntouchedLaunch
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.of_plan import NamedFlight, SimulatedRank, simulated_ranks
from pytest_fxbucket.step.pipelined import stage_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.pipelined import Pipelined
    from pytest_fxbucket.step.roles import Phase, Transformed


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


def labels(buckets: Sequence[BucketReport], registered: Sequence[str]) -> dict[str, str]:
    """Label of each bucket by its launch: its entry, numbered where that has several of one direction and kind.

    Numbers follow the first member's place among ``registered``, so that both directions have the same; by size, where there
    are no entries, the order of launch.
    """
    place = {fqn: i for i, fqn in enumerate(registered)}
    families: dict[tuple[str, str, str], list[BucketReport]] = {}
    for bucket in buckets:
        families.setdefault((bucket.entry, bucket.direction, bucket.kind), []).append(bucket)
    found: dict[str, str] = {}
    for (entry, _, _), own in families.items():
        ordered = sorted(own, key=lambda bucket: place.get(bucket.members[0], 0) if bucket.members else 0) if entry else own
        for number, bucket in enumerate(ordered, 1):
            numbered = f" #{number}" if len(own) > 1 or not entry else ""
            found[bucket.launch] = f"{entry}{numbered}".strip()
    return found


# Which reductions the updates of which entry are made of, as data.


@dataclass(frozen=True, slots=True)
class EntryUpdates:
    """The updates of an entry, or of a module where no entry names its parameters, as JSON has them."""

    entry: str
    parameters: tuple[str, ...]
    """FQNs, in the order in which the step returns or writes them."""
    states: int
    """How many tensors of optimizer state are updated with them."""
    reductions: tuple[str, ...]
    """Kind and label of each launch that brings a gradient which they are made of, in order of launch."""


def entry_updates(reading: GraphAnalysis, entry_of: Mapping[str, str], labels: Mapping[str, str]) -> tuple[EntryUpdates, ...]:
    """The updates that ``reading`` found, in order of their first parameter; ``labels`` names buckets by their launch's node.

    Of a gradient that is reduced twice, the update is made of the second reduction.
    """
    order: dict[str, int] = {}
    brings: dict[str, str] = {}
    for bucket in reading.buckets:
        if bucket.kind in REDUCTIONS:
            # Buckets are in order of launch: a gradient's second reduction, as in hybrid sharding, replaces its first.
            name = f"{bucket.kind} {labels.get(bucket.node) or 'of ' + ', '.join(filter(None, bucket.fqns))}"
            order.setdefault(name, bucket.launch)
            brings |= dict.fromkeys(filter(None, bucket.fqns), name)
    parameters: dict[str, list[str]] = {}
    names: dict[str, set[str]] = {}
    for update in reading.updates:
        if update.role == "param":
            entry = entry_of.get(update.fqn) or update.fqn.rpartition(".")[0] or update.fqn
            parameters.setdefault(entry, []).append(update.fqn)
            names.setdefault(entry, set()).update(brings[fqn] for fqn in update.gradients | update.norms if fqn in brings)
    # A state is called as its parameter, with the optimizer's key behind: ``layers.0.weight.exp_avg``.
    states = Counter(update.fqn.rpartition(".")[0] for update in reading.updates if update.role == "state")
    return tuple(
        EntryUpdates(
            entry, tuple(fqns), sum(states[fqn] for fqn in set(fqns)), tuple(sorted(names[entry], key=order.__getitem__))
        )
        for entry, fqns in parameters.items()
    )


# The report of a pass that gives none, read off its graph: everything but why.


def report_of_reading(
    before: GraphAnalysis, after: GraphAnalysis, graphs: tuple[fx.Graph, fx.Graph], entry_of: Mapping[str, str]
) -> PassReport:
    """The report of a pass by the graphs that went in and came out, which ``before`` and ``after`` were read off.

    A launch is a bucket if an entry names one of its parameters (by size, where ``entry_of`` is empty, if it carries any).
    """
    planned = [bucket for bucket in after.buckets if bucket.wait is not None and _entries(bucket, entry_of)]
    left = [bucket for bucket in after.buckets if bucket not in planned]
    graph = graphs[1]
    nodes = list(graph.nodes)
    labels = [(nodes[at], entry_of.get(fqn) or fqn.rpartition(".")[0] or fqn) for at, _, fqn in after.computes]
    # None of these lacks a wait: the 0 is for the type checker alone.
    spans = [(nodes[bucket.launch], [nodes[bucket.wait or 0]]) for bucket in planned]
    behind = overlapped(graph, spans, labels)
    counts = _launches_before(before, planned)
    updates = _updates(after, planned, entry_of)
    return PassReport(
        len(before.buckets),
        len(after.buckets),
        tuple(
            BucketReport(
                entry=" & ".join(entry for entry in _entries(bucket, entry_of) if entry),
                direction=bucket.direction,
                kind=bucket.kind,
                group=bucket.group,
                op=bucket.op,
                dtype="+".join(sorted({dtype_name(member.dtype) for member in bucket.members})),
                members=bucket.fqns,
                bytes=bucket.bytes,
                launch=bucket.node,
                launches_before=count,
                overlap_nodes=hidden.nodes,
                overlaps=hidden.of,
                updates=between if bucket.kind in REDUCTIONS else (),
            )
            for bucket, count, hidden, between in zip(planned, counts, behind, updates, strict=True)
        ),
        tuple(_left_alone(bucket) for bucket in left),
        *displaced(*map(compute_names, graphs)),
        peak_bytes(gathered_lives(before)),
        peak_bytes(gathered_lives(after)),
        order_of(graph).barriers,
    )


def _updates(after: GraphAnalysis, planned: Sequence[Bucket], entry_of: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Of each bucket the other entries of which an update stands between its launch and its wait."""
    names = [" & ".join(_entries(bucket, entry_of)) or bucket.node for bucket in planned]
    if after.order is None or not after.updating:
        return [() for _ in planned]
    waits = {
        where: name for bucket, name in zip(planned, names, strict=True) if bucket.kind in REDUCTIONS for where in bucket.waits
    }
    found = readiness(after.order, after.updating, waits)
    return updates_between(found, [(b.launch, b.wait or 0, name) for b, name in zip(planned, names, strict=True)])


def _entries(bucket: Bucket, entry_of: Mapping[str, str]) -> list[str]:
    """Entries of what ``bucket`` carries, each once; by size one that has no name."""
    if not entry_of:
        return [""] if any(bucket.fqns) else []
    return list(dict.fromkeys(entry_of[fqn] for fqn in bucket.fqns if fqn in entry_of))


def _launches_before(before: GraphAnalysis, planned: list[Bucket]) -> Iterator[int]:
    """Of each bucket how many launches brought its members before, those of its own direction first."""
    # Each member takes the first launch of its parameter that no bucket has taken: launches and buckets are both in order, so
    # that rounds meet their own.
    found: dict[tuple[str, str, str], deque[str]] = {}
    for bucket in before.buckets:
        for fqn in bucket.fqns:
            found.setdefault((bucket.kind, bucket.direction, fqn), deque()).append(bucket.node)
    for bucket in planned:
        other = "backward" if bucket.direction == "forward" else "forward"
        taken = set()
        for fqn in bucket.fqns:
            left = found.get((bucket.kind, bucket.direction, fqn)) or found.get((bucket.kind, other, fqn))
            # A member that no launch brought before counts by the bucket itself, which is one launch.
            taken.add(left.popleft() if left else bucket.node)
        yield len(taken)


def _left_alone(bucket: Bucket) -> UntouchedLaunch:
    fqns = tuple(fqn for fqn in bucket.fqns if fqn)
    what = f"{bucket.kind} of {', '.join(fqns) or bucket.node} ({bucket.direction})"
    unnamed = "no entry names its parameter" if fqns else "it carries no parameter and no parameter's gradient"
    return UntouchedLaunch(what, bucket.unmergeable or unnamed, bucket.direction, bucket.kind, fqns)


# A plan through a pass, as data to be told: the report of each graph, and which bytes of a launch each member has.


@dataclass(frozen=True)
class GraphReport:
    """One graph of the step after the pass."""

    phase: str
    report: PassReport
    dims: Mapping[str, str]
    """Mesh dimension of each process group, by its name."""
    members: Mapping[str, tuple[Member, ...]]
    """Of each launch by the name of its node, in byte order, as they were read off the graph."""
    labels: Mapping[str, str]
    """What to call each bucket, by the name of its launch."""
    updates: tuple[EntryUpdates, ...] = ()
    """Which reductions feed the updates of each entry; empty without an optimizer."""
    kept: tuple[str, ...] = ()
    """Entries whose forward gather backward reads, too, instead of gathering again; a parameter that has no entry itself."""
    simulated: Mapping[str, NamedFlight] = field(default_factory=dict)
    """Each launch by the name of its node, on the plan's cluster; empty without one."""


@dataclass(frozen=True)
class ExplainedParameter:
    """A parameter, or another input of the step that somebody may take for one."""

    fqn: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    role: str = "param"


@dataclass(frozen=True)
class Explanation:
    """All there is to tell of one plan."""

    plan: Plan
    pass_name: str
    graphs: tuple[GraphReport, ...]
    entry_of: Mapping[str, str]
    """Entry of each planned parameter, by FQN; empty by size and of a graph without roles."""
    parameters: tuple[ExplainedParameter, ...]
    transformations: tuple[Transformed, ...]
    """What the plan's transformations say they did, in their order."""
    by_report: bool
    """Whether the pass said this itself; otherwise it was read off the graph that came out, which does not say why."""
    pipelined: Pipelined | None = None
    """How its pipeline stages are run; None without."""
    simulation: Simulation | None = None
    """The step on the plan's cluster; None without one."""


def explanation_of(plan: Plan, pass_name: str, say: Callable[[str], None]) -> Explanation:
    """Run ``pass_name`` on ``plan`` as rank 0 of its mesh, on fake process groups. Raises what capture and passes raise."""
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), say), pass_name)
    # Rank 0 has its own stages alone; the ranks beside it along pp have the others.
    step, places = world.step(0), world.mesh.ranks(0, "pp") if plan.pipeline else (0,)
    by_report = all(one.bucketed.report is not None for rank in places for one in world.passed(rank).values())
    if not by_report and not step.has_roles:
        raise CaptureError(
            f"{plan.path}: pass {pass_name} gives no report, and without the roles of the graph's inputs none can be read off "
            "the graph; let the [graph] factory return a TracedStep with roles and fqns, or explain the pass manual"
        )
    on_cluster = simulation_of(world)
    graphs = tuple(_graph(world, rank, phase, one, on_cluster) for rank in places for phase, one in world.passed(rank).items())
    transformed = world.final_step(0).transformed
    parameters, pipelined = _parameters(world, graphs), world.final_step(0).pipelined
    return Explanation(plan, pass_name, graphs, world.entry_of, parameters, transformed, by_report, pipelined, on_cluster)


def _graph(world: PlanOnMesh, rank: int, phase: Phase, passed: Passed, on_cluster: Simulation | None) -> GraphReport:
    staged = world.plan.pipeline is not None
    # As the pass was given it: behind transformations, and of stages, whose graphs are cut out of the captured one.
    before = world.versions(rank).step.graphs[phase]
    dims = world.dims_of(before.graph) | world.dims_of(passed.bucketed.graph)
    members = {bucket.node: bucket.members for bucket in passed.reading.buckets}
    report = passed.bucketed.report
    if report is None:
        report = report_of_reading(
            world.reading(rank)[phase], passed.reading, (before.graph, passed.bucketed.graph), world.entry_of
        )
    registered = [parameter.fqn for parameter in world.step(0).parameters]
    names = labels(report.buckets, registered)
    gathers = [bucket for bucket in passed.reading.buckets if bucket.kind == "all_gather" and bucket.direction == "forward"]
    read = [fqn for bucket in gathers if bucket.backward_use is not None for fqn in bucket.fqns if fqn]
    kept = tuple(dict.fromkeys(world.entry_of.get(fqn, fqn) for fqn in read))
    # A graph of one stage says so in its phase; of others, such as ``update``, each place along pp has one of the same name.
    name = f"pp {world.mesh.at(rank, 'pp')} {phase}" if staged and stage_of(phase) is None else phase
    updates = entry_updates(passed.reading, world.entry_of, names)
    simulated = on_cluster.launches(rank, phase) if on_cluster is not None else {}
    return GraphReport(name, report, dims, members, names, updates, kept, simulated)


def _parameters(world: PlanOnMesh, graphs: tuple[GraphReport, ...]) -> tuple[ExplainedParameter, ...]:
    """Parameters in order of registration, then buffers; of a graph without roles what the report names."""
    step = world.step(0)
    if not step.has_roles:
        reports = [graph.report for graph in graphs]
        named = [fqn for report in reports for bucket in report.buckets for fqn in bucket.members]
        named += [fqn for report in reports for left in report.left_alone for fqn in left.fqns]
        return tuple(ExplainedParameter(fqn) for fqn in dict.fromkeys(named))
    known = [ExplainedParameter(p.fqn, p.aliases, p.trainable) for p in step.parameters]
    buffers = [value.fqn for values in step.inputs.values() for value in values if value.role == "buffer"]
    return (*known, *(ExplainedParameter(fqn, role="buffer") for fqn in dict.fromkeys(buffers)))


def graph_as_data(graph: GraphReport) -> dict[str, Any]:
    """The report, with process groups by mesh dimension, and where in a rank's part of a launch each member begins."""
    data = graph.report.to_dict(graph.dims)
    for plain, bucket in zip(data["buckets"], graph.report.buckets, strict=True):
        read = graph.members.get(bucket.launch, ())
        # If report and graph differ in how many members there are, nobody knows which offset is whose.
        known = len(read) == len(bucket.members)
        plain["label"] = graph.labels[bucket.launch]
        plain["group"] = graph.dims.get(bucket.group, "unknown group")
        plain["offsets"] = [member.offset for member in read] if known else None
        one = graph.simulated.get(bucket.launch)
        plain["simulated"] = one.as_data() if one is not None else None
    data["updates"] = [asdict(one) for one in graph.updates]
    return data
