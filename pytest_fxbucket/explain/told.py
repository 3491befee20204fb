"""A plan through a pass, as data to be told: the report of each graph, and which bytes of a launch each member has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.explain.fed import Fed, fed
from pytest_fxbucket.explain.labels import labels
from pytest_fxbucket.explain.read_off import report_of_reading
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.world import World, mesh_of

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Told as Transformed
    from pytest_fxbucket.graph.buckets import Member
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.world import Passed


@dataclass(frozen=True)
class Graph:
    """One graph of the step after the pass."""

    phase: str
    report: PassReport
    dims: Mapping[str, str]
    """Mesh dimension of each process group, by its name."""
    members: Mapping[str, tuple[Member, ...]]
    """Of each launch by the name of its node, in byte order, as they were read off the graph."""
    labels: Mapping[str, str]
    """What to call each bucket, by the name of its launch."""
    fed: tuple[Fed, ...] = ()
    """Which reductions feed the updates of each entry; empty without an optimizer."""
    kept: tuple[str, ...] = ()
    """Entries, or of what is in none the parameters, whose gathers backward reads too, instead of gathering again."""


@dataclass(frozen=True)
class Parameter:
    """A parameter, or another input of the step that somebody may take for one."""

    fqn: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    role: str = "param"


@dataclass(frozen=True)
class Told:
    """All there is to tell of one plan."""

    plan: Plan
    pass_name: str
    graphs: tuple[Graph, ...]
    entry_of: Mapping[str, str]
    """Entry of each planned parameter, by FQN; empty by size and of a graph without roles."""
    parameters: tuple[Parameter, ...]
    transformations: tuple[Transformed, ...]
    """What the plan's transformations say they did, in their order."""
    by_report: bool
    """Whether the pass said this itself; otherwise it was read off the graph that came out, which does not say why."""


def told(plan: Plan, pass_name: str, say: Callable[[str], None]) -> Told:
    """Run ``pass_name`` on ``plan`` as rank 0 of its mesh, on fake process groups. Raises what capture and passes raise."""
    world = World(plan, mesh_of(plan), pass_name, say)
    step, passed = world.step(0), world.passed(0)
    by_report = all(one.bucketed.report is not None for one in passed.values())
    if not by_report and not step.has_roles:
        raise CaptureError(
            f"{plan.path}: pass {pass_name} gives no report, and without the roles of the graph's inputs none can be read off "
            "the graph; let the [graph] factory return a TracedStep with roles and fqns, or explain the pass manual"
        )
    graphs = tuple(_graph(world, phase, one) for phase, one in passed.items())
    transformed = world.final_step(0).told
    return Told(plan, pass_name, graphs, world.entry_of, _parameters(world, graphs), transformed, by_report)


def _graph(world: World, phase: str, passed: Passed) -> Graph:
    before = next(module for name, module in world.step(0).graphs.items() if name == phase)
    dims = world.dims_of(before.graph) | world.dims_of(passed.bucketed.graph)
    members = {bucket.node: bucket.members for bucket in passed.reading.buckets}
    report = passed.bucketed.report
    if report is None:
        reading = next(reading for name, reading in world.reading(0).items() if name == phase)
        report = report_of_reading(reading, passed.reading, (before.graph, passed.bucketed.graph), world.entry_of)
    registered = [parameter.fqn for parameter in world.step(0).parameters]
    names = labels(report.buckets, registered)
    gathers = [bucket for bucket in passed.reading.buckets if bucket.kind == "all_gather" and bucket.direction == "forward"]
    read = [fqn for bucket in gathers if bucket.backward_use is not None for fqn in bucket.fqns if fqn]
    kept = tuple(dict.fromkeys(world.entry_of.get(fqn, fqn) for fqn in read))
    return Graph(phase, report, dims, members, names, fed(passed.reading, world.entry_of, names), kept)


def _parameters(world: World, graphs: tuple[Graph, ...]) -> tuple[Parameter, ...]:
    """Parameters in order of registration, then buffers; of a graph without roles what the report names."""
    step = world.step(0)
    if not step.has_roles:
        reports = [graph.report for graph in graphs]
        named = [fqn for report in reports for bucket in report.buckets for fqn in bucket.members]
        named += [fqn for report in reports for left in report.left_alone for fqn in left.fqns]
        return tuple(Parameter(fqn) for fqn in dict.fromkeys(named))
    known = [Parameter(p.fqn, p.aliases, p.trainable) for p in step.parameters]
    buffers = [value.fqn for values in step.inputs.values() for value in values if value.role == "buffer"]
    return (*known, *(Parameter(fqn, role="buffer") for fqn in dict.fromkeys(buffers)))
