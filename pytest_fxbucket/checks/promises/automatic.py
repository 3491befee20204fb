"""Does an automatic schedule keep its limits, and expose no more communication than it must, on the plan's cluster?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.cost.costs import launched_bytes, own_cost
from pytest_fxbucket.cost.memory import liveness_of
from pytest_fxbucket.graph.collectives import flight_of, is_all_gather, waits_of
from pytest_fxbucket.simulate.simulator import simulate
from pytest_fxbucket.simulate.timeline import HIDDEN

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.cost.costs import CostModel
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan.schema_bucket import Overlap
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.simulate.timeline import Timeline
    from pytest_fxbucket.step.roles import Phase, StepGraph

_GB = 1 << 30
_SAME = 1e-6
"""Relative tolerance for seconds: sums in another order round differently."""


def automatic_problems(world: PlanOnMesh, rank: int) -> list[str]:
    """How ``rank``'s graphs break the promises of ``schedule = "auto"``, one sentence each; none for another schedule.

    Raises SimulationError for a cost model of the plan's own that gives no number of seconds.
    """
    plan = world.plan
    if plan.overlap.schedule == "manual":
        return []
    cluster = cluster_of(plan)
    assert cluster is not None
    passed, before = world.passed(rank), replace(world.versions(rank).step, rank=rank)
    after = replace(before, graphs={phase: uncompiled(one.bucketed.root, one.graph) for phase, one in passed.items()})
    lines = [simulate(step, cluster, _asked_once(world, step, cluster)) for step in (before, after)]
    found = list(_exposed(*lines))
    found += _promised(passed, lines[1])
    for phase, one in passed.items():
        found += in_flight_problems(plan.overlap, one.graph)
        found += memory_problems(plan.overlap, before, after, phase, cluster)
    return found


def _asked_once(world: PlanOnMesh, step: StepGraph, cluster: Cluster) -> CostModel | None:
    """The plan's own cost model, with its answers from when the schedule was found: a model that measures varies by call."""
    cost = own_cost(world.plan, step, cluster)
    if cost is None:
        return None
    known = {
        node: seconds
        for phase, module in step.graphs.items()
        for node in module.graph.nodes
        if (seconds := world.captured.estimated(phase, step.rank).get((node.name, str(node.target)))) is not None
    }
    return lambda node: known[node] if node in known else cost(node)


def _exposed(before: Timeline, after: Timeline) -> Iterator[str]:
    if after.exposed > before.exposed * (1 + _SAME) + HIDDEN:
        yield f"{_ms(after.exposed)} ms are exposed, {_ms(before.exposed)} before the pass: the schedule is to expose less"


def _promised(passed: Mapping[Phase, Passed], after: Timeline) -> Iterator[str]:
    """Whether the graphs hold what the pass's report says of its own schedule: pairs in order, and seconds exposed."""
    for one in passed.values():
        schedule = None if one.bucketed.report is None else one.bucketed.report.schedule
        if schedule is None:
            continue
        place = {node.name: at for at, node in enumerate(one.graph.nodes)}
        for earlier, later in schedule.pairs:
            # By these defaults a node that is gone breaks no order.
            if place.get(earlier, -1) >= place.get(later, len(place)):
                yield f"{earlier} was to stand before {later}, so that compute hides a collective, and does not"
        # The simulation is of the whole step, the report of one graph: they compare only where that is the whole step.
        if len(passed) == 1 and after.exposed > schedule.exposed * (1 + _SAME) + HIDDEN:
            yield f"{_ms(after.exposed)} ms are exposed, where the schedule came to {_ms(schedule.exposed)} ms"


def in_flight_problems(rules: Overlap, graph: fx.Graph) -> Iterator[str]:
    """For each limit of ``rules``, a sentence for the first launch with which more is in flight than it allows."""
    # A launch is in flight until its first wait; one that nobody waits for would be so for ever, and does not count.
    flying: dict[fx.Node, int] = {}
    launches = [node for node in graph.nodes if flight_of(node) not in (None, "wait")]
    first_wait = {min(waits): node for node in launches if (waits := waits_of(node))}
    broken: set[str] = set()
    for node in graph.nodes:
        if node in first_wait:
            flying.pop(first_wait[node], None)
        elif flight_of(node) not in (None, "wait") and waits_of(node):
            flying[node] = launched_bytes(node)
            total, gathers = sum(flying.values()), sum(map(is_all_gather, flying))
            if rules.max_in_flight_gb is not None and total > rules.max_in_flight_gb * _GB and "bytes" not in broken:
                broken.add("bytes")
                yield (
                    f"{total / _GB:.4g} GB are in flight with {node.name}, at most max_in_flight_gb = "
                    f"{rules.max_in_flight_gb:g} may be"
                )
            if rules.max_prefetch is not None and gathers > rules.max_prefetch and "gathers" not in broken:
                broken.add("gathers")
                yield f"{gathers} all-gathers are in flight with {node.name}, at most max_prefetch = {rules.max_prefetch} may"


def memory_problems(rules: Overlap, before: StepGraph, after: StepGraph, phase: Phase, cluster: Cluster) -> Iterator[str]:
    """A sentence if the graph ``phase`` needs more memory than the limits of ``rules`` allow."""
    if rules.max_memory_increase is None and rules.max_memory_increase_gb is None:
        return
    was, now = (
        liveness_of(step.graphs[phase].graph, step.inputs[phase], step.outputs[phase], cluster.rounding).peak
        for step in (before, after)
    )
    allowed = [was * share for share in (rules.max_memory_increase,) if share is not None]
    allowed += [more * _GB for more in (rules.max_memory_increase_gb,) if more is not None]
    if now - was > min(allowed):
        yield (
            f"{now / _GB:.4g} GB live at the peak of {phase}, {was / _GB:.4g} GB before the pass: max_memory_increase allows "
            f"{min(allowed) / _GB:.4g} GB more"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"
