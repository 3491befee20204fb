"""Step time as items and as a fixture's answer: what the ranks measured enters pytest-benchmark as samples of its own.

pytest-benchmark times a function by a clock that one may choose. Ours stands still but for the function, which moves it on by
the next sample: so a step of many processes is a round like any other, in its tables, files, comparisons and histograms.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.checks.verdict import passed
from pytest_fxbucket.collect import OfPlan, place
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.options import fx_session
from pytest_fxbucket.terminal import error_text, failure_lines

if TYPE_CHECKING:
    from pytest_fxbucket.bench.of_plan import StepTime
    from pytest_fxbucket.bench.report.inputs import ReportInput
    from pytest_fxbucket.checks.verdict import Verdict

PLUGIN = "benchmark"
"""Name of pytest-benchmark among plugins, and of its fixture."""
FIXTURE = "fxbucket_benchmark"
BUCKETED = "bucketed"


class BenchmarkItem(OfPlan, pytest.Function):
    """Step time of one variant of a plan: `benchmark` of the bucketed step, `benchmark:unbucketed`, `benchmark:<pass>`."""

    @classmethod
    def of(cls, parent: pytest.Collector, name: str, plan: Any) -> BenchmarkItem:
        """Return the item called `name`."""
        has_plugin = parent.config.pluginmanager.hasplugin(PLUGIN)
        item: BenchmarkItem = cls.from_parent(parent, name=name, plan=plan, callobj=_timed if has_plugin else _untimed)
        item.clock = SampleClock()
        if has_plugin:
            item.add_marker(pytest.mark.benchmark(timer=item.clock.timer(), group=parent.nodeid + _row(plan.matrix_id)))
        return item

    clock: SampleClock

    @property
    def variant(self) -> str:
        """Return which of the variants that were timed it is of."""
        return self.name.partition("[")[0].partition("@")[0].partition(":")[2] or BUCKETED

    def time(self, benchmark: Any) -> None:
        """Measure, hand the samples to pytest-benchmark, and judge what they are compared with."""
        __tracebackhide__ = True
        if reason := why_not(self.config, benchmark):
            pytest.skip(f"{self.name}: {reason}")
        told = self._check(benchmark)
        if told is not None:
            pytest.fail(told, pytrace=False)
        if self.verdict is not None and self.verdict.outcome == "skipped":
            pytest.skip(f"{self.name}: {self.verdict.summary}")

    def _check(self, benchmark: Any) -> str | None:
        """Set the verdict; return what to fail with, if anything."""
        __tracebackhide__ = True
        fx = fx_session(self.config)
        try:
            with fx.progress.watching(self.nodeid):
                run = fx.run_of(self.plan)
                self.verdict = run.check("benchmark")
                if self.verdict:
                    step_time = run.step_time()
                    self._feed(benchmark, step_time)
                    self.verdict = self._judged(benchmark, step_time)
        except FxbucketError as error:
            return error_text(error).replace(f"{self.config.rootpath}/", "")
        self.user_properties.append(("fxbucket", self.verdict.summary))
        return "\n".join(failure_lines(self.verdict)) if self.verdict.outcome == "failed" else None

    def _feed(self, benchmark: Any, step_time: StepTime) -> None:
        if fx_session(self.config).is_reporting:
            feed(benchmark, self.clock, step_time.samples(self.variant), info_of(step_time, self.variant))

    def _judged(self, benchmark: Any, step_time: StepTime) -> Verdict:
        """Say what was measured; of a bucketed step also what comes of a stored run, if one was asked for."""
        from pytest_fxbucket.bench.told import told

        said = passed("benchmark", told(step_time, self.variant))
        fx = fx_session(self.config)
        if self.variant != BUCKETED:
            return said
        if fx.options.report is not None:
            fx.measured.append(self._shown(step_time))
        return self._compared(benchmark, step_time, said) if fx.options.compare is not None else said

    def _compared(self, benchmark: Any, step_time: StepTime, said: Verdict) -> Verdict:
        from pytest_fxbucket.bench.compare import kept, verdict_of
        from pytest_fxbucket.compat.pytest_benchmark_storage import storage_folder

        options = fx_session(self.config).options
        assert options.compare is not None
        checks = self.plan.checks.benchmark
        assert checks, "an item of a check that is on"
        folder = storage_folder(self.config)
        verdict = verdict_of(options.compare, step_time.record, checks.threshold, folder, options.rootdir)
        benchmark.extra_info.update(kept(options.compare, verdict))
        return replace(verdict, summary=f"{verdict.summary}; {said.summary}") if verdict else verdict

    def _shown(self, step_time: StepTime) -> ReportInput:
        """Return what the page of the plan shows: this run, and all that are stored."""
        from pytest_fxbucket.bench.report.inputs import ReportInput
        from pytest_fxbucket.bench.stored import runs_of
        from pytest_fxbucket.compat.pytest_benchmark_storage import storage_folder

        record = step_time.record
        stored = runs_of(record, storage_folder(self.config), fx_session(self.config).options.rootdir)
        return ReportInput(record, stored, step_time.measured.spans)

    def reportinfo(self) -> tuple[Any, int, str]:
        """Return where the item is from, and what its failure is headed with."""
        return place(self)


class SampleClock:
    """A clock that stands still until it is moved on by a sample."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def timer(self) -> Callable[[], float]:
        """Return what reads it; its name is what pytest-benchmark keeps of it."""

        def slowest_rank() -> float:
            return self._now_s

        return slowest_rank

    def advance(self, seconds: float) -> None:
        """Move on."""
        self._now_s += seconds


def feed(benchmark: Any, clock: SampleClock, samples: Sequence[float], extra_info: Mapping[str, Any]) -> None:
    """Let pytest-benchmark's fixture, whose timer is `clock`'s, take each of `samples` (seconds) as a round."""
    benchmark.extra_info.update(extra_info)
    left = iter(samples)
    benchmark.pedantic(lambda: clock.advance(next(left)), rounds=len(samples), iterations=1)


def info_of(step_time: StepTime, variant: str) -> dict[str, Any]:
    """Return what is kept beside the samples: the whole record with those of the bucketed step, else what they are of."""
    record = step_time.record.to_dict()
    if variant != BUCKETED:
        record = {name: record[name] for name in ("format", "plan", "row")} | {"variant": variant}
    return {"fxbucket": record}


def why_not(config: pytest.Config, benchmark: Any) -> str:
    """Say why pytest-benchmark would not take samples here; "" if it would. `benchmark`: its fixture, None: it is not there."""
    if benchmark is None:
        return "pytest-benchmark is not there, which keeps the samples; pip install 'pytest-fxbucket[benchmark]'"
    if benchmark.enabled:
        return ""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ:
        return "pytest-benchmark takes no samples in workers of pytest-xdist; run it with -n 0"
    return "pytest-benchmark takes no samples with --benchmark-disable"


def note_fixture(item: pytest.Item) -> None:
    """Let a test that asks for our fixture count as one of pytest-benchmark's."""
    names: list[str] = getattr(item, "fixturenames", [])
    if FIXTURE in names and PLUGIN not in names and item.config.pluginmanager.hasplugin(PLUGIN):
        item.add_marker(pytest.mark.benchmark(timer=_clock_of(item).timer()))
        names.append(PLUGIN)


_CLOCK: pytest.StashKey[SampleClock] = pytest.StashKey()


def _clock_of(item: pytest.Item) -> SampleClock:
    return item.stash.setdefault(_CLOCK, SampleClock())


def measure_in(request: pytest.FixtureRequest, options: Mapping[str, Any]) -> StepTime:
    """What the fixture's function does: measure the plan in use; its bucketed samples are the test's in pytest-benchmark."""
    from pytest_fxbucket.plan.benchmark import benchmark_of

    config, item = request.config, request.node
    has_plugin = config.pluginmanager.hasplugin(PLUGIN)
    benchmark = request.getfixturevalue(PLUGIN) if has_plugin else None
    if reason := why_not(config, benchmark):
        pytest.skip(f"{FIXTURE}: {reason}")
    run = request.getfixturevalue("fxbucket_run")
    with fx_session(config).progress.watching(FIXTURE):
        step_time: StepTime = run.step_time(benchmark_of(run.plan.checks.benchmark, options))
    if fx_session(config).is_reporting:
        feed(benchmark, _clock_of(item), step_time.samples(BUCKETED), info_of(step_time, BUCKETED))
    return step_time


def _row(matrix_id: str | None) -> str:
    return f"[{matrix_id}]" if matrix_id else ""


def _timed(request: pytest.FixtureRequest, benchmark: Any) -> None:
    __tracebackhide__ = True
    request.node.time(benchmark)


def _untimed(request: pytest.FixtureRequest) -> None:
    __tracebackhide__ = True
    request.node.time(None)
