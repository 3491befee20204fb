"""What one pytest session keeps: options, the rank pools, the plan runs in use, goldens to write, results to show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.asserting.sources import Sources
from pytest_fxbucket.golden.accept import AcceptQueue
from pytest_fxbucket.progress import Progress

if TYPE_CHECKING:
    from pytest_fxbucket.bench.report.page import ReportInput
    from pytest_fxbucket.options import Options
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.torchrun import Torchrun

PlanKey = tuple[Path, str | None]


def key_of(plan: Plan) -> PlanKey:
    """Return what tells one plan from another: its file and matrix id."""
    return plan.path, plan.matrix_id


@dataclass(slots=True)
class PlanResult:
    """What the summary says of one plan: launches, buckets and bytes once known, and each check's outcome."""

    sizes: dict[str, int] | None = None
    outcomes: dict[str, str] = field(default_factory=dict)
    """check as in the item's name -> passed, failed, or skipped with its reason"""
    notes: dict[str, str] = field(default_factory=dict)
    """check -> the verdict's one line"""


@dataclass(slots=True)
class FxSession:
    """The state of the plugin in one process; workers of pytest-xdist have one each."""

    options: Options
    progress: Progress = field(default_factory=Progress)
    accepted: AcceptQueue = field(default_factory=AcceptQueue)
    """what the item that runs now has accepted; leaves with its report"""
    to_write: AcceptQueue = field(default_factory=AcceptQueue)
    """what reports brought to the process that writes"""
    compared: list[Path] = field(default_factory=list)
    """goldens that the item that runs now was compared with, there or not; leave with its report"""
    whole_files: dict[Path, list[str]] = field(default_factory=dict)
    """test files with goldens that are run whole -> node ids of their tests"""
    sources: Sources = field(default_factory=Sources)
    """test files as they were when the run began, if their expectations may be rewritten"""
    measured: list[ReportInput] = field(default_factory=list)
    """step times for the report, where one was asked for"""
    not_shown: list[str] = field(default_factory=list)
    """stored runs that the report cannot show, in sentences"""
    compared_step_times: int = 0
    """how many were compared with a stored run, or would have been, had there been one"""
    results: dict[str, PlanResult] = field(default_factory=dict)
    torchrun: Torchrun | None = None
    """set where torchrun started this process as one of several"""
    _pools: Pools | None = None
    _runs: dict[PlanKey, PlanRun] = field(default_factory=dict)

    @property
    def is_reporting(self) -> bool:
        """Whether this process says and keeps what was measured; of torchrun's the first."""
        return self.torchrun is None or self.torchrun.log_name is None

    @property
    def pools(self) -> Pools:
        """The session's rank pools, made at first use."""
        if self._pools is None:
            from pytest_fxbucket.ranks.pools import Pools

            warm = ["pytest_fxbucket.body.job", *(["pytest_fxbucket.eager.job"] if self.options.plans else [])]
            self._pools = Pools(warm=warm) if self.torchrun is None else self.torchrun.pools(warm)
            self._pools.say = self.progress.say
        return self._pools

    def run_of(self, plan: Plan) -> PlanRun:
        """Return the plan's PlanRun, the same one until it is released."""
        from pytest_fxbucket.run import PlanRun
        from pytest_fxbucket.settings import RunSettings

        options, key = self.options, key_of(plan)
        if key not in self._runs:
            settings = RunSettings(
                rootdir=options.rootdir,
                pass_name=options.pass_name,
                backend=options.backend,
                require_gpus=options.require_gpus,
                golden_dir=options.golden_dir,
                accept=options.accept,
                artifacts=options.rootdir / ".fxbucket",
                log_of=self.torchrun.log_name if self.torchrun is not None else None,
            )
            self._runs[key] = PlanRun(
                plan,
                settings,
                self.pools,
                on_progress=self.progress.say,
                accept_golden=self.accepted.add,
                on_compare=self.compared.append,
            )
        return self._runs[key]

    def drain(self) -> dict[str, list[Any]]:
        """Return what the item that runs now has to tell the controller of goldens, as plain data, and forget it."""
        told: dict[str, list[Any]] = {"goldens": self.accepted.drain(), "compared": [str(path) for path in self.compared]}
        self.compared.clear()
        return {name: entries for name, entries in told.items() if entries}

    def sizes_of(self, plan: Plan) -> dict[str, int] | None:
        """Return launches, buckets and bytes of a plan whose pass ran in this process, as a plain dict."""
        run = self._runs.get(key_of(plan))
        summary = run.summary() if run else None
        return asdict(summary) if summary else None

    def give_back_gpus(self) -> None:
        """End pools whose GPUs another run waits for; between tests, when no pool is at work."""
        if self._pools is not None:
            self._pools.give_back()

    def release(self, key: PlanKey) -> None:
        """Forget a plan's run, so that its graphs can go."""
        self._runs.pop(key, None)

    def close(self) -> None:
        """Forget all runs and end all ranks; harmless when nothing was started."""
        self._runs.clear()
        if self._pools is not None:
            self._pools.close()
            self._pools = None


STATE: pytest.StashKey[FxSession] = pytest.StashKey()


def fx_session(config: pytest.Config) -> FxSession:
    """Return what the plugin keeps for this pytest session."""
    return config.stash[STATE]
