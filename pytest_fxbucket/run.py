"""A plan, run: lazily and once captured, passed, executed. Items, fixtures and commands all use this."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.checks.registry import CHECKS, ON_RANKS
from pytest_fxbucket.checks.verdict import Verdict, failed, passed, skipped
from pytest_fxbucket.errors import BenchmarkError, CaptureError, GoldenError, RankError, UsageError
from pytest_fxbucket.golden.accept import accepts
from pytest_fxbucket.golden.store import GoldenStore, render
from pytest_fxbucket.plan.consistency import refuse_too_many_ranks
from pytest_fxbucket.plan.key_forms import Benchmark
from pytest_fxbucket.user_code import user_code

if TYPE_CHECKING:
    from pytest_fxbucket.bench.step_time import StepTime, Timing
    from pytest_fxbucket.passes.registry import Bucketed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import World
    from pytest_fxbucket.ranks.backend import Choice
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.settings import RunSettings
    from pytest_fxbucket.step.roles import StepGraph

_MOST_LINES = 30


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
        checks += [f"benchmark:{variant}" for variant in ("unbucketed", *plan.checks.benchmark.against)]
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
    ) -> None:
        self.plan, self._on_compare = plan, on_compare
        self._settings, self._pools, self._say, self._accept = settings, pools, on_progress, accept_golden
        self._said: set[str] = set()
        """Why the step could not be captured."""

    def check(self, name: str) -> Verdict:
        """Run one check. Raises :class:`FxbucketError` for what could not be run at all."""
        checks = {
            "audit": self._audit,
            "golden": self._golden,
            "collectives": self._collectives,
            "same": self._same,
            "bitwise": self._bitwise,
            "eager": self._eager,
            "benchmark": self._benchmark,
        }
        if name not in checks:
            raise UsageError(f"there is no check {name!r}; known are {', '.join(checks)}")
        folder = Folder(self._settings.artifacts, self.name, name, self._settings.log_of)
        folder.clear()
        with self._its_code():
            verdict = checks[name](folder)
            if verdict.outcome == "failed":
                world = self._run_world if name in ON_RANKS else self._mesh_world
                folder.write_graphs(world.step(0), {ranks[0]: graphs for ranks, graphs in world.distinct()})
                return replace(verdict, folder=folder.path)
        folder.clear()
        return verdict

    def parity(self, told: str) -> Verdict:
        """The check eager with learning rates that stay, whose ranks tell each step through the named pipe ``told``."""
        folder = Folder(self._settings.artifacts, self.name, "parity", self._settings.log_of)
        folder.clear()
        with self._its_code():
            choice = self._choice("eager")
            if isinstance(choice, Verdict):
                return choice
            from pytest_fxbucket.eager.of_plan import Eager

            world, paths = self._run_world, self._paths
            return Eager(world, self.name, choice, self._pools, paths, folder, self._say, told, steady=True).verdict()

    @property
    def name(self) -> str:
        """Path of the plan from rootdir, with the matrix id."""
        shown = Path(os.path.relpath(self.plan.path, self._settings.rootdir)).as_posix()
        return f"{shown}[{self.plan.matrix_id}]" if self.plan.matrix_id else shown

    @property
    def step(self) -> StepGraph:
        """The traced, unbucketed step at the size of the real mesh."""
        with self._its_code():
            return self._mesh_world.step(0)

    @property
    def bucketed(self) -> Bucketed:
        """Graph and report of the pass on rank 0 at the size of the real mesh; of several graphs the first."""
        with self._its_code():
            return next(iter(self._mesh_world.passed(0).values())).bucketed

    @property
    def world(self) -> World:
        """The plan at the size of the real mesh."""
        return self._mesh_world

    def summary(self) -> PlanSummary | None:
        """Launches, buckets and bytes; None until the pass ran at the size of the real mesh."""
        world = self.__dict__.get("_mesh_world")
        if world is None or not world.is_passed(0):
            return None
        before = [bucket for reading in world.reading(0).values() for bucket in reading.buckets]
        after = [bucket for one in world.passed(0).values() for bucket in one.reading.buckets]
        named = world.entry_of if self.plan.bucket.by == "plan" else {p.fqn: "" for p in world.step(0).parameters}
        planned = [bucket for bucket in after if any(fqn in named for fqn in bucket.fqns)]
        return PlanSummary(len(before), len(after), len(planned), sum(bucket.bytes for bucket in after))

    @cached_property
    def _mesh_world(self) -> World:
        from pytest_fxbucket.plan_on_mesh import World, mesh_of

        return World(self.plan, mesh_of(self.plan), self._settings.pass_name, self._say, said=self._said)

    @cached_property
    def _run_world(self) -> World:
        from pytest_fxbucket.plan_on_mesh import World, mesh_of

        if self.plan.run_degrees == self.plan.degrees:
            return self._mesh_world
        return World(self.plan, mesh_of(self.plan, run=True), self._settings.pass_name, self._say, said=self._said)

    def _its_code(self) -> AbstractContextManager[None]:
        return user_code([self.plan.path.parent, self._settings.rootdir])

    def _audit(self, folder: Folder) -> Verdict:
        from pytest_fxbucket.checks.audit.audit import audit
        from pytest_fxbucket.checks.audit.expectations import promise_of
        from pytest_fxbucket.checks.bitwise.crossing import crossing_notes, crossing_problems

        world = self._mesh_world
        if not world.step(0).has_roles:
            raise CaptureError(
                f"{self.name}: audit needs the roles of the graph's inputs and outputs; let the [graph] factory return a "
                "TracedStep with roles and fqns, or set checks.audit = false"
            )
        promise = promise_of(self.plan, world.step(0).parameters, world.resolution, world.members)
        lines = _said_once(
            (
                ranks,
                [
                    problem
                    for phase, one in world.passed(ranks[0]).items()
                    for problem in audit(promise, world.reading(ranks[0])[phase], one.reading)
                ]
                + crossing_problems(world, ranks[0]),
            )
            for ranks, _ in world.distinct()
        )
        if lines:
            return failed("audit", _counted(len(lines), "promise", "not kept"), _capped(lines))
        entries = len(world.resolution.entries)
        idle = (f"{one.transformation} changed nothing" for one in world.final_step(0).told if not one.done)
        notes = "; ".join((*world.resolution.notes, *idle, *crossing_notes(world), *world.step(0).notes))
        what = _counted(entries, "entry", "as planned") if self.plan.bucket.by == "plan" else "buckets by size"
        summary = f"{what} on {self._looked_at(world)}"
        return passed("audit", f"{summary} ({notes})" if notes else summary)

    def _golden(self, folder: Folder) -> Verdict:
        from pytest_fxbucket.golden.mismatch import mismatch_lines
        from pytest_fxbucket.plan_on_mesh import text_of

        store = GoldenStore(self._settings.golden_dir, self._settings.rootdir)
        path = store.path_for(self.plan.path, self.plan.matrix_id)
        world = self._mesh_world
        texts = {ranks[0]: text_of(world, ranks[0], self.name) for ranks, _ in world.distinct()}
        text = texts[0]
        for rank, other in texts.items():
            if other != text:
                never = "nothing: a schedule must be the same on every rank"
                lines = mismatch_lines(text, other, never, folder.file("golden.diff"))
                return failed("golden", f"the schedule of rank {rank} is not that of rank 0", lines)
        return self._compare_golden(store, path, text, folder)

    def _compare_golden(self, store: GoldenStore, path: Path, text: str, folder: Folder) -> Verdict:
        from pytest_fxbucket.golden.mismatch import mismatch_lines

        may_write = self._accept is not None and accepts(self._settings.accept, path)
        self._on_compare(path)
        try:
            accepted = store.read(path)
        except GoldenError:
            if not may_write:
                raise
            accepted = None
        if accepted == text:
            return passed("golden", f"as in {store.shown(path)}")
        if may_write and self._accept is not None:
            self._accept(path, render(text))
            return passed("golden", f"to be written to {store.shown(path)} when the run ends")
        assert accepted is not None
        ours = self._settings.pass_name == "manual"
        command = store.accept_command(path) if ours else "nothing: a golden belongs to the plan, not to another pass"
        lines = mismatch_lines(accepted, text, command, folder.file("golden.diff"))
        folder.write("found.txt", text)
        return failed("golden", f"the schedule is not the one in {store.shown(path)}", lines)

    def _collectives(self, folder: Folder) -> Verdict:
        from pytest_fxbucket.checks.stages import disagreements

        world = self._mesh_world
        several, first = world.distinct(), world.final(0)
        lines = _said_once((ranks, [p for one in graphs.values() for p in one.problems]) for ranks, graphs in several)
        lines += disagreements(world)
        launches = sum(not call.is_wait for one in first.values() for call in one.calls)
        if lines:
            return failed("collectives", _counted(len(lines), "problem", "that would hang or race"), _capped(lines))
        return passed("collectives", f"{launches} launches agree on {self._looked_at(world)}")

    def _same(self, folder: Folder) -> Verdict:
        from pytest_fxbucket.same.of_plan import Same

        return Same(self._mesh_world).verdict()

    def _bitwise(self, folder: Folder) -> Verdict:
        choice = self._choice("bitwise")
        if isinstance(choice, Verdict):
            return choice
        from pytest_fxbucket.checks.bitwise.of_plan import Bitwise

        return Bitwise(self._run_world, self.name, choice, self._pools, self._paths, folder, self._say).verdict()

    def _eager(self, folder: Folder) -> Verdict:
        choice = self._choice("eager")
        if isinstance(choice, Verdict):
            return choice
        from pytest_fxbucket.eager.of_plan import Eager

        return Eager(self._run_world, self.name, choice, self._pools, self._paths, folder, self._say).verdict()

    @property
    def _paths(self) -> list[Path]:
        return [self.plan.path.parent, self._settings.rootdir]

    def _choice(self, check: str) -> Choice | Verdict:
        """What the ranks of ``check`` run on; a verdict if they cannot, or need not."""
        from pytest_fxbucket.ranks.messages import MAX_RANKS

        if (self._settings.backend or self.plan.run.backend) != "fake":
            refuse_too_many_ranks(self.plan, MAX_RANKS, self.name)
        choice = self._backend()
        if choice.backend is None:
            return skipped(check, choice.lacking)
        hanging = self._hanging(check)
        return choice if hanging is None else hanging  # a verdict is true only if it passed

    def _benchmark(self, folder: Folder) -> Verdict:
        choice = self._timing.choice(self.plan)
        if choice.backend is None:
            return skipped("benchmark", choice.lacking)
        if (hanging := self._hanging("benchmark")) is not None:
            return hanging
        return passed("benchmark", f"{self.step_time().record.ranks} ranks timed")

    def _hanging(self, check: str) -> Verdict | None:
        """What keeps ``check`` from being run, since its ranks would wait for each other; None: nothing does.

        A skip where the plan's collectives fails of it too, else a failure: somebody must say it.
        """
        from pytest_fxbucket.checks.stages import disagreements

        lines = disagreements(self._run_world)
        if not lines:
            return None
        if self.plan.checks.collectives and (self._run_world is self._mesh_world or disagreements(self._mesh_world)):
            more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
            return skipped(check, f"not run, since its ranks would hang, as collectives finds: {lines[0]}{more}")
        return failed(
            check, _counted(len(lines), "problem", "for which its ranks would hang, so they were not run"), _capped(lines)
        )

    def step_time(self, options: Benchmark | None = None) -> StepTime:
        """Time the step on the ranks, once for each ``options`` (None: the plan's, or the defaults).

        Raises :class:`FxbucketError`, again for everybody who asks: BenchmarkError where ranks cannot be timed, or would hang.
        """
        if (hanging := self._hanging("benchmark")) is not None:
            raise BenchmarkError(f"{self.name}: {hanging.summary}")
        return self._timing.step_time(options or self.plan.checks.benchmark or Benchmark())

    @cached_property
    def _timing(self) -> Timing:
        from pytest_fxbucket.bench.step_time import Timing

        return Timing(self.name, lambda: self._run_world, self._backend, self._settings, self._pools, self._its_code, self._say)

    def _backend(self) -> Choice:
        """What the ranks run on. Raises :class:`FxbucketError` if it lacks what it must have here."""
        from pytest_fxbucket.checks.placing import cannot_run_on
        from pytest_fxbucket.ranks.backend import ON_GPUS, Choice, choose, this_machine

        asked = self._settings.backend or self.plan.run.backend
        if asked == "fake":
            return Choice(None, "back end fake holds no values to compare")
        if asked == "auto" and not (self._pools.has_gpus or self._settings.require_gpus):
            return Choice("gloo")
        machine = this_machine()
        choice = choose(asked, self.plan.run_world, machine)
        if choice.lacking and self._settings.require_gpus:
            raise RankError(f"{self.name}: {choice.lacking}; --fxbucket-require-gpus makes that an error")
        if choice.backend not in ON_GPUS:
            # That a machine without GPUs does not use them is no news.
            return choice if machine.gpus or choice.backend is None else Choice(choice.backend)
        problem = next(filter(None, (cannot_run_on("cuda", one) for one in self._run_world.step(0).graphs.values())), "")
        if problem and (asked != "auto" or self._settings.require_gpus):
            raise CaptureError(f'{self.name}: {problem}; let the model call what all devices have, or use run.backend = "gloo"')
        return Choice("gloo", problem) if problem else choice

    def _looked_at(self, world: World) -> str:
        ranks = world.ranks()
        return f"{world.size} ranks" if len(ranks) == world.size else f"{len(ranks)} of {world.size} ranks"


def _said_once(problems: Iterable[tuple[Sequence[int], Sequence[str]]]) -> list[str]:
    """Problems of each set of ranks that share a graph, those of all graphs once; the others name their ranks."""
    found: dict[str, list[int]] = {}
    graphs = 0
    for ranks, sentences in problems:
        graphs += len(ranks)
        for sentence in dict.fromkeys(sentences):
            found.setdefault(sentence, []).extend(ranks)
    return [
        sentence if len(ranks) == graphs else f"rank {', '.join(map(str, sorted(ranks)))}: {sentence}"
        for sentence, ranks in found.items()
    ]


def _capped(lines: list[str]) -> list[str]:
    """At most as many lines as a person reads; the count says the rest."""
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} more"]


def _counted(count: int, noun: str, rest: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun if count == 1 else plural} {rest}"
