"""The passes that can be run on a step: ours, torch's, and anybody's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import fx

from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.cost.costs import Roofline, groups_of, own_cost
from pytest_fxbucket.errors import FxbucketError, PassError, PlanError
from pytest_fxbucket.graph.counted_anew import with_names_of_before
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.reading import read_given
from pytest_fxbucket.pass_names import in_order
from pytest_fxbucket.passes.auto.estimates import Estimates, NodeKey
from pytest_fxbucket.passes.foreign import run_foreign
from pytest_fxbucket.passes.keep_order import AFTER, forget_order, without_kept_order
from pytest_fxbucket.passes.manual import ManualPass, within_room
from pytest_fxbucket.passes.packers import PACKERS
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import Targets, by_module, by_parameter, by_size
from pytest_fxbucket.plan.pass_consistency import agree_with_entries
from pytest_fxbucket.plan.selectors import entry_by_parameter
from pytest_fxbucket.process.elsewhere import hold
from pytest_fxbucket.step.portable import digest, encode, own_copy

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.schema_bucket import Bucket
    from pytest_fxbucket.plan.selectors import ResolvedEntry
    from pytest_fxbucket.step.roles import Parameter, Phase, StepGraph


@dataclass(frozen=True)
class Bucketed:
    """What a pass made of one graph."""

    graph: fx.Graph
    root: torch.nn.Module
    """Holds the constants that ``graph`` names."""
    report: PassReport | None
    """What the pass says it did; None from a pass that is not ours."""
    modules: tuple[str, ...] = ()
    """Python modules that register the operators of the graph."""
    notes: tuple[str, ...] = ()
    """What the pass goes by beside the graph, a clause each."""

    @cached_property
    def graph_module(self) -> fx.GraphModule:
        """The graph, ready to run; compiled when first called, which costs more than the pass."""
        return uncompiled(self.root, self.graph)


@dataclass(frozen=True)
class PassJob:
    """One graph of a step, and what a pass is to do with it."""

    step: StepGraph
    phase: Phase
    reading: GraphAnalysis
    """Of the graph before the pass."""
    plan: Plan
    entries: Sequence[ResolvedEntry]
    seconds: dict[NodeKey, float] = field(default_factory=dict)
    """Estimated seconds of this graph's nodes, as far as another rank has asked for them: all ranks must go by the same."""
    twice: bool = False
    """Whether somebody else's pass is run again, to see that it makes the same graph."""


def run_pass(name: str, job: PassJob) -> Bucketed:
    """Run the pass ``name`` (manual, torch, module:callable) on a copy of the job's graph, with its rank's groups in place.

    ``name`` may be several, separated by commas: each is run on the graph that the one before made. Then there is no report,
    since none tells of all that was done.

    Raises :class:`PassError` or :class:`PlanError` if it cannot be done, whatever the pass itself raised.
    """
    names = in_order(name)
    if len(names) == 1:
        return _run_one(names[0], job)
    given = own_copy(job.step.graphs[job.phase])
    made = Bucketed(given.graph, given, None)
    for number, one in enumerate(names, 1):
        done = _run_one(one, job)
        made = Bucketed(done.graph, done.root, None, _joined(made.modules, done.modules), _joined(made.notes, done.notes))
        job = _job_behind(job, made, f"behind pass {one}, number {number} of {len(names)}")
    return made


def _joined(some: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*some, *more)))


def _job_behind(job: PassJob, made: Bucketed, where: str) -> PassJob:
    """``job`` with ``made`` for its graph. Raises PassError, beginning with ``where``, if that cannot be read."""
    step = replace(job.step, graphs={**job.step.graphs, job.phase: made.graph_module})
    try:
        reading = read_given(without_kept_order(made.graph), step.inputs[job.phase], step.outputs[job.phase])
    except FxbucketError as error:
        raise PassError(f"{where}: {error}") from error
    return replace(job, step=step, reading=reading)


def _run_one(name: str, job: PassJob) -> Bucketed:
    if name == "manual":
        return _run_ours(job)
    root = job.step.graphs[job.phase]
    plans = _plans_by_module(job) if job.plan.bucket.enabled else []
    made = run_foreign(name, root, plans, twice=job.twice)
    graph = with_names_of_before(root.graph, made.module.graph)
    _refuse_other_ends(name, graph, job)
    anew = () if graph is made.module.graph else ("the pass counts names anew: nodes are called here as before it",)
    return Bucketed(graph, made.module, None, made.modules, (*made.notes, *anew))


def _run_ours(job: PassJob) -> Bucketed:
    root, packer = job.step.graphs[job.phase], job.plan.bucket.packer
    modules = (AFTER,) if job.plan.overlap.insert_overlap_deps else ()

    def run(bucket: Bucket, estimates: Estimates | None) -> tuple[fx.Graph, PassReport]:
        graph = copy.deepcopy(root.graph)
        forget_order(graph)
        return graph, ManualPass(bucket, job.plan.overlap).run(graph, _targets(graph, job), estimates)

    def again() -> str:
        return digest(encode(within_room(job.plan.bucket, run, estimates_of(job))[0], root, modules))

    try:
        graph, report = within_room(job.plan.bucket, run, estimates_of(job))
        if job.twice and packer not in PACKERS:
            hold(f'packer "{packer}"', digest(encode(graph, root, modules)), again)
    except PlanError as error:
        where = str(job.plan.path)
        raise PlanError(str(error) if where in str(error) else f"{where}: {error}") from None
    return Bucketed(graph, root, report, modules)


def estimates_of(job: PassJob) -> Estimates | None:
    """Seconds of nodes, by the plan's own cost model or by what its cluster can do; None for a schedule by hand."""
    if job.plan.overlap.schedule == "manual":
        return None
    cluster = cluster_of(job.plan)
    assert cluster is not None  # the plan was refused without
    cost = own_cost(job.plan, job.step, cluster) or Roofline(cluster, groups_of(job.step))
    return Estimates(cost, cluster, job.seconds)


def _refuse_other_ends(name: str, graph: fx.Graph, job: PassJob) -> None:
    """A pass may change how values are computed, never how many go in and out."""
    ends = {
        "inputs": (len(graph.find_nodes(op="placeholder")), len(job.step.inputs[job.phase])),
        "outputs": (len(returned(graph.output_node())), len(job.step.outputs[job.phase])),
    }
    for what, (have, expected) in ends.items():
        if have != expected:
            raise PassError(f"pass {name} returned a graph with {have} {what}, expected {expected} as before it")


def _targets(graph: fx.Graph, job: PassJob) -> Targets:
    plan, inputs, outputs = job.plan, job.step.inputs[job.phase], job.step.outputs[job.phase]
    if not plan.bucket.has_entries and not job.step.has_roles:
        return by_size(graph)
    if not plan.bucket.has_entries:
        entry_of = {parameter.fqn: "" for parameter in job.step.parameters}
        return by_parameter(graph, job.reading, inputs, entry_of, outputs=outputs)
    if job.step.has_roles:
        entry_of = entry_by_parameter(job.entries)
        return by_parameter(graph, job.reading, inputs, entry_of, [entry.name for entry in job.entries], outputs)
    plans = [(entry.name, entry.selectors) for entry in plan.bucket.plan]
    targets = by_module(graph, plans, where=f"{plan.path}: [bucket]", unplanned=plan.bucket.unplanned)
    agree_with_entries(plan, targets.entries, str(plan.path))
    return targets


def _plans_by_module(job: PassJob) -> list[str | list[str]]:
    if job.step.has_roles:
        return module_plans(_entries_within(job), job.step.parameters)
    plans = job.plan.bucket.plan
    return [entry.selectors[0] if len(entry.selectors) == 1 else list(entry.selectors) for entry in plans]


def _entries_within(job: PassJob) -> Sequence[ResolvedEntry]:
    """The plan's entries; in a graph of a pipeline stage what that carries of them."""
    if job.step.pipelined is None:
        return job.entries
    carried = {fqn for bucket in job.reading.buckets for fqn in bucket.fqns}
    parted = (replace(one, parameters=tuple(fqn for fqn in one.parameters if fqn in carried)) for one in job.entries)
    return [one for one in parted if one.parameters]


def module_plans(entries: Sequence[ResolvedEntry], parameters: Sequence[Parameter]) -> list[str | list[str]]:
    """Entries as module FQNs: for each the fewest modules that hold its parameters and no others."""
    everything = [parameter.fqn for parameter in parameters]
    plans: list[str | list[str]] = []
    for entry in entries:
        names = _modules_of(set(entry.parameters), everything)
        plans.append(names[0] if len(names) == 1 else names)
    return plans


def _modules_of(wanted: set[str], everything: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for fqn in sorted(wanted, key=list(everything).index):
        parts = fqn.split(".")[:-1]
        if not parts:
            raise PassError(f"parameter {fqn} belongs to the root module, which a plan of modules cannot name")
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        # The outermost module that holds nothing but wanted parameters; if there is none, the parameter's own module.
        clean = [p for p in prefixes if all(other in wanted for other in everything if other.startswith(p + "."))]
        found[clean[0] if clean else prefixes[-1]] = None
    return list(found)
