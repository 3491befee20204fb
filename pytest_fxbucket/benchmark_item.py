"""Step time as items of a plan, and as the answer of a fixture; what the ranks measured enters pytest-benchmark as samples.

pytest-benchmark times a function by a clock that one may choose. Ours stands still but for the function, which moves it on by
the next sample: so a step of many processes is a round like any other, in its tables, files, comparisons and histograms.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.checks.verdict import passed
from pytest_fxbucket.collect import OfPlan, place
from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.session import fx_session
from pytest_fxbucket.terminal import error_text, failure_lines

if TYPE_CHECKING:
    from pytest_fxbucket.bench.report.page import ReportInput
    from pytest_fxbucket.bench.step_time import StepTime
    from pytest_fxbucket.checks.verdict import Verdict

FIXTURE = "fxbucket_benchmark"
PLUGIN = "benchmark"
"""Name of pytest-benchmark among plugins, and of its fixture."""
BUCKETED = "bucketed"


class BenchmarkItem(OfPlan, pytest.Function):
    """Step time of one variant of a plan: `benchmark` of the bucketed step, `benchmark:unbucketed`, `benchmark:<pass>`."""

    @classmethod
    def of(cls, parent: pytest.Collector, name: str, plan: Any) -> BenchmarkItem:
        """Return the item called `name`."""
        has_plugin = parent.config.pluginmanager.hasplugin(PLUGIN)
        item: BenchmarkItem = cls.from_parent(parent, name=name, plan=plan, callobj=_timed if has_plugin else _untimed)
        if has_plugin:
            item.add_marker(pytest.mark.benchmark(group=parent.nodeid + (f"[{plan.matrix_id}]" if plan.matrix_id else "")))
        return item

    @property
    def variant(self) -> str:
        """Return which of the variants that were timed it is of."""
        return self.name.partition("[")[0].partition("@")[0].partition(":")[2] or BUCKETED

    def time(self, benchmark: Any) -> None:
        """Measure, hand the samples to pytest-benchmark, and judge what they are compared with."""
        __tracebackhide__ = True
        if reason := why_not(self.config, benchmark):
            pytest.skip(f"{self.name}: {reason}")
        failure = self._check(benchmark)
        if failure is not None:
            pytest.fail(failure, pytrace=False)
        if self.verdict is not None and self.verdict.outcome == "skipped":
            pytest.skip(f"{self.name}: {self.verdict.summary}")

    def _check(self, benchmark: Any) -> str | None:
        """Set the verdict; return what to fail with, if anything."""
        __tracebackhide__ = True
        from pytest_fxbucket.compat.pytest_benchmark_storage import count_as_used

        fx = fx_session(self.config)
        try:
            with fx.progress.watching(self.nodeid):
                run = fx.run_of(self.plan)
                self.verdict = run.check("benchmark")
                if self.verdict:
                    self.verdict = self._judged(benchmark, run.step_time())
        except FxbucketError as error:
            return error_text(error).replace(f"{self.config.rootpath}/", "")
        finally:
            count_as_used(benchmark)
        self.user_properties.append(("fxbucket", self.verdict.summary))
        return "\n".join(failure_lines(self.verdict)) if self.verdict.outcome == "failed" else None

    def _judged(self, benchmark: Any, step_time: StepTime) -> Verdict:
        """Say what was measured; of a bucketed step also what comes of a stored run, if one was asked for.

        Of torchrun's processes the first one keeps samples, and has those to compare with.
        """
        said = passed("benchmark", step_time.summary(self.variant))
        fx = fx_session(self.config)
        if not fx.is_reporting:
            return said
        feed(benchmark, step_time.samples(self.variant), info_of(step_time, self.variant))
        if self.variant != BUCKETED:
            return said
        verdict = self._compared(benchmark, step_time, said) if fx.options.compare is not None else said
        if fx.options.report is not None:
            fx.measured.append(self._shown(step_time))
        return verdict

    def _compared(self, benchmark: Any, step_time: StepTime, said: Verdict) -> Verdict:
        from pytest_fxbucket.bench.compare import kept, verdict_of
        from pytest_fxbucket.compat.pytest_benchmark_storage import storage_folder

        fx = fx_session(self.config)
        options, checks = fx.options, self.plan.checks.benchmark
        assert options.compare is not None
        assert checks, "an item of a check that is on"
        fx.compared_step_times += 1
        benchmark.extra_info.update(kept(options.compare))  # what could not be judged is no measure of later runs
        folder = storage_folder(self.config)
        verdict = verdict_of(options.compare, step_time.record, checks.threshold, folder, options.rootdir)
        benchmark.extra_info.update(kept(options.compare, verdict))
        return replace(verdict, summary=f"{verdict.summary}; {said.summary}") if verdict else verdict

    def _shown(self, step_time: StepTime) -> ReportInput:
        """Return what the page of the plan shows: this run, and all that are stored."""
        from pytest_fxbucket.bench.report.page import ReportInput
        from pytest_fxbucket.bench.store import runs_of
        from pytest_fxbucket.compat.pytest_benchmark_storage import storage_folder

        fx, record = fx_session(self.config), step_time.record
        stored, unreadable = runs_of(record, storage_folder(self.config), fx.options.rootdir)
        fx.not_shown += unreadable
        return ReportInput(record, stored, step_time.measured.spans)

    def reportinfo(self) -> tuple[Any, int, str]:
        """Return where the item is from, and what its failure is headed with."""
        return place(self)


def note_fixture(item: pytest.Item) -> None:
    """Let a test that asks for our fixture count as one of pytest-benchmark's."""
    names: list[str] = getattr(item, "fixturenames", [])
    if FIXTURE in names and PLUGIN not in names and item.config.pluginmanager.hasplugin(PLUGIN):
        names.append(PLUGIN)


_MEASURED: pytest.StashKey[bool] = pytest.StashKey()


def measure_in(request: pytest.FixtureRequest, options: Mapping[str, Any]) -> StepTime:
    """What the fixture's function does: measure the plan in use; its bucketed samples are the test's in pytest-benchmark."""
    from pytest_fxbucket.plan.benchmark import benchmark_of

    config, item = request.config, request.node
    if item.stash.get(_MEASURED, False):
        raise BenchmarkError(
            f"{FIXTURE} measures once in a test, since pytest-benchmark has one entry a test; write another one"
        )
    has_plugin = config.pluginmanager.hasplugin(PLUGIN)
    benchmark = request.getfixturevalue(PLUGIN) if has_plugin else None
    if reason := why_not(config, benchmark):
        pytest.skip(f"{FIXTURE}: {reason}")
    run = request.getfixturevalue("fxbucket_run")
    with fx_session(config).progress.watching(FIXTURE):
        step_time: StepTime = run.step_time(benchmark_of(run.plan.checks.benchmark, options))
    item.stash[_MEASURED] = True
    if fx_session(config).is_reporting:
        feed(benchmark, step_time.samples(BUCKETED), info_of(step_time, BUCKETED, test=item.nodeid))
    return step_time


def _timed(request: pytest.FixtureRequest, benchmark: Any) -> None:
    __tracebackhide__ = True
    request.node.time(benchmark)


def _untimed(request: pytest.FixtureRequest) -> None:
    __tracebackhide__ = True
    request.node.time(None)


def feed(benchmark: Any, samples: Sequence[float], extra_info: Mapping[str, Any]) -> None:
    """Let pytest-benchmark's fixture take each of `samples` (seconds) as a round."""
    from pytest_fxbucket.compat.pytest_benchmark_storage import set_timer

    now_s, left = 0.0, iter(samples)

    def slowest_rank() -> float:
        return now_s

    def step() -> None:
        nonlocal now_s
        now_s += next(left, 0.0)  # with --benchmark-cprofile it is called again, when all samples are in

    set_timer(benchmark, slowest_rank)
    benchmark.extra_info.update(extra_info)
    benchmark.pedantic(step, rounds=len(samples), iterations=1)


def info_of(step_time: StepTime, variant: str, test: str = "") -> dict[str, Any]:
    """Return what is kept beside the samples: the whole record with those of the bucketed step, else what they are of.

    `test`: node id of a test whose own measurement it is, which is no stored run of the plan.
    """
    record = step_time.record.to_dict()
    if variant != BUCKETED:
        record = {name: record[name] for name in ("format", "plan", "row")} | {"variant": variant}
    return {"fxbucket": record | ({"test": test} if test else {})}


def why_not(config: pytest.Config, benchmark: Any) -> str:
    """Say why pytest-benchmark would not take samples here; "" if it would. `benchmark`: its fixture, None: it is not there."""
    if benchmark is None:
        return "pytest-benchmark is not there, which keeps the samples; pip install 'pytest-fxbucket[benchmark]'"
    if find_spec("msgspec") is None:
        return "msgspec is not there, which reads what is kept; pip install 'pytest-fxbucket[benchmark]'"
    if benchmark.enabled:
        return ""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ:
        return "pytest-benchmark takes no samples in workers of pytest-xdist; run it with -n 0"
    return "pytest-benchmark takes no samples with --benchmark-disable"
