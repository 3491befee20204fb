"""The check ``audit``: did the plan do what it says?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.bitwise.crossing import crossing_notes, crossing_problems
from pytest_fxbucket.checks.context import looked_at
from pytest_fxbucket.checks.promises.automatic import automatic_problems
from pytest_fxbucket.checks.promises.expectations import kept_apart, promise_of
from pytest_fxbucket.checks.promises.foreign import ChangesOutsideBuckets, checkpoint_problems, done_beside, metadata_problems
from pytest_fxbucket.checks.promises.kept import audit, left_out
from pytest_fxbucket.checks.promises.order import order_problems
from pytest_fxbucket.checks.verdict import Verdict, capped, failed, passed, said_once
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.passes.keep_order import keeps_order
from pytest_fxbucket.pipeline.composed import parameter_problems
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase, StepGraph


def run(context: Context) -> Verdict:
    """Hold every distinct graph of the ranks against what the plan promises. Raises CaptureError for a graph without roles."""
    world = context.world
    if not world.step(0).has_roles:
        raise CaptureError(
            f"{context.name}: audit needs the roles of the graph's inputs and outputs; let the [graph] factory return a "
            "TracedStep with roles and fqns, or set checks.audit = false"
        )
    promise = promise_of(context.plan, world.step(0).parameters, world.resolution, world.members)
    promise, apart = kept_apart(promise, world.step(0))
    lines = said_once(
        (
            ranks,
            [
                problem
                for phase, one in world.passed(ranks[0]).items()
                for problem in (
                    *audit(promise, world.reading(ranks[0])[phase], one.reading, _beside(world, ranks[0], phase, one)),
                    *_done_wrongly(world.versions(ranks[0]).step, context.plan, phase, one),
                    *_lost_order(context.plan, one),
                )
            ]
            + crossing_problems(world, ranks[0])
            + automatic_problems(world, ranks[0]),
        )
        for ranks, _ in world.distinct()
    )
    if world.staged is not None and world.together is not None:
        places = [world.final_step(rank) for rank in world.mesh.ranks(0, "pp")]
        lines += [*world.together.problems, *parameter_problems(world.staged, places)]
    left = _left_out(world)
    if lines:
        told = [f"left out, since no plan speaks of it: {'; '.join(left)}"] if left else []
        return failed("audit", f"{counted(len(lines), 'promise')} not kept", [*capped(lines), *told])
    entries = len(world.resolution.entries)
    idle = (f"{one.transformation} changed nothing" for one in world.final_step(0).transformed if not one.done)
    own = filter(None, (*world.resolution.notes, *idle, *crossing_notes(world), *world.step(0).notes, apart))
    notes = "; ".join(own)
    notes += f"{'; ' * bool(notes)}left out, since no plan speaks of it: {'; '.join(left)}" if left else ""
    what = (
        f"{counted(entries, 'entry')} as planned" if context.plan.bucket.has_entries else f"buckets by {context.plan.bucket.by}"
    )
    summary = f"{what} on {looked_at(world)}"
    return passed("audit", f"{summary} ({notes})" if notes else summary)


def _beside(world: PlanOnMesh, rank: int, phase: Phase, one: Passed) -> ChangesOutsideBuckets | None:
    """What a pass that is not ours changed outside of buckets; None for ours, which reports, and where too little stayed."""
    return None if one.bucketed.report is not None else done_beside(world.reading(rank)[phase], one.reading)


def _left_out(world: PlanOnMesh) -> list[str]:
    """Clauses on the changes that are left out, over the graphs of all ranks, each once."""
    found: dict[str, None] = {}
    for ranks, _ in world.distinct():
        for phase, one in world.passed(ranks[0]).items():
            if (beside := _beside(world, ranks[0], phase, one)) is not None:
                found |= dict.fromkeys(left_out(world.reading(ranks[0])[phase], one.reading, beside))
    return list(found)


def _done_wrongly(given: StepGraph, plan: Plan, phase: Phase, one: Passed) -> list[str]:
    """Sentences on metadata of nodes that a pass which is not ours made wrong, and on checkpoints that it undid."""
    if one.bucketed.report is not None:
        return []
    before, after = given.graphs[phase].graph, one.bucketed.graph
    found = metadata_problems(before, after)
    if plan.step.checkpoint:
        found += checkpoint_problems(before, after, given.inputs[phase], given.outputs[phase])
    return found


def _lost_order(plan: Plan, one: Passed) -> Iterator[str]:
    """Sentences on pairs of nodes whose order our pass says is held by edges of the graph, and is not."""
    graph, report = one.bucketed.graph, one.bucketed.report
    if report is not None:
        yield from order_problems(graph, report.kept_order)
    # Another pass says nothing of pairs, and may have edges of its own; without any it has left the order out.
    elif plan.overlap.insert_overlap_deps and one.reading.buckets and not any(map(keeps_order, graph.nodes)):
        yield "insert_overlap_deps = true, but the graph has no edge that keeps the order of launches and waits"
