"""Plans whose work crosses iterations or runs in pipeline stages: their graphs for the ranks, and their audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.checks.bitwise.judge import RUNS
from pytest_fxbucket.checks.promises.iterations import ReadPhase, hidden_by_nothing, iteration_problems
from pytest_fxbucket.pipeline.running import PipelinedTask
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.selectors import entry_by_parameter, resolve
from pytest_fxbucket.step.iterations import CROSSING
from pytest_fxbucket.step_runner import PhaseGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase

_NAME = "next_iteration"


def crosses(world: PlanOnMesh) -> bool:
    """Whether the plan's step has set-up, steady and clean-up graphs."""
    return set(world.final_step(0).graphs) == set(CROSSING)


def moved_entries(world: PlanOnMesh) -> dict[str, str]:
    """By parameter, the entry that is reduced and updated in the next call: as asked for, or else as the graphs have it."""
    asked = _moved_entries(world)
    return asked | {fqn: world.entry_of.get(fqn, fqn) for fqn in _updated_late(world, 0) if fqn not in asked}


def _moved_entries(world: PlanOnMesh) -> dict[str, str]:
    """By parameter, the entry that the plan's next_iteration names; empty if the user's own transformation moves them."""
    step = world.step(0)
    listed = [entry for one in world.plan.transform if one.name == _NAME for entry in parse_entries(one.args["entries"], _NAME)]
    found = resolve(listed, step.names, step.modules, aliases=step.names, unplanned="allow", where=_NAME)
    return entry_by_parameter(found.entries)


def crossing_problems(world: PlanOnMesh, rank: int) -> list[str]:
    """How the graphs of rank ``rank`` fall short of what the plan asks to move, a sentence each; none if nothing crosses."""
    if not crosses(world):
        return []
    asked = _moved_entries(world)
    unasked = [fqn for fqn in _updated_late(world, rank) if asked and fqn not in asked]
    return [
        *(f"{fqn} is updated in the next call, and no entry of {_NAME} has it" for fqn in unasked),
        *iteration_problems(moved_entries(world), _bucketed(world, rank), _phased(world, rank)),
    ]


def _updated_late(world: PlanOnMesh, rank: int) -> list[str]:
    """Parameters that clean-up updates: the only sign of what a user's own transformation moved."""
    return [value.fqn for value in world.final_step(rank).outputs["cleanup"] if value.role == "param"]


def crossing_notes(world: PlanOnMesh) -> list[str]:
    """What people should know of a plan that keeps all that it promises."""
    moved = moved_entries(world) if crosses(world) else {}
    entries = hidden_by_nothing(moved, _phased(world, 0)["steady"]) if moved else []
    return [f"{entry} moves, but is needed before anything is computed: nothing hides its reduction" for entry in entries]


def crossing_graphs(world: PlanOnMesh, rank: int) -> tuple[PhaseGraph, ...]:
    """Set-up, steady and clean-up for rank ``rank``; none if nothing crosses."""
    if not crosses(world):
        return ()
    step = world.final_step(rank)
    return tuple(
        PhaseGraph(phase, world.final(rank)[phase].portable, tuple(step.inputs[phase]), tuple(step.outputs[phase]))
        for phase in CROSSING
    )


def stage_graphs(world: PlanOnMesh, rank: int) -> PipelinedTask | None:
    """The graphs of rank ``rank``'s pipeline stages; None for a plan without."""
    step, final = world.final_step(rank), world.final(rank)
    if step.pipelined is None:
        return None
    graphs = (PhaseGraph(phase, one.portable, step.inputs[phase], step.outputs[phase]) for phase, one in final.items())
    return PipelinedTask.of(step.pipelined, world.mesh.at(rank, "pp"), graphs)


def run_names(world: PlanOnMesh) -> Sequence[str]:
    """The first words of ranks' marks, in the order of :func:`run_readings`."""
    if world.plan.pipeline is not None:
        return (RUNS[0], *world.final(0))
    return (RUNS[0], *CROSSING) if crosses(world) else RUNS


def run_readings(world: PlanOnMesh, phase: Phase, rank: int) -> list[GraphAnalysis]:
    """Readings of the graphs that rank ``rank`` runs: first the reference, then the graphs that are checked."""
    return [world.reference_reading(rank)[phase], *(one.reading for one in _checked(world, phase, rank))]


def run_digests(world: PlanOnMesh, phase: Phase, rank: int) -> list[str]:
    """Digests of the graphs that rank ``rank`` checks."""
    return [one.digest for one in _checked(world, phase, rank)]


def _checked(world: PlanOnMesh, phase: Phase, rank: int) -> list[Passed]:
    """The graphs that rank ``rank`` runs besides the reference."""
    final = world.final(rank)
    if world.plan.pipeline is not None:
        return list(final.values())
    return [final[one] for one in (CROSSING if crosses(world) else (phase,))]


def _bucketed(world: PlanOnMesh, rank: int) -> ReadPhase:
    """The one graph out of which set-up, steady and clean-up were made."""
    # The transformation that makes three graphs stands last: the graph is that of the one before it, or that of the pass.
    versions = world.versions(rank)
    if len(versions.after) > 1:
        step, reading = versions.after[-2].step, versions.after[-2].looked["joint"].reading
    else:
        step, reading = versions.step, versions.passed["joint"].reading
    return ReadPhase(reading, step.inputs["joint"], step.outputs["joint"])


def _phased(world: PlanOnMesh, rank: int) -> dict[Phase, ReadPhase]:
    step, final = world.final_step(rank), world.final(rank)
    return {phase: ReadPhase(final[phase].reading, step.inputs[phase], step.outputs[phase]) for phase in CROSSING}
