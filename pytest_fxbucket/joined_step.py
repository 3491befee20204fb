"""A plan's step as ranks run it if its graphs hand values to each other: what a pass made of each, joined into one graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.passes.registry import Bucketed
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.step.graph_sequence import as_one, is_handed_on
from pytest_fxbucket.step.mesh import fake_mesh
from pytest_fxbucket.transforms.step_versions import StepVersions

if TYPE_CHECKING:
    from pytest_fxbucket.step.roles import StepGraph


def as_run(world: PlanOnMesh) -> PlanOnMesh:
    """``world`` itself, or with its graphs as one if they hand values to each other."""
    return _AsOne(world) if is_handed_on(world.step(0)) else world


class _CapturedAsOne(CapturedPlan):
    """The graphs of ``parts``, as captured there, one behind the other."""

    def __init__(self, parts: CapturedPlan) -> None:
        super().__init__(parts.plan, parts.mesh, parts.say, parts.causes)
        self._parts = parts

    def step(self, rank: int) -> StepGraph:
        """The unbucketed step."""
        if rank not in self._steps:
            self._steps[rank] = as_one(self._parts.step(rank))
        return self._steps[rank]


class _AsOne(PlanOnMesh):
    """The graphs of ``parts``, captured and passed there, one behind the other."""

    def __init__(self, parts: PlanOnMesh) -> None:
        super().__init__(_CapturedAsOne(parts.captured), parts.pass_name, parts.seconds)
        self._parts = parts

    def versions(self, rank: int) -> StepVersions:
        """What ``rank`` runs."""
        if rank not in self._versions:
            step, passed = self.step(rank), self._parts.passed(rank)
            final = as_one(self._parts.step(rank), {p: (one.bucketed.root, one.bucketed.graph) for p, one in passed.items()})
            modules = tuple(dict.fromkeys(name for one in passed.values() for name in one.bucketed.modules))
            module = final.graphs["joint"]
            # No pass made the joined graph, so it comes without a report.
            with fake_mesh(self.mesh, rank):
                before = self.captured.readings(step)["joint"]
                graphs = {"joint": self.look("joint", final, Bucketed(module.graph, module, None, modules), before)}
            self._versions[rank] = StepVersions(step, (), step, graphs, (), final, graphs)
        return self._versions[rank]
