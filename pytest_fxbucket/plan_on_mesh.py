"""One plan at one world size: captured, and passed once for each rank that is looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.capture.parallel.ring_attention import at_place
from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.compat.fx import uncompiled, why_not_its_graph
from pytest_fxbucket.errors import CaptureError, FxbucketError
from pytest_fxbucket.golden.schedule import Schedule, schedule_of
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.graph.reading import read_given
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.registry import Bucketed, PassJob, run_pass
from pytest_fxbucket.passes.result import Passed
from pytest_fxbucket.pipeline.captured import StagedStep, capture_stages
from pytest_fxbucket.pipeline.composed import ComposedStep, composed
from pytest_fxbucket.pipeline.of_plan import with_cuts
from pytest_fxbucket.pipeline.text import stage_lines
from pytest_fxbucket.plan.pass_consistency import entries_of
from pytest_fxbucket.plan.selectors import Resolution, entry_by_parameter
from pytest_fxbucket.process import collector
from pytest_fxbucket.process.state import fresh_state
from pytest_fxbucket.progress import Seconds
from pytest_fxbucket.step.mesh import Mesh, dims_text, fake_mesh, mesh_with
from pytest_fxbucket.step.pipelined import stage_of
from pytest_fxbucket.step.portable import PortableGraph, digest, encode, own_copy
from pytest_fxbucket.transforms.registry import State, TransformOutput, TransformStage, TransformStages, run_stages, stages_of
from pytest_fxbucket.transforms.step_versions import BeforePass, StepVersions, state_of, with_first_state
from pytest_fxbucket.transforms.transformation import traits_of

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.estimates import NodeKey
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.roles import Phase, StepGraph

_ALL_RANKS = 16
Spoil = Callable[[int, "Phase", Bucketed], Bucketed]
"""(rank, phase, graph) to the graph that is taken in its place."""


@dataclass
class PlanOnMesh:
    """``plan`` on the ranks of ``mesh``, through the pass ``pass_name``. Work is done when asked for, once."""

    plan: Plan
    mesh: Mesh
    pass_name: str
    say: Callable[[str], None]
    seconds: Seconds = field(default_factory=Seconds)
    """What the first rank's capture and its pass took, as "capture" and "pass"."""
    causes: set[str] = field(default_factory=set)
    """Why captures of the plan failed, so that each sentence is said once."""
    hidden_forwards: list[str] = field(default_factory=list)
    """One clause for each graph module whose forward is not the code of its graph; only the graph is compared and run."""
    last: LastStep = field(default_factory=LastStep)
    """The step captured last in this run; a plan that traces the same model and mesh reuses it."""
    _failed: FxbucketError | None = None
    _versions: dict[int, StepVersions] = field(default_factory=dict)
    _before_pass: dict[int, BeforePass] = field(default_factory=dict)
    _known: dict[Hashable, Passed] = field(default_factory=dict)
    """By digest of the graph, process groups, inputs and outputs: ranks for which all are equal share one."""
    _steps: dict[int, StepGraph] = field(default_factory=dict)
    _estimated: dict[Phase, dict[NodeKey, float]] = field(default_factory=dict)
    _sent: dict[tuple[int, Phase], tuple[StepGraph, PortableGraph]] = field(default_factory=dict)
    """By ``id`` of the step and phase; the step is kept too, so that no other one can get its ``id``."""
    _read: dict[int, Mapping[Phase, GraphAnalysis]] = field(default_factory=dict)
    """By ``id`` of the step."""
    _base: PlanOnMesh | None = None
    """The world that gives the graphs which ``_spoil`` changes."""
    _spoil: Spoil = lambda rank, phase, bucketed: bucketed
    _spoils_final: bool = False
    """Whether ``_spoil`` changes the graphs that ranks run, behind all transformations, and not those that the pass returns."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.mesh.size

    def step(self, rank: int) -> StepGraph:
        """The unbucketed step. A model is traced once, for all ranks; a factory of graphs is called for each rank."""
        first = self._first_alike(rank)
        if first not in self._steps:
            is_traced = first == 0 or self.plan.graph is not None
            self._steps[first] = self._captured(first) if is_traced else at_place(self.step(0), self.mesh, first)
        return self._steps[first]

    def _first_alike(self, rank: int) -> int:
        """The first rank whose unbucketed step is that of ``rank``."""
        if self.plan.graph is not None:
            return rank
        return self.mesh.ranks(0, "cp")[self.mesh.at(rank, "cp")] if self.plan.parallel.has_ring else 0

    @cached_property
    def _cut_plan(self) -> Plan:
        """The plan, with cuts where it asks for a number of pipeline stages."""
        return with_cuts(self.plan)

    def _captured(self, rank: int) -> StepGraph:
        """A capture that failed is not tried again, and its sentence, which may be long, is said once."""
        if self._failed is None:
            try:
                return self.last.get(self._cut_plan, self.mesh, rank, lambda plan: self._traced(plan, rank))
            except FxbucketError as error:
                self._failed = error
        if str(self._failed) in self.causes:
            raise CaptureError("there is no step to check; why is said where it was asked for first in this run")
        self.causes.add(str(self._failed))
        raise self._failed

    def _traced(self, plan: Plan, rank: int) -> StepGraph:
        self.say(f"tracing the step as rank {rank} of {self.size}")
        with collector.paused(), fresh_state(), self.seconds.of("capture", rank):
            return self._own(capture_plan(plan, self.mesh, rank))

    def _own(self, step: StepGraph) -> StepGraph:
        """``step`` with copies of graphs that came from outside: whoever made them, a pass too, may still hold them."""
        if self.plan.graph is None:
            return step
        for phase, module in step.graphs.items():
            self._note(f"the {phase} graph that was given", module)
        return replace(step, graphs={phase: own_copy(module) for phase, module in step.graphs.items()})

    def _note(self, what: str, module: object) -> None:
        if (why := why_not_its_graph(module)) and (
            clause := f"{what} {why}: the graph is what is compared and run"
        ) not in self.hidden_forwards:
            self.hidden_forwards.append(clause)

    @cached_property
    def resolution(self) -> Resolution:
        """What the plan's entries mean. Raises PlanError for entries that match nothing or overlap."""
        step = self.step(0)
        if not step.has_roles:
            return Resolution((), (), ())
        return entries_of(self.plan, [parameter.fqn for parameter in step.parameters], step.modules, step.aliases)

    @property
    def entry_of(self) -> dict[str, str]:
        """FQN of each planned parameter to its entry."""
        return entry_by_parameter(self.resolution.entries)

    def reading(self, rank: int) -> Mapping[Phase, GraphAnalysis]:
        """The graphs that the pass is given, read."""
        return self._readings(self.versions(rank).step if self.stages.before or self.plan.pipeline else self.step(rank))

    def captured_reading(self, rank: int) -> Mapping[Phase, GraphAnalysis]:
        """The graphs as captured, before any transformation, read."""
        return self._readings(self.step(rank))

    def reference_reading(self, rank: int) -> Mapping[Phase, GraphAnalysis]:
        """The graphs that bitwise compares with, read."""
        return self._readings(self.reference(rank))

    def reference(self, rank: int) -> StepGraph:
        """What the last step is compared with bit for bit: as captured, or behind the last transformation that rounds."""
        return self.versions(rank).reference if self.stages.before else self.step(rank)

    def passed(self, rank: int) -> Mapping[Phase, Passed]:
        """The graphs as they came out of the pass, as rank ``rank`` gets them."""
        return self.versions(rank).passed

    def final(self, rank: int) -> Mapping[Phase, Passed]:
        """The graphs that ``rank`` runs: behind the pass and every transformation."""
        return self.versions(rank).final

    def final_step(self, rank: int) -> StepGraph:
        """The same as a step, with the roles of its inputs and outputs."""
        return self.versions(rank).final_step

    @cached_property
    def stages(self) -> TransformStages:
        """The plan's transformations. Raises PlanError for those that cannot be, or cannot stand in that order."""
        return stages_of(self.plan)

    @property
    def rounding(self) -> list[str]:
        """Transformations after which results are rounded otherwise, each with how."""
        named = ((stage.name, traits_of(stage.function).rounds) for stage in self.stages.before)
        return [f"{name} ({rounds})" for name, rounds in named if rounds]

    def versions(self, rank: int) -> StepVersions:
        """Rank ``rank``'s step through all transformations and the pass, with its process groups in place."""
        if rank not in self._versions:
            self.step(rank), self.resolution, self.stages, self.staged  # first, since tracing has process groups of its own
            if self._base is not None:
                self._base.versions(rank)
            with collector.paused(), fresh_state(), fake_mesh(self.mesh, rank):
                self._versions[rank] = self._make_versions(rank)
        return self._versions[rank]

    def estimated(self, phase: Phase) -> dict[NodeKey, float]:
        """Seconds of nodes of the graph ``phase`` for finding schedules; all ranks use those that the first rank was told."""
        return self._estimated.setdefault(phase, {})

    def is_passed(self, rank: int) -> bool:
        """Whether the pass has run for ``rank``."""
        return rank in self._versions

    @cached_property
    def staged(self) -> StagedStep | None:
        """The step in pipeline stages; None if the plan has none."""
        if self.plan.pipeline is None:
            return None
        self.say(f"tracing its {self.plan.stages} pipeline stages")
        with collector.paused(), fresh_state():
            step = self.step(0)
            staged = self.last.in_stages(self._cut_plan, step, lambda plan: capture_stages(plan, self.mesh, step))
            return staged.under(self._cut_plan, self.mesh)

    @cached_property
    def together(self) -> ComposedStep | None:
        """The final forward and backward of all stages as one graph again; None if the plan has none."""
        if self.staged is None:
            return None
        ranks = self.mesh.ranks(0, "pp")
        graphs = [{p: uncompiled(one.bucketed.root, one.graph) for p, one in self.final(rank).items()} for rank in ranks]
        return composed(self.staged, [self.final_step(rank) for rank in ranks], graphs)

    def _run_to_pass(self, rank: int) -> BeforePass:
        captured, stages = self.step(rank), self.stages
        begin = captured if self.staged is None else self.staged.of_rank(self.mesh, rank)
        state = state_of(begin)
        before = self._staged(stages.before, begin, state, rank)
        step = before[-1].step if before else begin
        rounding = [one.step for one, stage in zip(before, stages.before, strict=True) if traits_of(stage.function).rounds]
        # A transformation that rounds otherwise changes bits by design: bitwise begins behind the last of these.
        reference = with_first_state(rounding[-1], captured, state) if rounding else captured
        return BeforePass(reference, tuple(before), with_first_state(step, captured, state), state)

    def _make_versions(self, rank: int) -> StepVersions:
        if self._base is not None and self._spoils_final:
            return self._final_spoiled(self._base.versions(rank), rank)
        if rank not in self._before_pass:
            self._before_pass[rank] = self._run_to_pass(rank)
        captured, stages, begun = self.step(rank), self.stages, self._before_pass[rank]
        step, state = begun.step, begun.state
        passed = self._through_pass(step, rank)
        behind = (
            replace(step, graphs={phase: one.bucketed.graph_module for phase, one in passed.items()}) if stages.after else step
        )
        after = self._staged(stages.after, behind, state, rank)
        final_step, final = step, passed
        if after:
            final_step = with_first_state(after[-1].step, captured, state)
            modules = tuple(dict.fromkeys(name for one in passed.values() for name in one.bucketed.modules))
            made = {
                phase: Bucketed(module.graph, module, None, (*modules, *stages.modules))
                for phase, module in final_step.graphs.items()
            }
            # A transformation may have made phases that the pass had no graph of.
            known = next(iter(passed.values())).reading
            last = {phase: passed[phase].reading if phase in passed else known for phase in made}
            final = {phase: self._look(phase, final_step, one, last[phase], final=True) for phase, one in made.items()}
        return StepVersions(begun.reference, begun.before, step, passed, tuple(after), final_step, final)

    def _final_spoiled(self, versions: StepVersions, rank: int) -> StepVersions:
        made = {phase: self._spoil(rank, phase, one.bucketed) for phase, one in versions.final.items()}
        step = replace(versions.final_step, graphs={phase: one.graph_module for phase, one in made.items()})
        final = {phase: self._look(phase, step, one, versions.final[phase].before, final=True) for phase, one in made.items()}
        return replace(versions, final_step=step, final=final)

    def _staged(self, stages: Sequence[TransformStage], step: StepGraph, state: State, rank: int) -> list[TransformOutput]:
        if stages:
            self.say(f"running {', '.join(stage.name for stage in stages)} as rank {rank} of {self.size}")
        return run_stages(stages, step, state)

    def _through_pass(self, step: StepGraph, rank: int) -> dict[Phase, Passed]:
        readings = self._readings(step)
        if self._base is not None:
            given = {phase: self._spoil(rank, phase, one.bucketed) for phase, one in self._base.passed(rank).items()}
            return {phase: self._look(phase, step, one, readings[phase]) for phase, one in given.items()}
        entries, first = self.resolution.entries, self.mesh.ranks(0, "pp")
        self.say(f"running pass {self.pass_name} as rank {rank} of {self.size}")
        with self.seconds.of("pass", rank):
            made = {
                phase: run_pass(
                    self.pass_name,
                    PassJob(step, phase, readings[phase], self.plan, entries, self.estimated(phase), rank in first),
                )
                for phase in step.graphs
            }
        for phase, one in made.items():
            if one.report is None:
                self._note(f"the {phase} graph that the pass returned", one.root)
            self.hidden_forwards += [note for note in one.notes if note not in self.hidden_forwards]
        if self.stages.modules:
            made = {p: replace(one, modules=(*one.modules, *self.stages.modules)) for p, one in made.items()}
        return {phase: self._look(phase, step, bucketed, readings[phase]) for phase, bucketed in made.items()}

    def unbucketed(self, rank: int, phase: Phase) -> PortableGraph:
        """The graph that bitwise compares with, as plain data."""
        step = self.reference(rank)
        key = (id(step), phase)
        if key not in self._sent:
            modules = self.stages.modules if self.stages.before else ()
            self._sent[key] = step, encode(step.graphs[phase].graph, step.graphs[phase], modules)
        return self._sent[key][1]

    def ranks(self) -> Sequence[int]:
        """Ranks whose graphs are looked at: all up to 16; above, first, last, those a power of two away, one of each stage."""
        if self.size <= _ALL_RANKS:
            return range(self.size)
        near = [1 << n for n in range(self.size.bit_length()) if 1 << n < self.size]
        return sorted({0, *near, *self.mesh.ranks(0, "pp"), self.size - 1})

    def distinct(self) -> list[tuple[list[int], Mapping[Phase, Passed]]]:
        """(ranks, their final graphs) for each distinct set of graphs among :meth:`ranks`, the one of rank 0 first."""
        groups: dict[tuple[str, ...], tuple[list[int], Mapping[Phase, Passed]]] = {}
        for rank in self.ranks():
            passed, final = self.passed(rank), self.final(rank)
            key = tuple(f"{phase} {one.digest}" for graphs in (passed, final) for phase, one in graphs.items())
            groups.setdefault(key, ([], final))[0].append(rank)
        return list(groups.values())

    def ranks_alike(self) -> list[tuple[list[int], Mapping[Phase, Passed]]]:
        """Like :meth:`distinct`; if only our own pass makes graphs, one rank of each pipeline stage stands for the others."""
        if self.pass_name != "manual" or self._base is not None or self.plan.graph is not None or self.plan.transform:
            return self.distinct()
        groups: dict[int, list[int]] = {}
        for rank in range(self.size):  # a ring is not beside stages
            first = self._first_alike(rank) or self.mesh.ranks(0, "pp")[self.mesh.at(rank, "pp")]
            groups.setdefault(first, []).append(rank)
        return [(ranks, self.final(first)) for first, ranks in groups.items()]

    def dims_of(self, graph: fx.Graph) -> dict[str, str]:
        """Mesh dimension of each process group that ``graph`` names, for people."""
        mesh = self.mesh.dims
        with fake_mesh(self.mesh, 0):
            groups = members_of_groups(graph)
        return {name: dims_text(ranks, mesh) + (" (own)" if name != untwinned(name) else "") for name, ranks in groups.items()}

    def by_pass(self, pass_name: str) -> PlanOnMesh:
        """The same step through another pass; captured once."""
        return PlanOnMesh(
            self.plan, self.mesh, pass_name, self.say, Seconds(self.seconds), self.causes, _steps=self._steps, _sent=self._sent
        )

    def spoiled(self, spoil: Spoil, *, final: bool = False) -> PlanOnMesh:
        """The same step through the same pass, with graphs changed by ``spoil``; captured, passed and read once.

        ``spoil`` changes the graphs that the pass returned, before the transformations behind it, or else the ``final`` ones.
        """
        other = PlanOnMesh(self.plan, self.mesh, self.pass_name, self.say, self.seconds, self.causes, _base=self, _spoil=spoil)
        other._spoils_final = final
        other._steps, other._before_pass, other._sent, other._estimated = (
            self._steps,
            self._before_pass,
            self._sent,
            self._estimated,
        )
        other._read = dict(self._read)  # a copy: a step of the other world may be freed, and its id used again
        other.__dict__["staged"] = self.staged
        return other

    def under(self, plan: Plan) -> PlanOnMesh:
        """The same step under another plan that traces the same; captured once, and what the pass is given is read once."""
        other = PlanOnMesh(plan, self.mesh, self.pass_name, self.say, causes=self.causes, _steps=self._steps)
        other._read = {id(step): self._readings(step) for step in self._steps.values()}
        return other

    @cached_property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each process group that rank 0's graphs name, before and after the pass."""
        versions = self.versions(0)
        graphs = [module.graph for step in (self.step(0), versions.final_step) for module in step.graphs.values()]
        graphs += [one.bucketed.graph for one in versions.passed.values()]
        with fake_mesh(self.mesh, 0):
            return {name: ranks for graph in graphs for name, ranks in members_of_groups(graph).items()}

    def _readings(self, step: StepGraph) -> Mapping[Phase, GraphAnalysis]:
        key = id(step)  # steps live as long as the world
        if key not in self._read:
            self._read[key] = {
                phase: read_given(without_kept_order(graph.graph), step.inputs[phase], step.outputs[phase])
                for phase, graph in step.graphs.items()
            }
        return self._read[key]

    def _look(
        self, phase: Phase, step: StepGraph, bucketed: Bucketed, before: GraphAnalysis | None, final: bool = False
    ) -> Passed:
        """``bucketed`` as one object for all ranks with the same graph; ``before``: reading of what it was made of."""
        portable = encode(bucketed.graph, bucketed.root, bucketed.modules)
        name, members = digest(portable), members_of_groups(bucketed.graph)
        inputs, outputs = step.inputs[phase], step.outputs[phase]
        key = (final, phase, name, tuple(sorted(members.items())), inputs, outputs)
        if key not in self._known:
            self._known[key] = Passed(bucketed, portable, name, inputs, outputs, members, before)
        return self._known[key]


def mesh_of(plan: Plan, *, run: bool = False) -> Mesh:
    """The mesh of ``plan``'s real job, or with ``run`` the one that is really run."""
    return mesh_with(plan.run_degrees if run else plan.degrees, plan.parallel.ep)


def text_of(world: PlanOnMesh, rank: int, name: str) -> str:
    """Body of the golden of the plan ``name`` (its path from rootdir, with the matrix id) as rank ``rank`` has it.

    Of pipeline stages it has those of all ranks along ``pp``. Raises :class:`GoldenError` for a process group that nobody
    knows.
    """
    schedules: dict[str, Schedule] = {}
    for other in world.mesh.ranks(rank, "pp"):
        for phase, one in world.final(other).items():
            of = "" if world.plan.pipeline is None or stage_of(phase) is not None else f" of pp {world.mesh.at(other, 'pp')}"
            schedules[phase + of] = schedule_of(one.reading, world.entry_of, world.dims_of(one.bucketed.graph))
    how = world.final_step(rank).pipelined
    return golden_text(name, world.step(rank).mesh, schedules, stage_lines(how) if how else ())
