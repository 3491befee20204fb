"""What a plan's ranks allocate, counted, beside what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.bitwise.check import task_of
from pytest_fxbucket.joined_step import as_run
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.simulate.held_memory import memory_of

PLANS = Path(__file__).parents[2] / "fixtures" / "plans"
LAYERS_GONE = {
    "iterations": {"layers = 4": "layers = 2", "layers.[0-3]": "layers.[0-1]", '"layers.3"': '"layers.1"'},
    "averaged": {"layers = 2": "layers = 1", "layers.[0-1]": "layers.0"},
    "adamw": {"layers = 2": "layers = 1", "layers.[0-1]": "layers.0"},
    "moe": {'batch = "': 'args = { layers = 1 }\nbatch = "', "layers.[0-1]": "layers.0"},
}
FOUR_RANKS = ("moe",)
"""Plans with a row that two ranks are too few for."""
JOB = "suites.simulate.allocation_jobs:count"
PARTING = 0.03
"""How far what is said may part from what is counted."""


def small(name: str, row: str | None = None) -> Plan:
    """A row of a plan of fixtures, with the layers and ranks that it needs to have all kinds of graphs."""
    text = (PLANS / f"{name}.toml").read_text(encoding="utf-8")
    for old, new in LAYERS_GONE.get(name, {}).items():
        text = text.replace(old, new)
    if name not in FOUR_RANKS:
        text = text.replace("dp_shard = 4", "dp_shard = 2")
    plans = parse_plans(text, PLANS / f"{name}.toml")
    return next(one for one in plans if one.matrix_id == row)


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
    world = as_run(PlanOnMesh(CapturedPlan(plan, mesh_of(plan, run=True)), "manual"))
    for phase in world.step(0).graphs:
        tasks = [task_of(world, phase, one, "local") for one in range(world.size)]
        unbucketed, final = pools.get(world.size, "local").run(JOB, tasks, timeout_s=120, what="allocations")[rank]
        said = memory_of(world.reference(rank))[phase].peak
        yield Beside("unbucketed", said, unbucketed.by_graph["unbucketed"])
        graphs = {name: one.bucketed.graph_module for name, one in world.final(rank).items()}
        for name, one in memory_of(replace(world.final_step(rank), graphs=graphs)).items():
            yield Beside(name, one.peak, final.by_graph["bucketed" if name == phase else name])
