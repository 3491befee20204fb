"""What a plan's ranks allocate, counted, beside what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pytest_fxbucket.checks.bitwise.check import task_of
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.simulate.held_memory import memory_of

JOB = "suites.simulate.allocation_jobs:count"
PARTING = 0.03
"""How far what is said may part from what is counted."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One graph of a step."""

    graph: str
    said: int
    """Peak in bytes."""
    counted: int

    @property
    def parts(self) -> bool:
        """Whether they are further apart than they may be."""
        return abs(self.said - self.counted) > PARTING * self.counted


def peaks(pools: Pools, plan: Plan, rank: int = 0) -> Iterator[Beside]:
    """Of each graph of the unbucketed and of the final step as ``rank`` runs them, all ranks in one process."""
    world = PlanOnMesh(plan, mesh_of(plan, run=True), "manual", lambda _: None)
    for phase in world.step(0).graphs:
        tasks = [task_of(world, phase, one, "local") for one in range(world.size)]
        unbucketed, final = pools.get(world.size, "local").run(JOB, tasks, timeout_s=120, what="allocations")[rank]
        said = memory_of(world.reference(rank))[phase].peak
        yield Beside("unbucketed", said, unbucketed.by_graph["unbucketed"])
        graphs = {name: one.bucketed.graph_module for name, one in world.final(rank).items()}
        for name, one in memory_of(replace(world.final_step(rank), graphs=graphs)).items():
            yield Beside(name, one.peak, final.by_graph["bucketed" if name == phase else name])
