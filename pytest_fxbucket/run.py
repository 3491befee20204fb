"""A plan, run: lazily and once captured, passed, executed. Items, fixtures and commands all use this."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.checks.first_red import told_by_pass
from pytest_fxbucket.checks.registry import CHECKS, ON_RANKS, check_of
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import BenchmarkError, FxbucketError, PassError
from pytest_fxbucket.plan.folders import folders_of
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.backends import BackendChoice
    from pytest_fxbucket.bench.step_time import StepTime, Timing
    from pytest_fxbucket.bench.timeline.marks import Span
    from pytest_fxbucket.capture.last_step import LastStep
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.mutate.judge import MutantSelection
    from pytest_fxbucket.mutate.score import MutationScore
    from pytest_fxbucket.passes.registry import Bucketed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.settings import RunSettings
    from pytest_fxbucket.step.roles import StepGraph


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What the pass made of a plan's launches, at the size of the real mesh."""

    launches_before: int
    launches_after: int
    buckets: int
    """Launches that carry planned parameters."""
    bytes: int
    """Larger side of all launches together, in bytes."""


def item_names(plan: Plan) -> list[str]:
    """Enabled checks as item names: ``audit``, ``bitwise@4`` on a smaller mesh, ``audit[fp32]`` of a matrix row."""
    small = f"@{plan.run_world}" if plan.run_world != plan.world_size else ""
    row = f"[{plan.matrix_id}]" if plan.matrix_id else ""
    checks = [check for check in CHECKS if getattr(plan.checks, check)]
    if plan.checks.benchmark:
        others = ("unbucketed", *(["in_one_call"] if plan.crosses_iterations else []), *plan.checks.benchmark.against)
        checks += [f"benchmark:{variant}" for variant in others]
    return [check + (small if check.partition(":")[0] in ON_RANKS else "") + row for check in checks]


class PlanRun:
    """One plan, lazily and once captured, passed, executed."""

    def __init__(
        self,
        plan: Plan,
        settings: RunSettings,
        pools: Pools,
        on_progress: Callable[[str], None] = lambda _: None,
        accept_golden: Callable[[Path, str], None] | None = None,
        on_compare: Callable[[Path], None] = lambda _: None,
        last_step: LastStep | None = None,
    ) -> None:
        self.plan, self._on_compare, self._last = plan, on_compare, last_step
        self._settings, self._pools, self._say, self._accept = settings, pools, on_progress, accept_golden
        self._given: dict[str, tuple[fx.GraphModule, list[tuple[object, ...]]]] = {}
        """The graphs that tests were given, each with its nodes as they were."""
        self._said: set[str] = set()
        """Why the step could not be captured: the sentences that were said, for all worlds of the plan."""

    def check(self, name: str) -> Verdict:
        """Run one check. Raises :class:`FxbucketError` for what could not be run at all."""
        self.refuse_changes()
        check = check_of(name)
        context = self._context(name)
        context.folder.clear()
        with self._its_code():
            verdict = check.run(context)
            if verdict.outcome == "failed":
                world = context.run_world if check.on_ranks else context.world
                context.folder.write_graphs(world.step(0), {ranks[0]: graphs for ranks, graphs in world.distinct()})
                verdict = told_by_pass(check, context, verdict)
                return replace(verdict, folder=context.folder.path)
        # Ranks may have logged there, but a check that did not fail leaves nothing to look at.
        context.folder.clear()
        return verdict

    def parity(self, pipe: str) -> Verdict:
        """The check eager with learning rates that stay, whose ranks report each step through the named pipe ``pipe``."""
        from pytest_fxbucket.eager.check import run

        context = self._context("parity")
        context.folder.clear()
        with self._its_code():
            return run(context, pipe, steady=True)

    def mutated(self, asked: MutantSelection) -> Iterator[MutationScore]:
        """Break the plan's graphs, and give after each mutant how many its checks found; see :mod:`pytest_fxbucket.mutate`."""
        from pytest_fxbucket.mutate.judge import scored

        with self._its_code():
            yield from scored(self._context("mutation"), asked)

    def _context(self, check: str) -> Context:
        from pytest_fxbucket.checks.context import Context

        return Context(
            self.plan,
            self.name,
            self._settings,
            self._mesh_world,
            lambda: self._run_world,
            self._pools,
            Folder(self._settings.artifacts, self.name, check, self._settings.log_of),
            self._say,
            self,
            self._accept,
            self._on_compare,
        )

    @property
    def name(self) -> str:
        """Path of the plan from rootdir, with the matrix id."""
        shown = Path(os.path.relpath(self.plan.path, self._settings.rootdir)).as_posix()
        return f"{shown}[{self.plan.matrix_id}]" if self.plan.matrix_id else shown

    @property
    def step(self) -> StepGraph:
        """The traced, unbucketed step at the size of the real mesh."""
        with self._its_code():
            step = self._mesh_world.step(0)
        self._give({f"graph {phase} of the step": graph for phase, graph in step.graphs.items()})
        return step

    @property
    def bucketed(self) -> Bucketed:
        """Graph and report of the pass on rank 0 at the size of the real mesh; of several graphs the first."""
        with self._its_code():
            phase, passed = next(iter(self._mesh_world.passed(0).items()))
        self._give({f"graph {phase} of the pass": passed.bucketed.graph_module})
        return passed.bucketed

    def refuse_changes(self) -> None:
        """Raise :class:`FxbucketError` if a test has changed a graph that it was given: all checks compare with these."""
        for what, (graph, before) in self._given.items():
            now = _nodes(graph)
            if now != before:
                changed = next((str(new[0]) for old, new in zip(before, now, strict=False) if old != new), "its end")
                raise FxbucketError(
                    f"{self.name}: {what}, which this test or one before it was given, has been changed, first at {changed}; "
                    "all checks of the plan compare with it: change a copy (copy.deepcopy)"
                )

    def _give(self, graphs: Mapping[str, fx.GraphModule]) -> None:
        for what, graph in graphs.items():
            if what not in self._given:
                self._given[what] = (graph, _nodes(graph))

    @property
    def world(self) -> PlanOnMesh:
        """The plan at the size of the real mesh."""
        return self._mesh_world

    def summary(self) -> PlanSummary | None:
        """Launches, buckets and bytes, of all stages; None until the pass ran at the size of the real mesh.

        None, too, if its graph cannot be read.
        """
        # Not by the property: it would make the world, only to find that no pass has run there.
        world: PlanOnMesh | None = self.__dict__.get("_mesh_world")
        ranks = () if world is None else world.mesh.ranks(0, "pp")
        if world is None or not all(map(world.is_passed, ranks)):
            return None
        try:
            before = [bucket for rank in ranks for reading in world.reading(rank).values() for bucket in reading.buckets]
            after = [bucket for rank in ranks for one in world.passed(rank).values() for bucket in one.reading.buckets]
        except PassError:  # the graph cannot be read, which each item says
            return None
        named = world.entry_of if self.plan.bucket.has_entries else {p.fqn: "" for p in world.step(0).parameters}
        planned = [bucket for bucket in after if any(fqn in named for fqn in bucket.fqns)]
        return PlanSummary(len(before), len(after), len(planned), sum(bucket.bytes for bucket in after))

    @cached_property
    def _mesh_world(self) -> PlanOnMesh:
        return self._on(run=False)

    @cached_property
    def _run_world(self) -> PlanOnMesh:
        return self._mesh_world if self.plan.run_degrees == self.plan.degrees else self._on(run=True)

    def _on(self, *, run: bool) -> PlanOnMesh:
        from pytest_fxbucket.capture.last_step import LastStep
        from pytest_fxbucket.captured_plan import CapturedPlan
        from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

        # Other rows of the matrix can use the step on the real mesh, whose place the smaller mesh of a run must not take.
        last = LastStep() if run or self._last is None else self._last
        mesh, name = mesh_of(self.plan, run=run), self._settings.pass_name or self.plan.pass_name
        return PlanOnMesh(CapturedPlan(self.plan, mesh, self._say, causes=self._said, last=last), name)

    def _its_code(self) -> AbstractContextManager[None]:
        return user_code(folders_of(self.plan.path, self._settings.rootdir))

    def step_time(self, options: Benchmark | None = None) -> StepTime:
        """Time the step on the ranks, once for each ``options`` (None: the plan's, or the defaults).

        Raises :class:`FxbucketError`, again for everybody who asks: BenchmarkError where ranks cannot be timed, or would hang.
        """
        if (hanging := self._context("benchmark").hanging("benchmark")) is not None:
            raise BenchmarkError(f"{self.name}: {hanging.summary}")
        return self._timing.step_time(options or self.plan.checks.benchmark or Benchmark())

    def stages_picture(self) -> Mapping[str, Any] | None:
        """What the report draws of the plan's stages; None of a plan without."""
        if self.plan.pipeline is None:
            return None
        from pytest_fxbucket.bench.report.stages import picture_of
        from pytest_fxbucket.pipeline.of_plan import planned_stages

        with self._its_code():
            return picture_of(self.plan, planned_stages(self.plan, self._say))

    def simulated_spans(self) -> Mapping[str, tuple[Span, ...]]:
        """What the report draws beside the measured steps: the one on the plan's cluster; nothing of a plan without."""
        if self.plan.cluster is None:
            return {}
        from pytest_fxbucket.bench.timeline.simulated import simulated_step
        from pytest_fxbucket.cost.cluster import cluster_of

        with self._its_code():
            world, cluster = self._run_world, cluster_of(self.plan)
            assert cluster is not None
            return simulated_step(world, cluster)

    def times_on(self) -> BackendChoice:
        """The back end on which steps are timed; its ``backend`` is None if nothing can be timed."""
        return self._timing.choice(self.plan)

    def ranks_timed(self) -> int:
        """Measure as the plan says, and give how many ranks were. Raises BenchmarkError where they cannot be."""
        return self.step_time().record.ranks

    @cached_property
    def _timing(self) -> Timing:
        from pytest_fxbucket.bench.step_time import Timing

        return Timing(
            self.name,
            lambda: self._run_world,
            lambda: self._context("benchmark").backend(with_ours=False),
            self._settings,
            self._pools,
            self._its_code,
            self._say,
        )


def _nodes(module: fx.GraphModule) -> list[tuple[object, ...]]:
    """Each node: its name, what it calls with what, its value and modules, and of a constant how often it was written, too."""
    return [
        (
            node.name,
            node.op,
            str(node.target),
            repr((node.args, node.kwargs)),
            *(id(node.meta.get(key)) for key in ("val", "nn_module_stack")),
            _tensor(module, str(node.target)) if node.op == "get_attr" else None,
        )
        for node in module.graph.nodes
    ]


def _tensor(module: fx.GraphModule, name: str) -> tuple[int, int] | None:
    with suppress(AttributeError, RuntimeError):  # it is gone, or has no count: a graph, a tensor of inference mode
        held = attrgetter(name)(module)
        return id(held), held._version
    return None
