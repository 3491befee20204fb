"""A plan's step time as an item, a fixture or a command asks for it: measured on ranks, and put on record."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.bench.commit_of import commit_of
from pytest_fxbucket.bench.machine import machine_kind
from pytest_fxbucket.bench.measure import BUCKETED, Measured, Runner, Worlds, measure
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.stats import Estimate, ratio_of
from pytest_fxbucket.bench.timeline.marks import UNBUCKETED

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Benchmark, Plan
    from pytest_fxbucket.world import World

_WORKLOAD = ("model", "graph", "parallel", "step", "optimizer")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step time of one plan: samples, what else was measured, and the record that is stored of it."""

    measured: Measured
    record: Record

    def samples(self, variant: str) -> list[float]:
        """Seconds of the slowest rank in each round of ``variant``: bucketed, unbucketed, or a pass that was asked for."""
        return self.measured.series.all_of(variant)

    def ratio(self, variant: str = BUCKETED, other: str = UNBUCKETED) -> Estimate:
        """Step time of ``variant`` by that of ``other``, from the rounds that they shared."""
        samples = self.measured.series.samples
        return ratio_of(samples[variant], samples[other])


def worlds_of(world: World, options: Benchmark) -> Worlds:
    """What is timed: unbucketed and bucketed as ``world``'s pass has it, and each pass of ``options.against``."""
    return {UNBUCKETED: world, BUCKETED: world, **{name: world.by_pass(name) for name in options.against}}


def step_time(
    name: str, world: World, options: Benchmark, backend: str, run: Runner, say: Callable[[str], None] = lambda _: None
) -> StepTime:
    """Measure the step of ``world``; ``name``: the plan's path from rootdir, ``run`` runs tasks over ``backend``."""
    sha, dirty = commit_of(world.plan.path)
    measured = measure(worlds_of(world, options), options, run, say)
    series = measured.series
    record = Record(
        plan=name,
        row=world.plan.matrix_id,
        workload=workload_of(world.plan),
        commit=sha,
        dirty=dirty,
        machine=machine_kind(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        backend=backend,
        ranks=world.size,
        pass_name=world.pass_name,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        samples=series.samples,
        warmup_rounds=series.warmup_rounds,
        is_stable=series.is_stable,
        has_priority=series.has_priority,
        capture_s=world.seconds.get("capture", 0.0),
        pass_s=world.seconds.get("pass", 0.0),
        graphs=measured.graphs,
    )
    return StepTime(measured, record)


def workload_of(plan: Plan) -> Mapping[str, Any]:
    """The tables of the plan that say what the unbucketed step is, as JSON, and the mesh that is run."""
    tables = {name: _plain(getattr(plan, name)) for name in _WORKLOAD}
    if plan.override:  # not there in runs that are stored from before there was such a table
        tables["override"] = _plain(plan.override)
    made: dict[str, Any] = json.loads(json.dumps({**tables, "world": dict(plan.run_degrees)}, default=_text))
    return made


def _plain(table: Any) -> Any:
    if isinstance(table, tuple):
        return [_plain(each) for each in table]
    return dataclasses.asdict(table) if dataclasses.is_dataclass(table) and not isinstance(table, type) else table


def _text(value: object) -> str:
    return value.as_posix() if isinstance(value, Path) else str(value)
