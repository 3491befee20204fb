"""Step time of one plan in a session: measured once, when first asked for, and kept as a record and a line of text."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.backends import BACKENDS, MAX_RANKS, BackendChoice, row_of
from pytest_fxbucket.bench.measure import Measured, Worlds, measure
from pytest_fxbucket.bench.provenance import commit_of, machine_kind, workload_of
from pytest_fxbucket.bench.stats import Estimate, ratio_of
from pytest_fxbucket.bench.timeline.marks import BUCKETED, IN_ONE_CALL, UNBUCKETED
from pytest_fxbucket.checks.verdict import Verdict, passed, skipped
from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.plan.mesh_consistency import refuse_too_many_ranks

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record
    from pytest_fxbucket.bench.timeline.marks import Span
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.schema_checks import Benchmark
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.settings import RunSettings


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step time of one plan: the record that is stored, and one step to draw."""

    record: Record
    spans: Mapping[str, tuple[Span, ...]]
    """By variant one step of all ranks, the one of median length."""

    def samples(self, variant: str) -> list[float]:
        """Seconds of the slowest rank in each round of ``variant``: bucketed, unbucketed, or a pass that was asked for."""
        return self.record.seconds(variant)

    def ratio(self, variant: str = BUCKETED, other: str = UNBUCKETED) -> Estimate:
        """Step time of ``variant`` by that of ``other``, from the rounds that they shared."""
        samples = self.record.samples
        return ratio_of(samples[variant], samples[other])

    def summary(self, variant: str = BUCKETED) -> str:
        """One line: median time of ``variant`` and how it was measured; for the bucketed step also its ratio to all others."""
        record = self.record
        others = [name for name in record.samples if name != BUCKETED] if variant == BUCKETED else []
        times = ", ".join(f"{name} {record.median_s(name) * 1e3:.3g} ms" for name in (variant, *others))
        ratios = "".join(f"; against {other} {self.ratio(BUCKETED, other)}" for other in others)
        rounds, sets = len(self.samples(variant)), len(record.warmup_rounds)
        first = " at real-time priority" if record.has_priority else ""
        unstable = "" if record.is_stable else "; warm-up did not settle"
        how = f"{rounds} rounds in {sets} sets of {record.ranks} processes over {record.backend}"
        bubble = f"; {text}" if (text := record.bubble_text(variant)) else ""
        return f"{times}{ratios}; {how}{first}{unstable}{bubble}"


@dataclass(slots=True)
class Timing:
    """Step time of the plan called ``name``."""

    name: str
    """Its path from rootdir, with the matrix id."""
    world: Callable[[], PlanOnMesh]
    """The plan at the size that is run."""
    backend: Callable[[], BackendChoice]
    """The back end of its ranks."""
    settings: RunSettings
    pools: Pools
    paths: Callable[[], AbstractContextManager[None]]
    """A context in which the plan's modules can be imported."""
    say: Callable[[str], None]
    _found: dict[Benchmark, StepTime | FxbucketError] = field(default_factory=dict)

    def step_time(self, options: Benchmark) -> StepTime:
        """The step time with ``options``, measured at the first call. An FxbucketError is kept and raised at each call."""
        if options not in self._found:
            try:
                self._found[options] = self._measured(options)
            except FxbucketError as error:
                self._found[options] = error
        found = self._found[options]
        if isinstance(found, FxbucketError):
            raise found
        return found

    def choice(self, plan: Plan) -> BackendChoice:
        """The back end of the ranks; none if no step can be timed. Raises RankError if that is for lack of required GPUs."""
        asked = self.settings.backend or plan.run.backend
        if not row_of(asked).timed_on:
            return BackendChoice(
                None, f"back end {asked} runs all ranks in one process, in turn, which says nothing of step time"
            )
        refuse_too_many_ranks(plan, MAX_RANKS, self.name)
        return self.backend().for_timing().unless_required(self.name, require_gpus=self.settings.require_gpus)

    def _measured(self, options: Benchmark) -> StepTime:
        world = self.world()
        plan = world.plan
        backend = self.choice(plan).backend
        if backend is None:
            raise BenchmarkError(f"{self.name}: step time cannot be measured: {self.choice(plan).lacking}")

        def run(tasks: Sequence[object]) -> list[object]:
            pool = self.pools.get(len(tasks), BACKENDS[backend].timed_on)
            try:
                return pool.run(
                    "pytest_fxbucket.bench.job:run",
                    tasks,
                    timeout_s=plan.run.timeout_s + options.budget_s,
                    paths=[str(plan.path.parent), str(self.settings.rootdir)],
                    log_dir=Folder(self.settings.artifacts, self.name, "benchmark", self.settings.log_of).make(),
                    what=f"benchmark of {self.name}",
                )
            finally:
                pool.close()  # the next set needs fresh processes, and idle threads would disturb the next item

        commit = commit_of(plan.path)  # as it is when measuring begins
        with self.paths():
            measured = measure(worlds_of(world, options), options, run, self.say)
        return StepTime(_record(world, measured, backend, commit, self.settings.rootdir), measured.spans)


def _record(world: PlanOnMesh, measured: Measured, backend: str, commit: tuple[str | None, bool], rootdir: Path) -> Record:
    from pytest_fxbucket.bench.record import Record

    plan, series = world.plan, measured.series
    sha, dirty = commit
    return Record(
        plan=Path(os.path.relpath(plan.path, rootdir)).as_posix(),
        row=plan.matrix_id,
        workload=workload_of(plan),
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
        capture_s=world.captured.seconds.get("capture", 0.0),
        pass_s=world.seconds.get("pass", 0.0),
        graphs=measured.graphs,
        pipeline=measured.pipeline,
    )


def worlds_of(world: PlanOnMesh, options: Benchmark) -> Worlds:
    """The timed variants: unbucketed, bucketed by ``world``'s pass, and bucketed by each pass of ``options.against``.

    If ``next_iteration`` moves work into the next call, the step without that transformation is one variant more.
    """
    worlds = {UNBUCKETED: world, BUCKETED: world}
    if world.plan.crosses_iterations:
        others = tuple(one for one in world.plan.transform if one.name != "next_iteration")
        worlds[IN_ONE_CALL] = world.under(replace(world.plan, transform=others))
    return worlds | {name: world.by_pass(name) for name in options.against}


def run(context: Context) -> Verdict:
    """The check ``benchmark``: whether step time could be measured. Raises BenchmarkError for ranks that cannot be timed."""
    choice = context.times.times_on()
    if choice.backend is None:
        return skipped("benchmark", choice.lacking)
    if (hanging := context.hanging("benchmark")) is not None:
        return hanging
    return passed("benchmark", f"{context.times.ranks_timed()} ranks timed")
