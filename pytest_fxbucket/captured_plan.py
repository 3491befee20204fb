"""One plan's step at one world size, up to the pass: traced, cut into stages, transformed and read, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.capture.parallel.ring_attention import at_place
from pytest_fxbucket.compat.fx import why_not_its_graph
from pytest_fxbucket.errors import CaptureError, FxbucketError, PassError
from pytest_fxbucket.graph.reading import read_given
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.pipeline.captured import StagedStep, capture_stages
from pytest_fxbucket.pipeline.of_plan import with_cuts
from pytest_fxbucket.plan.pass_consistency import entries_of
from pytest_fxbucket.plan.selectors import Resolution, entry_by_parameter
from pytest_fxbucket.process import collector
from pytest_fxbucket.process.state import fresh_state
from pytest_fxbucket.progress import Seconds
from pytest_fxbucket.step.portable import PortableGraph, encode, own_copy
from pytest_fxbucket.transforms.registry import TransformOutput, TransformStages, digest_of, run_stages, stages_of
from pytest_fxbucket.transforms.step_versions import BeforePass, state_of, with_first_state
from pytest_fxbucket.transforms.transformation import traits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.passes.auto.estimates import NodeKey
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Phase, StepGraph
    from pytest_fxbucket.transforms.registry import State, TransformStage


@dataclass
class CapturedPlan:
    """``plan`` on the ranks of ``mesh``, as a pass is given it. Work is done when asked for, once for all passes."""

    plan: Plan
    mesh: Mesh
    say: Callable[[str], None] = lambda _: None
    causes: set[str] = field(default_factory=set)
    """Why captures of the plan failed, so that each sentence is said once."""
    last: LastStep = field(default_factory=LastStep)
    """The step captured last in this run; a plan that traces the same model and mesh reuses it."""
    seconds: Seconds = field(default_factory=Seconds)
    """What the first rank's capture took, as "capture"."""
    hidden_forwards: list[str] = field(default_factory=list)
    """One clause for each graph that was given whose module has a forward of its own; only the graph is compared and run."""
    _failed: FxbucketError | None = None
    _steps: dict[int, StepGraph] = field(default_factory=dict)
    _before_pass: dict[int, BeforePass] = field(default_factory=dict)
    _estimated: dict[tuple[Phase, int], dict[NodeKey, float]] = field(default_factory=dict)
    _sent: dict[tuple[int, Phase], tuple[StepGraph, PortableGraph]] = field(default_factory=dict)
    _rounded: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By digest of a captured step the first rank that had it, and the digest of what transformations that round made of it."""
    _read: dict[int, tuple[StepGraph, Mapping[Phase, GraphAnalysis]]] = field(default_factory=dict)
    """This and what was sent by ``id`` of the step, which is kept too, so that no other one can get its ``id``."""

    def under(self, plan: Plan) -> CapturedPlan:
        """The same step under another plan that traces the same: captured once, and read once."""
        # Not what transformations made: the other plan may have others.
        return CapturedPlan(plan, self.mesh, self.say, self.causes, self.last, _steps=self._steps, _read=self._read)

    def step(self, rank: int) -> StepGraph:
        """The unbucketed step. A model is traced once, for all ranks; a factory of graphs is called for each rank."""
        first = self.first_alike(rank)
        if first not in self._steps:
            is_traced = first == 0 or self.plan.graph is not None
            self._steps[first] = self._captured(first) if is_traced else at_place(self.step(0), self.mesh, first)
        return self._steps[first]

    def first_alike(self, rank: int) -> int:
        """The first rank whose unbucketed step is that of ``rank``."""
        if self.plan.graph is not None:
            return rank
        # Of a rank's places only that in the ring is in a graph, whose exchanges are with the neighbours there.
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
        self.say(f"tracing the step as rank {rank} of {self.mesh.size}")
        with collector.paused(), fresh_state(), self.seconds.of("capture", rank):
            return self._own(capture_plan(plan, self.mesh, rank))

    def _own(self, step: StepGraph) -> StepGraph:
        """``step`` with copies of graphs that came from outside: whoever made them, a pass too, may still hold them."""
        if self.plan.graph is None:
            return step
        for phase, module in step.graphs.items():
            note_forward(self.hidden_forwards, f"the {phase} graph that was given", module)
        return replace(step, graphs={phase: own_copy(module) for phase, module in step.graphs.items()})

    @cached_property
    def resolution(self) -> Resolution:
        """What the plan's entries mean. Raises PlanError for entries that match nothing or overlap."""
        step = self.step(0)
        if not step.has_roles:
            return Resolution((), (), ())
        return entries_of(self.plan, step.names, step.modules)

    @property
    def entry_of(self) -> dict[str, str]:
        """FQN of each planned parameter to its entry."""
        return entry_by_parameter(self.resolution.entries)

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
    def stages(self) -> TransformStages:
        """The plan's transformations. Raises PlanError for those that cannot be, or cannot stand in that order."""
        return stages_of(self.plan)

    @property
    def rounding(self) -> list[str]:
        """Transformations after which results are rounded otherwise, each with how."""
        named = ((stage.name, traits_of(stage.function).rounds) for stage in self.stages.before)
        return [f"{name} ({rounds})" for name, rounds in named if rounds]

    def prepare(self, rank: int) -> None:
        """Do, or raise for, all that has process groups of its own, before those of ``rank`` are put in place."""
        self.step(rank), self.resolution, self.stages, self.staged

    def before_pass(self, rank: int) -> BeforePass:
        """``rank``'s step at each stop up to the pass; to be called with its process groups in place."""
        if rank not in self._before_pass:
            self._before_pass[rank] = self._run_to_pass(rank)
        return self._before_pass[rank]

    def _run_to_pass(self, rank: int) -> BeforePass:
        captured, stages = self.step(rank), self.stages
        begin = captured if self.staged is None else self.staged.of_rank(self.mesh, rank)
        state = state_of(begin)
        before = self.transformed(stages.before, begin, state, rank)
        step = before[-1].step if before else begin
        rounding = [one.step for one, stage in zip(before, stages.before, strict=True) if traits_of(stage.function).rounds]
        if rounding:
            self._refuse_rounding_by_rank(captured, rounding[-1], rank)
        # A transformation that rounds otherwise changes bits by design: bitwise begins behind the last of these.
        reference = with_first_state(rounding[-1], captured, state) if rounding else captured
        return BeforePass(reference, tuple(before), with_first_state(step, captured, state), state)

    def _refuse_rounding_by_rank(self, captured: StepGraph, rounded: StepGraph, rank: int) -> None:
        """Raise PassError for another graph than an earlier rank's: bitwise begins behind it, so nothing would compare them."""
        modules = self.stages.modules
        first, made = self._rounded.setdefault(digest_of(captured, modules), (rank, digest_of(rounded, modules)))
        if made != digest_of(rounded, modules):
            what = f"{self.plan.path}: {' and '.join(self.rounding)}"
            raise PassError(f"{what} makes another graph of the same one as rank {rank} than as rank {first}")

    def transformed(self, stages: Sequence[TransformStage], step: StepGraph, state: State, rank: int) -> list[TransformOutput]:
        """``step`` behind each of ``stages``, as ``rank`` has it."""
        if stages:
            self.say(f"running {', '.join(stage.name for stage in stages)} as rank {rank} of {self.mesh.size}")
        return run_stages(stages, step, state, twice=True)

    def readings(self, step: StepGraph) -> Mapping[Phase, GraphAnalysis]:
        """The graphs of ``step``, before or behind transformations, read."""
        if id(step) not in self._read:
            self._read[id(step)] = (
                step,
                {
                    phase: read_given(without_kept_order(graph.graph), step.inputs[phase], step.outputs[phase])
                    for phase, graph in step.graphs.items()
                },
            )
        return self._read[id(step)][1]

    def portable(self, step: StepGraph, phase: Phase) -> PortableGraph:
        """A graph of ``step``, before or behind transformations, as plain data."""
        if (id(step), phase) not in self._sent:
            modules = self.stages.modules if self.stages.before else ()
            self._sent[id(step), phase] = step, encode(step.graphs[phase].graph, step.graphs[phase], modules)
        return self._sent[id(step), phase][1]

    def estimated(self, phase: Phase, rank: int) -> dict[NodeKey, float]:
        """Seconds of nodes of ``rank``'s graph ``phase`` for finding schedules; ranks at one place along pp use the same."""
        return self._estimated.setdefault((phase, self.mesh.at(rank, "pp")), {})


def note_forward(notes: list[str], what: str, module: object) -> None:
    """Say in ``notes`` once that the forward of ``module`` is not the code of its graph."""
    if (why := why_not_its_graph(module)) and (clause := f"{what} {why}: the graph is what is compared and run") not in notes:
        notes.append(clause)
