"""The passes that can be run on a step: ours, torch's, and anybody's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_fxbucket.capture.blame import user_frame
from pytest_fxbucket.compat import torch_pass
from pytest_fxbucket.errors import FxbucketError, PassError
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_module, by_parameter
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Parameter, Phase, StepGraph
    from pytest_fxbucket.graph.reading import Reading
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.selector import ResolvedEntry

ForeignPass = Callable[[fx.GraphModule, Sequence[str | list[str]]], Any]


@dataclass(frozen=True)
class Bucketed:
    """What a pass made of one graph."""

    graph_module: fx.GraphModule
    report: PassReport | None
    """What the pass says it did; None from a pass that is not ours."""
    modules: tuple[str, ...] = ()
    """Python modules that register the operators of the graph."""


@dataclass(frozen=True)
class Job:
    """One graph of a step, and what a pass is to do with it."""

    step: StepGraph
    phase: Phase
    reading: Reading
    """Of the graph before the pass."""
    plan: Plan
    entries: Sequence[ResolvedEntry]


def run_pass(name: str, job: Job) -> Bucketed:
    """Run the pass ``name`` (manual, torch, module:callable) on a copy of the job's graph, with its rank's groups in place.

    Raises :class:`PassError` or :class:`PlanError` if it cannot be done, whatever the pass itself raised.
    """
    graph_module = job.step.graphs[job.phase]
    # the root's constants are shared, never written
    work = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    if name == "manual":
        return _run_manual(work, job)
    foreign, modules = _foreign(name)
    plans = _plans_by_module(job) if job.plan.bucket.enabled else []
    try:
        result = foreign(work, plans)
    except FxbucketError:
        raise
    except Exception as error:
        frame = user_frame(error)
        where = f" at {frame}" if frame else ""
        raise PassError(f"pass {name} raised {type(error).__name__}{where}: {' '.join(str(error).split())[:400]}") from error
    if not isinstance(result, fx.GraphModule):
        raise PassError(f"pass {name} returned a {type(result).__name__}, expected a GraphModule")
    return Bucketed(result, None, modules)


def _run_manual(work: fx.GraphModule, job: Job) -> Bucketed:
    plan = job.plan
    if job.step.has_roles:
        entry_of = {fqn: entry.name for entry in job.entries for fqn in entry.parameters}
        targets = by_parameter(work.graph, job.reading, job.step.inputs[job.phase], entry_of)
    else:
        targets = by_module(work.graph, [(entry.name, entry.selectors) for entry in plan.bucket.plan], None)
    manual = ManualPass(
        merging=plan.bucket.enabled,
        layout="execution" if plan.bucket.layout == "execution" else "registration",
        prefetch=plan.overlap.prefetch,
        defer_reduce=plan.overlap.defer_reduce,
    )
    report = manual.run(work.graph, targets)
    work.recompile()
    return Bucketed(work, report)


def _plans_by_module(job: Job) -> list[str | list[str]]:
    if job.step.has_roles:
        return module_plans(job.entries, job.step.parameters)
    plans = job.plan.bucket.plan
    return [entry.selectors[0] if len(entry.selectors) == 1 else list(entry.selectors) for entry in plans]


def _foreign(name: str) -> tuple[ForeignPass, tuple[str, ...]]:
    if name == "torch":
        return torch_pass.torch_manual_overlap_bucketing, (torch_pass.OPERATORS,)
    return import_callable(name, "--fxbucket-pass"), (name.partition(":")[0],)


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
        clean = [p for p in prefixes if all(other in wanted for other in everything if other.startswith(p + "."))]
        found[clean[0] if clean else prefixes[-1]] = None
    return list(found)
