"""The context of a plan's checks: the plan at the mesh's size and at the ranks' size, its folder, and its rank pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pytest_fxbucket.backends import BACKENDS, BackendChoice, choose, row_of
from pytest_fxbucket.checks.devices import cannot_run_on
from pytest_fxbucket.checks.verdict import Verdict, capped, failed, skipped
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.calls import joint_problems
from pytest_fxbucket.pipeline.problems import table_problems
from pytest_fxbucket.pipeline.schedules import table_of
from pytest_fxbucket.plan.folders import folders_of
from pytest_fxbucket.plan.mesh_consistency import refuse_too_many_ranks
from pytest_fxbucket.ranks import machine as machines
from pytest_fxbucket.transforms.transformation import BUCKET
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder
    from pytest_fxbucket.passes.result import Passed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.settings import RunSettings
    from pytest_fxbucket.step.roles import Phase
    from pytest_fxbucket.transforms.fit import ObservedGraph
    from pytest_fxbucket.transforms.step_versions import StepVersions

    _Stage = tuple[str, Mapping[int, Mapping[Phase, "Passed | ObservedGraph"]]]
    """Name of a transformation or the pass, and by rank the graphs behind it."""


class Times(Protocol):
    """Measures the plan's step time, once for all who ask."""

    def times_on(self) -> BackendChoice:
        """The back end of the ranks whose steps are timed; none where nothing can be timed."""

    def ranks_timed(self) -> int:
        """Measure as the plan says, and return the number of ranks measured. Raises BenchmarkError if they cannot be."""


@dataclass(frozen=True)
class Context:
    """One plan as its checks see it."""

    plan: Plan
    name: str
    """Path of the plan from rootdir, with the matrix id."""
    settings: RunSettings
    world: PlanOnMesh
    """The plan at the size of the real mesh."""
    on_ranks: Callable[[], PlanOnMesh]
    """Gives the plan at the size that ranks run."""
    pools: Pools
    folder: Folder
    """Where a failure writes files to look at."""
    say: Callable[[str], None]
    times: Times
    accept_golden: Callable[[Path, str], None] | None = None
    """Takes path and text of a golden to accept; None if none is accepted."""
    on_compare: Callable[[Path], None] = lambda _: None
    """Called with the path of each golden that is compared."""
    briefly: bool = False
    """Whether it is enough to know that something differs; where is not looked for then."""

    @property
    def run_world(self) -> PlanOnMesh:
        """The plan at the size that ranks run; ``world`` itself if both sizes are equal."""
        return self.on_ranks()

    @property
    def paths(self) -> list[Path]:
        """Folders that come first on ``sys.path`` in the ranks."""
        return folders_of(self.plan.path, self.settings.rootdir)

    def choice(self, check: str) -> BackendChoice | Verdict:
        """The back end of the ranks of ``check``; a verdict, never a passed one, if they cannot run, or need not."""
        # On a GPU the model's own step has another attention kernel than ours, so eager stays off it unless GPUs are asked for.
        is_free = self._asked_backend == "auto" and not self.settings.require_gpus
        choice = self.backend(with_ours=check != "eager" or not is_free)
        if choice.backend is None:
            return skipped(check, choice.lacking)
        refuse_too_many_ranks(self.plan, BACKENDS[choice.backend].most_ranks, self.name)
        hanging = self.hanging(check)
        return choice if hanging is None else hanging  # a verdict is true only if it passed

    def hanging(self, check: str) -> Verdict | None:
        """A verdict that ``check`` is not run, since its ranks would hang; None if they would not.

        It is a skip if the plan's check ``collectives`` fails for the same reason, else a failure: one of them must report it.
        """
        lines = disagreements(self.run_world) + schedule_problems(self.run_world)
        if not lines:
            return None
        # ``collectives`` looks at the real mesh, so it may be green while the smaller one would hang.
        if self.plan.checks.collectives and (self.run_world is self.world or disagreements(self.world)):
            more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
            return skipped(check, f"not run, since its ranks would hang, as collectives finds: {lines[0]}{more}")
        return failed(
            check, f"{counted(len(lines), 'problem')} for which its ranks would hang, so they were not run", capped(lines)
        )

    @property
    def _asked_backend(self) -> str:
        return self.settings.backend or self.plan.run.backend

    def backend(self, *, with_ours: bool) -> BackendChoice:
        """The back end of the ranks. Raises :class:`FxbucketError` if the one that must be used cannot be used here.

        ``with_ours``: GPUs may compute by kernels of ours, which are for values, not for step time.
        """
        asked = self._asked_backend
        if not row_of(asked).has_values:
            return BackendChoice(None, f"back end {asked} holds no values to compare")
        # Decided without asking the machine, which is not needed where no pool has GPUs and nobody requires them.
        if asked == "auto" and not (self.pools.has_gpus or self.settings.require_gpus):
            return BackendChoice("gloo")
        machine = machines.this_machine()
        choice = choose(asked, self.plan.run_world, machine, self.plan.run.ranks_per_gpu)
        choice.unless_required(self.name, require_gpus=self.settings.require_gpus)
        if choice.backend is None or not BACKENDS[choice.backend].gpus:
            # That a machine without GPUs does not use them is no news.
            return choice if machine.gpus or choice.backend is None else BackendChoice(choice.backend)
        graphs = self.run_world.step(0).graphs.values()
        problem = next(filter(None, (cannot_run_on("cuda", one, with_ours=with_ours) for one in graphs)), "")
        if problem and (asked != "auto" or self.settings.require_gpus):
            raise CaptureError(f'{self.name}: {problem}; let the model call what all devices have, or use run.backend = "gloo"')
        return BackendChoice("gloo", problem) if problem else choice


def looked_at(world: PlanOnMesh) -> str:
    """Which ranks' graphs were looked at, for people."""
    ranks = world.ranks()
    return f"{world.size} ranks" if len(ranks) == world.size else f"{len(ranks)} of {world.size} ranks"


def disagreements(world: PlanOnMesh) -> list[str]:
    """Sentences on what would hang across the ranks that are looked at.

    They are of the first of transformations and pass behind which anything would; without transformations it is not named.
    """
    by_rank: dict[int, StepVersions] = {rank: world.versions(rank) for rank in world.ranks()}
    one_rank = next(iter(by_rank.values()))
    stages: list[_Stage] = [
        (one.name, {rank: versions.before[n].looked for rank, versions in by_rank.items()})
        for n, one in enumerate(one_rank.before)
    ]
    passed: _Stage = (BUCKET, {rank: versions.passed for rank, versions in by_rank.items()})
    after: list[_Stage] = [
        (one.name, {rank: versions.after[n].looked for rank, versions in by_rank.items()})
        for n, one in enumerate(one_rank.after)
    ]
    for name, graphs in (*stages, passed, *after):
        alike: dict[int, int] = {}  # pipeline stage -> its first rank: ranks of other stages have other graphs
        for rank, one in graphs.items():
            first = alike.setdefault(world.mesh.at(rank, "pp"), rank)
            if set(one) != set(graphs[first]):
                return [f"behind {name}: rank {first} has graphs {', '.join(graphs[first])}, rank {rank} {', '.join(one)}"]
        phases = dict.fromkeys(phase for one in graphs.values() for phase in one)
        lines = [
            line
            for phase in phases
            for line in joint_problems({rank: one[phase].calls for rank, one in graphs.items() if phase in one})
        ]
        if lines:
            return [f"behind {name}: {line}" for line in lines] if stages or after else lines
    return []


def schedule_problems(world: PlanOnMesh) -> list[str]:
    """Sentences on actions in the plan's pipeline schedule that would hang, or not run once; none without stages."""
    how = world.final_step(0).pipelined
    if how is None:
        return []
    return list(table_problems(table_of(how.schedule, how.stages, max(how.pp_places) + 1, how.microbatches)))
