"""One plan at one world size: its captured step, passed once for each rank that is looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan, note_forward
from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.golden.schedule import Schedule, schedule_of
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.graph.ops import order_arguments
from pytest_fxbucket.passes.registry import Bucketed, PassJob, run_pass
from pytest_fxbucket.passes.result import Passed, said_by
from pytest_fxbucket.pipeline.composed import ComposedStep, composed
from pytest_fxbucket.pipeline.text import stage_lines
from pytest_fxbucket.process import collector
from pytest_fxbucket.process.state import fresh_state
from pytest_fxbucket.progress import Seconds
from pytest_fxbucket.step.mesh import Mesh, dims_text, fake_mesh, mesh_with
from pytest_fxbucket.step.pipelined import stage_of
from pytest_fxbucket.step.portable import digest, encode
from pytest_fxbucket.transforms.step_versions import StepVersions, with_first_state

if TYPE_CHECKING:
    from pytest_fxbucket.graph.buckets import GraphAnalysis
    from pytest_fxbucket.pipeline.captured import StagedStep
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.selectors import Resolution
    from pytest_fxbucket.step.portable import PortableGraph
    from pytest_fxbucket.step.roles import Phase, StepGraph

_ALL_RANKS = 16


@dataclass
class PlanOnMesh:
    """``captured`` through the pass ``pass_name``, as each rank of its mesh has it. Work is done when asked for, once."""

    captured: CapturedPlan
    pass_name: str
    seconds: Seconds = field(default_factory=Seconds)
    """What the first rank's pass took, as "pass"."""
    hidden_forwards: list[str] = field(default_factory=list)
    """One clause for each graph module of the pass whose forward is not the code of its graph."""
    _versions: dict[int, StepVersions] = field(default_factory=dict)
    _known: dict[Hashable, Passed] = field(default_factory=dict)
    """By digest of the graph, process groups, inputs and outputs: ranks for which all are equal share one."""

    @property
    def plan(self) -> Plan:
        """The plan that is asked."""
        return self.captured.plan

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        return self.captured.mesh

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.mesh.size

    @property
    def say(self) -> Callable[[str], None]:
        """Takes a line on what is worked at."""
        return self.captured.say

    @property
    def resolution(self) -> Resolution:
        """What the plan's entries mean. Raises PlanError for entries that match nothing or overlap."""
        return self.captured.resolution

    @property
    def entry_of(self) -> dict[str, str]:
        """FQN of each planned parameter to its entry."""
        return self.captured.entry_of

    @property
    def staged(self) -> StagedStep | None:
        """The step in pipeline stages; None if the plan has none."""
        return self.captured.staged

    def step(self, rank: int) -> StepGraph:
        """The unbucketed step."""
        return self.captured.step(rank)

    def reading(self, rank: int) -> Mapping[Phase, GraphAnalysis]:
        """The graphs that the pass is given, read."""
        # Without either the pass is given the captured step, and to read that the pass need not run.
        has_own = self.captured.stages.before or self.plan.pipeline
        return self.captured.readings(self.versions(rank).step if has_own else self.step(rank))

    def reference_reading(self, rank: int) -> Mapping[Phase, GraphAnalysis]:
        """The graphs that bitwise compares with, read."""
        return self.captured.readings(self.reference(rank))

    def reference(self, rank: int) -> StepGraph:
        """What the last step is compared with bit for bit: as captured, or behind the last transformation that rounds."""
        return self.versions(rank).reference if self.captured.stages.before else self.step(rank)

    def unbucketed(self, rank: int, phase: Phase) -> PortableGraph:
        """The graph that bitwise compares with, as plain data."""
        return self.captured.portable(self.reference(rank), phase)

    def passed(self, rank: int) -> Mapping[Phase, Passed]:
        """The graphs as they came out of the pass, as rank ``rank`` gets them."""
        return self.versions(rank).passed

    def final(self, rank: int) -> Mapping[Phase, Passed]:
        """The graphs that ``rank`` runs: behind the pass and every transformation."""
        return self.versions(rank).final

    def final_step(self, rank: int) -> StepGraph:
        """The same as a step, with the roles of its inputs and outputs."""
        return self.versions(rank).final_step

    def versions(self, rank: int) -> StepVersions:
        """Rank ``rank``'s step through all transformations and the pass, with its process groups in place."""
        if rank not in self._versions:
            self.captured.prepare(rank)
            with collector.paused(), fresh_state(), fake_mesh(self.mesh, rank):
                self._versions[rank] = self.make_versions(rank)
        return self._versions[rank]

    def is_passed(self, rank: int) -> bool:
        """Whether the pass has run for ``rank``."""
        return rank in self._versions

    @cached_property
    def together(self) -> ComposedStep | None:
        """The final forward and backward of all stages as one graph again; None if the plan has none."""
        if self.staged is None:
            return None
        ranks = self.mesh.ranks(0, "pp")
        graphs = [{p: uncompiled(one.bucketed.root, one.graph) for p, one in self.final(rank).items()} for rank in ranks]
        return composed(self.staged, [self.final_step(rank) for rank in ranks], graphs)

    def make_versions(self, rank: int) -> StepVersions:
        """What :meth:`versions` gives, made anew; to be called with the process groups of ``rank`` in place."""
        begun, stages = self.captured.before_pass(rank), self.captured.stages
        passed = self.through_pass(begun.step, rank)
        if not stages.after:
            return StepVersions(begun.reference, begun.before, begun.step, passed, (), begun.step, passed)
        behind = replace(begun.step, graphs={phase: one.bucketed.graph_module for phase, one in passed.items()})
        after = self.captured.transformed(stages.after, behind, begun.state, rank)
        step = with_first_state(after[-1].step, self.step(rank), begun.state)
        modules = (*dict.fromkeys(name for one in passed.values() for name in one.bucketed.modules), *stages.modules)
        first = next(iter(passed.values()))  # A transformation may have made phases that the pass had no graph of.
        final = {
            phase: self.look(
                phase, step, Bucketed(module.graph, module, None, modules), passed.get(phase, first).reading, final=True
            )
            for phase, module in step.graphs.items()
        }
        return StepVersions(begun.reference, begun.before, begun.step, passed, tuple(after), step, final)

    def through_pass(self, step: StepGraph, rank: int) -> dict[Phase, Passed]:
        """The graphs of ``step`` as they come out of the pass."""
        readings, modules = self.captured.readings(step), self.captured.stages.modules
        entries = self.resolution.entries
        self.say(f"running pass {self.pass_name} as rank {rank} of {self.size}")
        with self.seconds.of("pass", rank):
            made = {
                phase: run_pass(
                    self.pass_name,
                    PassJob(step, phase, readings[phase], self.plan, entries, self.captured.estimated(phase, rank), twice=True),
                )
                for phase in step.graphs
            }
        for phase, one in made.items():
            if one.report is None:
                note_forward(self.hidden_forwards, f"the {phase} graph that the pass returned", one.root)
            self.hidden_forwards += [note for note in one.notes if note not in self.hidden_forwards]
        if modules:
            made = {phase: replace(one, modules=(*one.modules, *modules)) for phase, one in made.items()}
        return {phase: self.look(phase, step, bucketed, readings[phase]) for phase, bucketed in made.items()}

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
            key = tuple(f"{phase} {one.digest} {one.said}" for graphs in (passed, final) for phase, one in graphs.items())
            groups.setdefault(key, ([], final))[0].append(rank)
        return list(groups.values())

    def ranks_alike(self) -> list[tuple[list[int], Mapping[Phase, Passed]]]:
        """Like :meth:`distinct`; if only our own pass makes graphs, one rank of each pipeline stage stands for the others."""
        if self.pass_name != "manual" or self.plan.graph is not None or self.plan.transform:
            return self.distinct()
        groups: dict[int, list[int]] = {}
        for rank in range(self.size):  # a ring is not beside stages
            first = self.captured.first_alike(rank) or self.mesh.ranks(0, "pp")[self.mesh.at(rank, "pp")]
            groups.setdefault(first, []).append(rank)
        return [(ranks, self.final(first)) for first, ranks in groups.items()]

    def dims_of(self, graph: fx.Graph) -> dict[str, str]:
        """Mesh dimension of each process group that ``graph`` names, for people."""
        mesh = self.mesh.dims
        with fake_mesh(self.mesh, 0):
            groups = members_of_groups(graph)
        return {name: dims_text(ranks, mesh) + (" (own)" if name != untwinned(name) else "") for name, ranks in groups.items()}

    def by_pass(self, pass_name: str) -> PlanOnMesh:
        """The same step through another pass."""
        return PlanOnMesh(self.captured, pass_name)

    def under(self, plan: Plan) -> PlanOnMesh:
        """The same step under another plan that traces the same, through the same pass."""
        return PlanOnMesh(self.captured.under(plan), self.pass_name)

    @cached_property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each process group that rank 0's graphs name, before and after the pass."""
        versions = self.versions(0)
        graphs = [module.graph for step in (self.step(0), versions.final_step) for module in step.graphs.values()]
        graphs += [one.bucketed.graph for one in versions.passed.values()]
        with fake_mesh(self.mesh, 0):
            return {name: ranks for graph in graphs for name, ranks in members_of_groups(graph).items()}

    def look(
        self, phase: Phase, step: StepGraph, bucketed: Bucketed, before: GraphAnalysis | None, final: bool = False
    ) -> Passed:
        """``bucketed`` as one object for all ranks with the same graph; ``before``: reading of what it was made of."""
        order_arguments(bucketed.graph)
        portable = encode(bucketed.graph, bucketed.root, bucketed.modules)
        name, members = digest(portable), members_of_groups(bucketed.graph)
        inputs, outputs = step.inputs[phase], step.outputs[phase]
        said = said_by(bucketed.graph) if bucketed.report is None else ""  # ours says of all ranks the same
        key = (final, phase, name, said, tuple(sorted(members.items())), inputs, outputs)
        if key not in self._known:
            self._known[key] = Passed(bucketed, portable, name, inputs, outputs, members, before, said)
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
            # A phase of a stage names its stage; ``ties`` and ``update`` are there once on each rank along pp.
            of = "" if world.plan.pipeline is None or stage_of(phase) is not None else f" of pp {world.mesh.at(other, 'pp')}"
            schedules[phase + of] = schedule_of(one.reading, world.entry_of, world.dims_of(one.bucketed.graph))
    how = world.final_step(rank).pipelined
    return golden_text(name, world.step(rank).mesh, schedules, stage_lines(how) if how else ())
