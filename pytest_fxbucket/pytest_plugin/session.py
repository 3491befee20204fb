"""What one pytest session keeps: options, the rank pools, the plan runs in use, goldens to write, results to show."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.errors import UsageError
from pytest_fxbucket.files import digest
from pytest_fxbucket.golden.accept import AcceptQueue
from pytest_fxbucket.progress import Progress

if TYPE_CHECKING:
    from pytest_fxbucket.bench.report.page import ReportInput
    from pytest_fxbucket.capture.last_step import LastStep
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.pytest_plugin.options import Options
    from pytest_fxbucket.pytest_plugin.torchrun import Torchrun
    from pytest_fxbucket.ranks.pools import Pools
    from pytest_fxbucket.run import PlanRun


@dataclass(slots=True)
class Sources:
    """Digests of source files when the run began; of each file the first look counts."""

    digests: dict[str, str] = field(default_factory=dict)

    def note(self, path: Path) -> None:
        """Remember what ``path`` holds now, unless it was noted before; a file that cannot be read is left out."""
        name = os.path.realpath(path)
        if name not in self.digests:
            try:
                self.digests[name] = digest(Path(name).read_bytes())
            except OSError:
                return

    def read(self, path: str, shown: str) -> bytes:
        """The bytes of ``path``; UsageError if they are not those of when the run began."""
        self.note(Path(path))
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{shown} cannot be read: {error.strerror or error}") from None
        if self.digests.get(path) != digest(source):
            raise UsageError(f"{shown} was changed since the run began, so its expectations are left alone; run again")
        return source


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
    """accepted goldens from all reports, kept by the process that writes"""
    asked: list[Path] = field(default_factory=list)
    """goldens that the item that runs now has asked for by name; leave with its report"""
    compared: list[Path] = field(default_factory=list)
    """goldens that the item that runs now was compared with, whether they exist or not; leave with its report"""
    whole_files: dict[Path, list[str]] = field(default_factory=dict)
    """test files with goldens that are run whole -> node ids of their tests"""
    sources: Sources = field(default_factory=Sources)
    """test files as they were when the run began, if their expectations may be rewritten"""
    measured: dict[str, ReportInput] = field(default_factory=dict)
    """node id of a benchmark -> its last step time, for the report, where one was asked for"""
    not_shown: list[str] = field(default_factory=list)
    """stored runs that the report cannot show, in sentences"""
    compared_step_times: int = 0
    """how many were to be compared with a stored run, whether there was one or not"""
    results: dict[str, PlanResult] = field(default_factory=dict)
    has_steps_on_ranks: bool = False
    """whether ranks are to run steps of plans; if so, the modules for that are imported once, before ranks are forked"""
    torchrun: Torchrun | None = None
    """set where torchrun started this process as one of several"""
    _pools: Pools | None = None
    _runs: dict[PlanKey, PlanRun] = field(default_factory=dict)
    _last_step: LastStep | None = None

    @property
    def is_reporting(self) -> bool:
        """Whether this process reports and stores measurements; under torchrun only rank 0 does."""
        return self.options.log_of is None

    @property
    def pools(self) -> Pools:
        """The session's rank pools, made at first use."""
        if self._pools is None:
            from pytest_fxbucket.eager import WARM
            from pytest_fxbucket.ranks.pools import Pools

            warm = [
                "pytest_fxbucket.pytest_plugin.distributed_test.job",
                *(WARM if self.has_steps_on_ranks else ()),
            ]
            self._pools = Pools(warm=warm) if self.torchrun is None else self.torchrun.pools(warm)
            self._pools.say = self.progress.say
        return self._pools

    def run_of(self, plan: Plan) -> PlanRun:
        """Return the plan's PlanRun, the same one until it is released."""
        from pytest_fxbucket.capture.last_step import LastStep
        from pytest_fxbucket.run import PlanRun

        # One for all plans: a row that traces the same step as the one before it takes that over.
        self._last_step = self._last_step or LastStep()
        key = key_of(plan)
        if key not in self._runs:
            say, accept, compared = self.progress.say, self.accepted.add, self.compared.append
            self._runs[key] = PlanRun(
                plan,
                self.options,
                self.pools,
                on_progress=say,
                accept_golden=accept,
                on_compare=compared,
                last_step=self._last_step,
            )
        return self._runs[key]

    def refuse_changes(self) -> None:
        """Raise :class:`FxbucketError` if a test has changed a graph that it was given of a plan that is still held."""
        for run in self._runs.values():
            run.refuse_changes()

    def drain(self) -> dict[str, list[Any]]:
        """Return, as plain data, what the current item tells the controller about goldens, and forget it."""
        compared, asked = ([str(path) for path in paths] for paths in (self.compared, self.asked))
        sent: dict[str, list[Any]] = {"goldens": self.accepted.drain(), "compared": compared, "asked": asked}
        self.compared.clear()
        self.asked.clear()
        return {name: entries for name, entries in sent.items() if entries}

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
        self._last_step = None
        if self._pools is not None:
            self._pools.close()
            self._pools = None


STATE: pytest.StashKey[FxSession] = pytest.StashKey()


def fx_session(config: pytest.Config) -> FxSession:
    """Return what the plugin keeps for this pytest session."""
    return config.stash[STATE]
