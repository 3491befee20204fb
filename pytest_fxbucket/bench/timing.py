"""Step time of one plan in a session: measured when somebody asks, once, on fresh ranks for each set of processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.artifacts import Folder
from pytest_fxbucket.bench.of_plan import StepTime, step_time
from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.plan.agree_on_ranks import refuse_too_many_ranks
from pytest_fxbucket.ranks.backend import IN_ONE_PROCESS, PLAIN, Choice
from pytest_fxbucket.ranks.messages import MAX_RANKS

if TYPE_CHECKING:
    from pytest_fxbucket.plan.schema import Benchmark, Plan
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.settings import RunSettings
    from pytest_fxbucket.world import World


@dataclass(slots=True)
class Timing:
    """Step time of the plan called ``name``."""

    name: str
    """Its path from rootdir, with the matrix id."""
    world: Callable[[], World]
    """The plan at the size that is run."""
    backend: Callable[[], Choice]
    """What its ranks run on."""
    settings: RunSettings
    pools: Pools
    paths: Callable[[], AbstractContextManager[None]]
    """Where its modules are found."""
    say: Callable[[str], None]
    _found: dict[Benchmark, StepTime | FxbucketError] = field(default_factory=dict)

    def step_time(self, options: Benchmark) -> StepTime:
        """Measure as ``options`` says, once. Raises FxbucketError, the same for everybody who asks."""
        if options not in self._found:
            try:
                self._found[options] = self._measured(options)
            except FxbucketError as error:
                self._found[options] = error
        found = self._found[options]
        if isinstance(found, FxbucketError):
            raise found
        return found

    def choice(self, plan: Plan) -> Choice:
        """What the ranks run on; none where nothing can be timed."""
        asked = self.settings.backend or plan.run.backend
        if asked in IN_ONE_PROCESS:
            return Choice(None, f"back end {asked} runs all ranks in one process, in turn, which says nothing of step time")
        refuse_too_many_ranks(plan, MAX_RANKS, self.name)
        return self.backend()

    def _measured(self, options: Benchmark) -> StepTime:
        world = self.world()
        plan = world.plan
        backend = self.choice(plan).backend
        if backend is None:
            raise BenchmarkError(f"{self.name}: step time cannot be measured: {self.choice(plan).lacking}")

        def run(tasks: Sequence[object]) -> list[object]:
            pool = self.pools.get(len(tasks), PLAIN if backend == "gloo" else backend)
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
                pool.close()  # other processes for each set, and nobody's idle threads beside the next item

        shown = Path(os.path.relpath(plan.path, self.settings.rootdir)).as_posix()
        with self.paths():
            return step_time(shown, world, options, backend, run, self.say)
