"""A plan on ranks that take turns with another side's. Imports torch."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pytest_fxbucket.bench.measure import tasks_of
from pytest_fxbucket.bench.pace import Pacing
from pytest_fxbucket.bench.timed_graph import timed_graph
from pytest_fxbucket.bench.turn_job import TurnsTaken, TurnTask
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.graph.portable import PortableGraph, digest
from pytest_fxbucket.ranks.backend import IN_ONE_PROCESS, PLAIN, choose, this_machine
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.world import World

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Phase


@dataclass(frozen=True, slots=True)
class TimedSide:
    """A plan through a pass, on ranks that take turns with another side's."""

    world: World
    variant: str
    """bucketed or unbucketed"""
    backend: str | None
    """Instead of the plan's; None: the plan's."""
    pools: Pools
    folders: list[Path]

    def facts(self) -> Mapping[str, Any]:
        """What is to be run, as plain data."""
        world, benchmark = self.world, self.world.plan.checks.benchmark
        graphs = {phase: self._graph(0, phase) for phase in world.step(0).graphs}
        return {
            "plan": str(world.plan.path),
            "row": world.plan.matrix_id,
            "digest": [digest(graph) for graph in graphs.values()],
            "ranks": world.size,
            "backend": self._backend(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "benchmark": dataclasses.asdict(benchmark) if dataclasses.is_dataclass(benchmark) else None,
        }

    def take_turns(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one set of processes for as many turns as there are; what each rank brought back, as plain data."""
        world = self.world
        timed = tasks_of({self.variant: world}, Pacing(request["budget_s"], 0.0))
        tasks = [TurnTask(self.variant, task.phases, request["address"]) for task in timed]
        pool = self.pools.get(world.size, self._backend())
        results = pool.run(
            "pytest_fxbucket.bench.turn_job:run",
            tasks,
            timeout_s=world.plan.run.timeout_s + request["budget_s"],
            paths=[str(folder) for folder in self.folders],
            what=f"step time of {world.plan.path}",
        )
        pool.close()  # the next set has processes of its own
        taken = cast("list[TurnsTaken]", results)
        expected = [tuple(digest(self._graph(rank, phase)) for phase in world.step(0).graphs) for rank in range(world.size)]
        if [one.digests for one in taken] != expected:
            raise BenchmarkError(f"{world.plan.path}: a rank timed another graph than the one that it was sent")
        return {"peak_bytes": [one.peak_bytes for one in taken], "has_priority": all(one.has_priority for one in taken)}

    def _backend(self) -> str:
        asked = self.backend or self.world.plan.run.backend
        if asked in IN_ONE_PROCESS:
            raise BenchmarkError(f"{self.world.plan.path}: back end {asked} has no step time; use gloo, nccl or auto")
        choice = choose(asked, self.world.size, this_machine())
        if choice.backend is None:
            raise BenchmarkError(f"{self.world.plan.path}: {choice.lacking}")
        return PLAIN if choice.backend == "gloo" else choice.backend

    def _graph(self, rank: int, phase: Phase) -> PortableGraph:
        return timed_graph(self.variant, self.world, rank, phase)
