"""Steps captured from models of pass_models, through our pass, and what the graphs hold then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import Bucket as Launched
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.result import Passed
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket, Overlap
from pytest_fxbucket.plan.schema_model import Model, Parallel
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.step.roles import StepGraph

LLAMA = ("tok_embeddings", "layers.[0-1]", "norm+output")
STACK = ("layers.*",)
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "llama": ("fixtures.models.llama:build", LLAMA),
    "tied": ("fixtures.models.llama:build", ("tok_embeddings", "layers.[0-1]", "norm")),
    **{
        name: (f"suites.passes.pass_models:{name}", STACK)
        for name in ("linears", "late", "normed", "batch_normed", "uneven", "two_dtypes")
    },
    "twice": ("suites.passes.pass_models:twice", ("layers.0", "layers.1")),
}


@dataclass(frozen=True)
class Outcome:
    """One step, before and after the pass."""

    step: StepGraph
    before: GraphAnalysis
    passed: Passed

    @property
    def after(self) -> GraphAnalysis:
        return self.passed.reading

    @property
    def graph(self) -> fx.Graph:
        return self.passed.bucketed.graph

    @property
    def report(self) -> PassReport:
        report = self.passed.bucketed.report
        assert report is not None
        return report


def plan_of(case: str, *, entries: Sequence[Any] | None = None, unplanned: str = "error", **rest: Any) -> Plan:
    """Options are those of [parallel], [bucket] and [overlap], by their names."""
    factory, names = CASES[case]
    module = factory.partition(":")[0]
    args = {"layers": 2, "tied": case == "tied"} if "llama" in factory else {}
    model = Model(factory, f"{module}:batch", args, f"{module}:loss")
    bucket = Bucket(
        plan=parse_entries(list(names if entries is None else entries), ""), unplanned=unplanned, **_taken(Bucket, rest)
    )
    rest.setdefault("reshard_after_forward", True)  # backward then has a gather of every entry
    overlap, parallel = Overlap(**_taken(Overlap, rest)), Parallel(dp_shard=4, **_taken(Parallel, rest))
    assert not rest, f"options of no table: {rest}"
    return Plan(Path("plan.toml"), model=model, parallel=parallel, bucket=bucket, overlap=overlap)


def _taken(table: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Take out of ``options`` what are keys of ``table``."""
    return {key: options.pop(key) for key in list(options) if key in table.__dataclass_fields__}


def world_of(case: str, **options: Any) -> PlanOnMesh:
    """``case`` through our pass; the step is traced once for all options of [bucket] and [overlap]."""
    plan = plan_of(case, **options)
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")
    parallel = {key: value for key, value in options.items() if key in Parallel.__dataclass_fields__}
    world.captured._steps[0] = _traced(case, tuple(sorted(parallel.items())))
    return world


def passed(case: str, *, entries: Sequence[str] | None = None, **options: Any) -> Outcome:
    """``case`` through our pass, as rank 0 gets it."""
    key = repr((case, entries, sorted(options.items())))
    if key not in _PASSED:
        world = world_of(case, entries=entries, **options)
        _PASSED[key] = Outcome(world.step(0), world.reading(0)["joint"], world.passed(0)["joint"])
    return _PASSED[key]


_PASSED: dict[str, Outcome] = {}


@cache
def _traced(case: str, parallel: tuple[tuple[str, Any], ...]) -> StepGraph:
    plan = plan_of(case, **dict(parallel))
    return capture_plan(plan, mesh_of(plan), 0)


def entry_of(outcome: Outcome, launched: Launched) -> str:
    """Entry of a launch, as the report says it by its members."""
    return next(b.entry for b in outcome.report.buckets if b.members == launched.fqns and b.kind == launched.kind)


def as_report(outcome: Outcome, launched: Launched) -> BucketReport:
    """What the report ought to say of a launch, by the graph alone."""
    return BucketReport(
        entry=entry_of(outcome, launched),
        direction=launched.direction,
        kind=launched.kind,
        group=launched.group,
        op=launched.op,
        dtype=str(launched.dtype).removeprefix("torch."),
        members=launched.fqns,
        bytes=launched.bytes,
        launch=launched.node,
        launches_before=len(launched.members),
        overlap_nodes=len(_computed_between(outcome, launched)),
        overlaps=_entries_between(outcome, launched),
    )


def _computed_between(outcome: Outcome, launched: Launched) -> list[str]:
    """Names of the compute between a launch and its wait."""
    place = {node.name: i for i, node in enumerate(outcome.graph.nodes)}
    return [name for name in outcome.after.names if launched.launch < place[name] < (launched.wait or 0)]


def _entries_between(outcome: Outcome, launched: Launched) -> tuple[str, ...]:
    """Entries whose compute stands between a launch and its wait, in order; one place may be of several, by name."""
    entry_of = {f: b.entry or f.rpartition(".")[0] or f for b in outcome.report.buckets for f in b.members}
    here = [(at, entry_of[f]) for at, _, f in outcome.after.computes if launched.launch < at < (launched.wait or 0)]
    return tuple(dict.fromkeys(entry for _, entry in sorted(here)))


def computes(graph: fx.Graph) -> list[str]:
    """Names of the nodes that a pass has no reason to move, in order.

    Left out: launches, waits, what only prepares an all-gather, and what only finishes a reduction.
    """
    carried: set[fx.Node] = set()
    for node in graph.nodes:
        kind = collectives.launch_kind(node)
        if kind == "all_gather":
            carried |= _closure(node, lambda n: n.all_input_nodes)
        elif kind == "reduce_scatter":
            carried |= _closure(node, lambda n: list(n.users)) | set(node.all_input_nodes)
    waits = {node for node in graph.nodes if collectives.is_wait(node)}
    return [n.name for n in graph.nodes if n not in carried | waits and n.op not in ("placeholder", "output")]


def _closure(start: fx.Node, more: Any) -> set[fx.Node]:
    found = {start}
    queue = [start]
    for node in queue:
        fresh = [n for n in more(node) if n not in found]
        found.update(fresh)
        queue.extend(fresh)
    return found
