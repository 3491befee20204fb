"""The check ``bitwise`` of one plan: makes the ranks' tasks, runs them, and judges the outcomes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.checks.bitwise import judge
from pytest_fxbucket.checks.bitwise.compiled import launched_later, launches_of, other_launches
from pytest_fxbucket.checks.bitwise.crossing import (
    crosses,
    crossing_graphs,
    run_digests,
    run_names,
    run_readings,
    stage_graphs,
)
from pytest_fxbucket.checks.bitwise.job import FEWEST_STEPS, BitwiseOutcome, BitwiseTask
from pytest_fxbucket.checks.on_ranks import OnRanks, added_state, final_values, refuse_too_large, removed_state
from pytest_fxbucket.checks.verdict import Verdict, failed, failed_on_ranks, passed, skipped
from pytest_fxbucket.joined_step import as_run
from pytest_fxbucket.ranks.failure import RankFailure
from pytest_fxbucket.step.portable import digest
from pytest_fxbucket.step_runner import fields_of
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase

_JOB = "pytest_fxbucket.checks.bitwise.job:run"
_CROSSING_STEPS = 3
"""Set-up, then steady twice: behind what set-up handed on, and behind what steady handed on."""


class Bitwise(OnRanks):
    """The unbucketed and the final step of a plan, on ranks."""

    @cached_property
    def world(self) -> PlanOnMesh:
        """The plan at the size that ranks run, with the graphs that they run."""
        return as_run(self.context.run_world)

    def verdict(self) -> Verdict:
        """Run every graph of the step. Raises what capture and passes raise, and RankError for ranks that cannot be had."""
        plan, world, lines, largest = self.world.plan, self.world, list[str](), 0
        refuse_too_large(world.step(0).parameters, world.size, self.context.name)
        may_be_idle, idle, said = self.may_be_idle(), set[str](), dict[str, None]()
        try:
            # Equal bits mean nothing on data that could not show a wrong pass, so the data is judged, not only the differences.
            for phase in world.step(0).graphs:
                outcomes = self._outcomes(phase)
                largest = max(largest, *(outcome.peak_bytes for outcome in outcomes))
                lines += judge.wrong_graphs(outcomes, self._digests(phase))
                lines += self._nowhere(phase)
                emitted, notes = self._launched_otherwise(phase, outcomes)
                lines, said = lines + emitted, said | dict.fromkeys(notes)
                lines += judge.unusable_data(outcomes, may_be_idle, self._reading_alike(), self.idle_key)
                idle |= judge.idle(outcomes)
                lines += judge.differing_copies(outcomes, self._copies())
                lines += judge.differing_losses(outcomes, self._sharing_losses(), plan.graph is not None)
                lines += judge.never_clipped(outcomes, plan.step.clip_norm, self._copies())
                step = judge.first_step(outcomes)
                if step is not None:
                    lines += judge.difference_lines(outcomes, world.entry_of, self._stages())
                    lines += [] if self.context.briefly else self._localised(phase, step)
        except RankFailure as failure:
            readings = {rank: run_readings(world, phase, rank) for rank in range(world.size)}
            failure.buckets = judge.buckets_at_hand(failure, readings, world.members, world.entry_of, run_names(world))
            return failed_on_ranks("bitwise", failure)
        if lines:
            return failed("bitwise", "bucketed and unbucketed runs are not shown to be the same program", lines)
        summary = f"{self._equal()}{_idle(idle)}{''.join(said)}; largest rank {largest >> 20} MiB"
        return replace(passed("bitwise", summary), lines=outcomes[0].ran_on)

    def _launched_otherwise(self, phase: Phase, outcomes: Sequence[BitwiseOutcome]) -> tuple[list[str], list[str]]:
        """Launches that a compiler emitted otherwise than the graph: (problems, clauses for people to know)."""
        name, problems, notes = self.world.plan.run.compiler, dict[str, None](), dict[str, None]()
        for rank, outcome in enumerate(outcomes if name == "inductor" else ()):
            expected = launches_of(self.world.final(rank)[phase].graph)
            if other := other_launches(outcome.emitted, expected):
                problems[f"{name} launches otherwise than the graph: {other}"] = None
            elif later := launched_later(outcome.emitted, expected):
                notes[f"; {name} launches later than the graph: {later}"] = None
            else:
                notes[f"; {name} launches no later than the graph"] = None
        return list(problems), list(notes)

    def _localised(self, phase: Phase, step: int) -> list[str]:
        """Where the runs part in ``step``, by a second run of the ranks that compares node by node.

        With pipeline stages only the values that cross stages are compared: their graphs have no nodes of the whole step.
        """
        outcomes = self._outcomes(phase, step)
        if self.world.plan.pipeline is not None:
            return judge.crossed_lines(outcomes, self.world.mesh)
        return judge.first_node_lines(outcomes)

    def _reading_alike(self) -> list[list[int]] | None:
        """Sets of ranks that read one part of their sequences; none in a mesh of one batch, and None for a [graph]."""
        if self.world.plan.graph is not None:
            return None
        mesh, found = self.world.mesh, dict[int, list[int]]()
        for rank in range(mesh.size if mesh.data_ranks > 1 else 0):
            found.setdefault(mesh.at(rank, "cp"), []).append(rank)
        return list(found.values())

    def _outcomes(self, phase: Phase, localise: int | None = None) -> list[BitwiseOutcome]:
        tasks = [task_of(self.world, phase, rank, self.backend, localise) for rank in range(self.world.size)]
        self.context.say(f"waiting for {self.world.size} ranks to run {steps_of(self.world)} steps twice")
        outcomes = cast("list[BitwiseOutcome]", self.ask(_JOB, tasks, "bitwise"))
        settings = [f"rank {rank}: {line}" for rank, outcome in enumerate(outcomes) for line in outcome.ran_on]
        if settings:
            self.context.folder.write("settings.txt", "\n".join(settings))
        return outcomes

    def _nowhere(self, phase: Phase) -> list[str]:
        """A sentence for each output of the whole step that no rank's pipeline stages give."""
        world = self.world
        if world.plan.pipeline is None:
            return []
        given = {value for rank in range(world.size) for value in final_values(world, rank, phase)[1]}
        lost = [value for value in world.reference(0).outputs[phase] if value not in given]
        return [f"no rank's stages give the {judge.WORDS.get(one.role, one.role)} {one.fqn}".rstrip() for one in lost]

    def _stages(self) -> dict[str, str]:
        """By FQN, the pipeline stages that read a parameter, in words, and of the loss by ''; empty without stages."""
        staged, found = self.world.staged, dict[str, list[int]]()
        if staged is None:
            return {}
        for read in sorted(staged.microbatch.reads):
            found.setdefault(read.fqn, []).append(read.stage)
        found[""] = [staged.pipelined.stages - 1]
        return {fqn: f"stage{'s'[: len(on) - 1]} {', '.join(map(str, on))}" for fqn, on in found.items()}

    def _copies(self) -> dict[str, list[list[int]]]:
        """For each parameter, the sets of ranks that must hold the same part of it, as far as its parallel mode says."""
        plan, step = self.world.plan, self.world.step(0)
        if plan.graph is not None:
            return {fqn: [list(ranks) for ranks in sets] for fqn, sets in step.copies.items() if fqn}
        parts = ParameterShards.of(plan.parallel, self.world.mesh)
        return {one.fqn: parts.copies(one) for one in step.parameters}

    def _sharing_losses(self) -> Sequence[Sequence[int]]:
        """Sets of ranks that have the same loss."""
        if self.world.plan.graph is not None:
            return self.world.step(0).copies.get("", ())
        return self.world.mesh.sharing_batches()

    def _digests(self, phase: Phase) -> list[tuple[str, ...]]:
        world = self.world
        return [(digest(world.unbucketed(rank, phase)), *run_digests(world, phase, rank)) for rank in range(world.size)]

    def _equal(self) -> str:
        world = self.world
        outputs = [value for values in world.step(0).outputs.values() for value in values]
        gradients = sum(value.role == "grad" for value in outputs)
        what = f"loss, {gradients} gradients and parameters" if gradients else f"{len(outputs)} outputs"
        what += " and optimizer state" if any(value.role == "state" for value in outputs) else ""
        what += _not_compared(added_state(world), "added") + _not_compared(removed_state(world), "removed")
        behind = f" with the step behind {world.captured.rounding[-1]}" if world.captured.rounding else ""
        steps = f"in {steps_of(self.world)} steps over {self.over}"
        is_edged = steps_of(world) >= FEWEST_STEPS and not crosses(world)
        edges = "; the last on signed zeros, denormals and large values" if is_edged else ""
        order = "; sums in rank order, since round a ring both may rightly part" if world.plan.run.reduce == "ring" else ""
        compiled = f", both compiled by {world.plan.run.compiler}," if world.plan.run.compiler != "none" else ""
        return f"{what} equal bit for bit{behind}{compiled} on {world.size} ranks {steps}{edges}{order}"


def task_of(world: PlanOnMesh, phase: Phase, rank: int, backend: str, localise: int | None = None) -> BitwiseTask:
    """The task of ``rank`` for the graph ``phase``; ``localise``: the step to compare node by node."""
    crossing, pipelined = crossing_graphs(world, rank), stage_graphs(world, rank)
    inputs, outputs = final_values(world, rank, phase)
    step_fields = fields_of(world.plan, world.mesh, world.reference(rank), phase)
    return BitwiseTask(
        unbucketed=world.unbucketed(rank, phase),
        bucketed=None if crossing or pipelined else world.final(rank)[phase].portable,
        crossing=crossing,
        pipelined=pipelined,
        steps=steps_of(world),
        backend=backend,
        compiler=world.plan.run.compiler,
        localise_step=localise,
        final_inputs=inputs,
        final_outputs=outputs,
        **{**step_fields, "first_state": world.final_step(rank).first_state},
    )


def steps_of(world: PlanOnMesh) -> int:
    """Steps to run: as the plan says, but at least 3 where work crosses iterations and 2 where state was removed.

    Fewer would not show what one step hands to the next.
    """
    asked = world.plan.run.steps
    if crosses(world):
        return max(asked, _CROSSING_STEPS)
    return max(asked, 2) if removed_state(world) else asked


def _not_compared(names: Sequence[str], how: str) -> str:
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f" (not {names[0]}{more}, which a transformation {how})" if names else ""


def _idle(fqns: Collection[str]) -> str:
    return f" (nothing of {some(sorted(fqns))}, idle in every step)" if fqns else ""


def lacks_compiler(compiler: str) -> str:
    """A sentence on what ``compiler`` needs and this machine lacks; empty if it lacks nothing."""
    cxx = os.environ.get("CXX", "g++")
    if compiler != "inductor" or shutil.which(cxx):
        return ""
    return f'[run] compiler = "inductor" writes C++, and {cxx} is not here to compile it; install it, or name another in CXX'


def run(context: Context) -> Verdict:
    """The check ``bitwise``. Raises what capture and passes raise, and RankError for ranks that cannot be had."""
    if lacking := lacks_compiler(context.plan.run.compiler):
        return skipped("bitwise", lacking)
    choice = context.choice("bitwise")
    return choice if isinstance(choice, Verdict) else Bitwise(context, choice).verdict()
