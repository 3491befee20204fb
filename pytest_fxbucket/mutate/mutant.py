"""Mutants of a plan: which places of which graphs are broken, and the plan with one of them broken."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from itertools import zip_longest
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import FxbucketError, named
from pytest_fxbucket.mutate.operator import BrokenGraph, Form, Operator, SeenGraph, Site
from pytest_fxbucket.passes.registry import Bucketed
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.step.portable import own_copy
from pytest_fxbucket.user_frame import at_user_frame

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Phase, StepGraph
    from pytest_fxbucket.transforms.step_versions import StepVersions


class CannotMakeError(FxbucketError):
    """An operator cannot change a graph at one of its places."""


@dataclass(frozen=True)
class Mutant:
    """One place of one graph, to be broken."""

    operator: str
    says: str
    """What the operator does."""
    phase: Phase
    stage: int
    """Place along pp of the ranks that have the graph."""
    site: Site
    form: Form = "passed"

    @property
    def name(self) -> str:
        """For people: ``wait_dropped at wait_tensor_3 of backward on the last rank``."""
        on_rank = " on the last rank" if self.site.on_last_rank else ""
        return f"{self.operator} at {self.site.node} of {self.phase}{on_rank}"


def mutants_of(world: PlanOnMesh, operators: Sequence[Operator], seed: int) -> list[Mutant]:
    """All mutants, operators taking turns, places of an operator in an order that ``seed`` gives."""
    # One rank of each pipeline stage is asked for places. Each operator has random numbers of its own, so that its order does
    # not depend on which others run; taking turns lets a limit on the number of mutants fall on all operators alike.
    by_operator: list[list[Mutant]] = []
    for operator in operators:
        found = [
            Mutant(operator.name, operator.says, phase, stage, site, operator.form)
            for stage, rank in enumerate(world.mesh.ranks(0, "pp"))
            for phase, passed in (world.passed(rank) if operator.form == "passed" else world.final(rank)).items()
            for site in _sites(operator, SeenGraph(phase, passed, rank, world.mesh, world.entry_of))
        ]
        random.Random(f"{seed} {operator.name}").shuffle(found)
        by_operator.append(found)
    return [mutant for turn in zip_longest(*by_operator) for mutant in turn if mutant is not None]


def _sites(operator: Operator, seen: SeenGraph) -> list[Site]:
    """All places of a graph; raises :class:`FxbucketError` for an operator, of somebody's own, that gives none or raises."""
    try:
        found = list(operator.sites(seen))
    except FxbucketError:
        raise
    except Exception as error:
        raise FxbucketError(f"the operator {operator.name} raised {named(error)}{at_user_frame(error)}") from error
    if other := next((one for one in found if not isinstance(one, Site)), None):
        raise FxbucketError(f"the operator {operator.name} gives a value of type {type(other).__name__}, expected a Site")
    return found


def last_of_stage(mesh: Mesh, stage: int) -> int:
    """The last rank at place ``stage`` along pp."""
    return max(rank for rank in range(mesh.size) if mesh.at(rank, "pp") == stage)


Spoil = Callable[[int, "Phase", Bucketed], Bucketed]
"""(rank, phase, graph) to the graph that is taken in its place."""


class SpoiledPlan(PlanOnMesh):
    """``base`` with graphs changed by ``spoil``: those that the pass returned, or the ``final`` ones that ranks run."""

    def __init__(self, base: PlanOnMesh, spoil: Spoil, *, final: bool = False, plan: Plan | None = None) -> None:
        super().__init__(base.captured, base.pass_name, base.seconds)
        self._base, self._spoil, self._is_final, self._plan = base, spoil, final, plan or base.plan

    @property
    def plan(self) -> Plan:
        """The plan that is asked."""
        return self._plan

    def versions(self, rank: int) -> StepVersions:
        """As of any plan, with changed graphs."""
        self._base.versions(rank)  # Not within the process groups of this one.
        return super().versions(rank)

    def make_versions(self, rank: int) -> StepVersions:
        """Those of the base; graphs that the pass returned go through the transformations behind it, too."""
        if not self._is_final:
            return super().make_versions(rank)
        versions = self._base.versions(rank)
        made = {phase: self._spoil(rank, phase, one.bucketed) for phase, one in versions.final.items()}
        step = replace(versions.final_step, graphs={phase: one.graph_module for phase, one in made.items()})
        final = {phase: self.look(phase, step, one, versions.final[phase].before, final=True) for phase, one in made.items()}
        return replace(versions, final_step=step, final=final)

    def through_pass(self, step: StepGraph, rank: int) -> dict[Phase, Passed]:
        """What the base's pass returned, changed."""
        readings = self.captured.readings(step)
        made = {phase: self._spoil(rank, phase, one.bucketed) for phase, one in self._base.passed(rank).items()}
        return {phase: self.look(phase, step, one, readings[phase]) for phase, one in made.items()}

    def ranks_alike(self) -> list[tuple[list[int], Mapping[Phase, Passed]]]:
        """Each rank may be changed otherwise."""
        return self.distinct()


class Spoiling:
    """Breaks ``mutant`` in the graphs of every rank that has its place."""

    def __init__(self, world: PlanOnMesh, mutant: Mutant) -> None:
        self._world, self._mutant = world, mutant
        self._made: dict[int, tuple[Bucketed, Bucketed]] = {}
        """By ``id`` of a graph: that graph, which is kept so that no other one gets its id, and the broken one.

        Ranks that share a graph share the broken one.
        """
        self.changed: tuple[fx.Graph, fx.Graph] | None = None
        """The first graph that was broken, before and after."""

    def world(self, of: PlanOnMesh, plan: Plan | None = None) -> PlanOnMesh:
        """What ``of`` is with the mutant in place, and asked as ``plan`` says, which may have another ``[run]``."""
        return SpoiledPlan(of, self, final=self._mutant.form == "final", plan=plan)

    def __call__(self, rank: int, phase: Phase, bucketed: Bucketed) -> Bucketed:
        """The graph that ``rank`` runs instead of ``bucketed``. Raises CannotMakeError."""
        site = self._mutant.site
        mesh = self._world.mesh
        if phase != self._mutant.phase or mesh.at(rank, "pp") != self._mutant.stage:
            return bucketed
        if site.on_last_rank and rank != last_of_stage(mesh, self._mutant.stage):
            return bucketed
        # Ranks, and the two meshes, need not have equal graphs: a node of this name may be missing.
        if site.node not in {node.name for node in bucketed.graph.nodes}:
            return bucketed
        key = id(bucketed)
        if key not in self._made:
            self._made[key] = bucketed, self._broken(bucketed)
        return self._made[key][1]

    def _broken(self, bucketed: Bucketed) -> Bucketed:
        graph, root = copy.deepcopy(bucketed.graph), bucketed.root
        # A copied graph still names the constants and subgraphs of its root: these are copied too, if there are any.
        if any(node.op == "get_attr" for node in graph.nodes):
            root = own_copy(bucketed.graph_module)
            graph = root.graph
        try:
            self._mutant.site.change(BrokenGraph(graph, root))
            # Raises where a change has put a reader before what it reads.
            graph.lint()
        except Exception as error:
            raise CannotMakeError(f"{self._mutant.name} cannot be made: {type(error).__name__}: {error}") from error
        if self.changed is None:
            self.changed = bucketed.graph, graph
        return Bucketed(graph, root, bucketed.report, bucketed.modules)


def diff_of(before: fx.Graph, after: fx.Graph) -> Iterator[str]:
    """Nodes that differ between two graphs, with a node around each change."""
    old, new = ([_shown(node) for node in graph.nodes] for graph in (before, after))
    lines = unified_diff(old, new, n=1, lineterm="")
    yield from (line for line in lines if not line.startswith(("---", "+++")))


def _shown(node: fx.Node) -> str:
    args = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"%{node.name} = {node.target}({', '.join(args)})"
