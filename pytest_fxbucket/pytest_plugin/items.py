"""Plan files become pytest items: one for each check or timed variant, one named ``plan`` for a file that cannot be loaded."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

from pytest_fxbucket.checks.verdict import passed
from pytest_fxbucket.errors import FxbucketError, PlanError
from pytest_fxbucket.pytest_plugin.broken_plan import BrokenPlan, InPlanFile
from pytest_fxbucket.pytest_plugin.distributed_test.item import is_marked
from pytest_fxbucket.pytest_plugin.session import fx_session, key_of
from pytest_fxbucket.pytest_plugin.terminal import error_text, failure_lines
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    from pytest_fxbucket.bench.report.page import ReportInput
    from pytest_fxbucket.bench.step_time import StepTime
    from pytest_fxbucket.checks.verdict import Verdict
    from pytest_fxbucket.plan.load import BrokenRow
    from pytest_fxbucket.plan.rules import Rule
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.schema_checks import Benchmark
    from pytest_fxbucket.run import PlanRun

FIXTURES_WITH_STEPS = frozenset({"fxbucket_check", "fxbucket_benchmark"})
FIXTURES_WITH_RANKS = FIXTURES_WITH_STEPS | {"fxbucket_ranks"}


@dataclass(frozen=True, slots=True)
class PlanRef:
    """A plan by file and matrix id, without having been loaded; the parameter of ``fxbucket_plan``."""

    path: Path
    matrix_id: str | None = None

    def load(self) -> Plan:
        """Return the plan; PlanError if the file cannot be loaded or has no such matrix row."""
        from pytest_fxbucket.plan.load import BrokenRow, load_rows

        found = {row_of(one): one for one in load_rows(self.path)}
        if self.matrix_id not in found:
            known = ", ".join(name for name in found if name) or "none"
            raise PlanError(f"{self.path}: no [[matrix]] row has the id {self.matrix_id!r}; rows there: {known}")
        plan = found[self.matrix_id]
        if isinstance(plan, BrokenRow):
            raise plan.error
        return plan


class PlanFile(pytest.File):
    """A plan file that was named, by option or argument."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield an item for each enabled check of the plan and of each matrix row; one for what cannot be loaded."""
        from pytest_fxbucket.plan.load import BrokenRow, load_rows

        try:
            found = load_rows(self.path)
        except FxbucketError as error:
            yield self._broken("plan", error)
            return
        from pytest_fxbucket.run import item_names

        for plan in found:
            if isinstance(plan, BrokenRow):
                yield self._broken(f"plan[{plan.name}]", plan.error)
                continue
            for name in item_names(plan):
                if name.startswith("benchmark"):
                    yield BenchmarkItem.of(self, name, plan)
                else:
                    yield PlanItem.from_parent(self, name=name, plan=plan)

    def _broken(self, name: str, error: FxbucketError) -> BrokenPlan:
        broken: BrokenPlan = BrokenPlan.from_parent(self, name=name, reason=str(error).replace(f"{self.config.rootpath}/", ""))
        return broken


class OfPlan(InPlanFile):
    """Base of a plan's items: each is of one check, whose verdict is the item's outcome."""

    def __init__(self, *, plan: Plan, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan = plan
        # A name is that of the check, then @ranks or :variant, then the row in brackets.
        self.check, _, variant = self.name.partition("[")[0].partition("@")[0].partition(":")
        self.variant = variant or BUCKETED
        """Which of the timed variants it is of."""
        self.verdict: Verdict | None = None
        self._failed_before = False

    def ask(self, run: PlanRun) -> Verdict:
        """Return the verdict on the item."""
        __tracebackhide__ = True
        return run.check(self.check)

    def run_check(self) -> None:
        """Set the verdict. A failed check fails the item with its lines, an error with its sentence, and a skip is named."""
        __tracebackhide__ = True
        fx = fx_session(self.config)
        if self._failed_before:  # run again, as by pytest-rerunfailures: a new PlanRun traces and runs everything anew
            fx.release(key_of(self.plan))
        # True until the check has ended well, so that an unforeseen error, which is not caught here, counts as well.
        self._failed_before, failure = True, None
        try:
            with fx.progress.watching(self.nodeid):
                self.verdict = self.ask(fx.run_of(self.plan))
            self.user_properties.append(("fxbucket", self.verdict.summary))
            if self.verdict.outcome == "failed":
                failure = "\n".join(failure_lines(self.verdict))
        except FxbucketError as error:
            failure = error_text(error).replace(f"{self.config.rootpath}/", "")
        except pytest.fail.Exception as error:
            # pytest-timeout fails the test wherever it is at that moment: the user's frame says where that was.
            from pytest_fxbucket.user_frame import at_user_frame, is_timeout

            if not is_timeout(error):
                raise
            failure = f"{str(error.msg).rstrip('.')}{at_user_frame(error)}"
        if failure is not None:
            pytest.fail(failure, pytrace=False)
        self._failed_before = False
        if self.verdict is not None and self.verdict.outcome == "skipped":
            pytest.skip(f"{self.name}: {self.verdict.summary}")


class PlanItem(OfPlan):
    """One check of one plan."""

    def runtest(self) -> None:
        """Run the check."""
        __tracebackhide__ = True
        self.run_check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the traceback of an unforeseen error from the check on, without pytest's frames before that."""
        if isinstance(excinfo.value, pytest.fail.Exception):
            return super().repr_failure(excinfo, style)
        excinfo.traceback = excinfo.traceback.cut(path=Path(__file__)).filter(excinfo)
        return super().repr_failure(excinfo, style)


def plan_collector(path: Path, parent: pytest.Collector) -> PlanFile:
    """Return a collector for the plan file at ``path``."""
    rootdir = parent.config.rootpath
    if path.is_relative_to(rootdir):
        return PlanFile.from_parent(parent, path=path)
    # pytest would give every file outside rootdir an empty node id
    return PlanFile.from_parent(parent, path=path, nodeid=Path(os.path.relpath(path, rootdir)).as_posix())


def plan_params(paths: Iterable[Path], rootdir: Path) -> Iterator[tuple[str, PlanRef]]:
    """Yield (test id, PlanRef) for each plan and matrix row; what cannot be loaded gives one, to fail later."""
    from pytest_fxbucket.plan.load import load_rows

    for path in paths:
        shown = Path(os.path.relpath(path, rootdir)).as_posix()
        try:
            rows = [row_of(one) for one in load_rows(path)]
        except FxbucketError:
            rows = [None]
        for row in rows:
            yield f"{shown}-{row}" if row else shown, PlanRef(path, row)


def row_of(one: Plan | BrokenRow) -> str | None:
    """Return the id of a plan's matrix row, or the name of a row that cannot be loaded; None for the plan above the rows."""
    from pytest_fxbucket.plan.load import BrokenRow

    return one.name if isinstance(one, BrokenRow) else one.matrix_id


def needs_ranks(item: pytest.Item) -> bool:
    """Say whether an item will run functions on ranks."""
    if isinstance(item, OfPlan):
        from pytest_fxbucket.checks.registry import ON_RANKS

        return item.check in ON_RANKS
    return is_marked(item) or not FIXTURES_WITH_RANKS.isdisjoint(getattr(item, "fixturenames", ()))


def needs_steps(item: pytest.Item) -> bool:
    """Say whether what an item runs on ranks is a plan's step."""
    return isinstance(item, OfPlan) or not FIXTURES_WITH_STEPS.isdisjoint(getattr(item, "fixturenames", ()))


def is_last_of_plan(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Say whether ``following`` leaves the plan that ``item`` belongs to."""
    if not isinstance(item, OfPlan):
        return False
    return not isinstance(following, OfPlan) or key_of(following.plan) != key_of(item.plan)


# Step time as items of a plan, and as the answer of a fixture; what the ranks measured enters pytest-benchmark as samples.
#
# pytest-benchmark lets one choose the clock by which it times a function. Ours moves only when the timed function is called, by
# the next sample. So a step of many processes is a round like any other in its tables, files, comparisons and histograms.


FIXTURE = "fxbucket_benchmark"
PLUGIN = "benchmark"
"""Name of pytest-benchmark among plugins, and of its fixture."""
BUCKETED = "bucketed"


class BenchmarkItem(OfPlan, pytest.Function):
    """Step time of a variant of a plan: ``benchmark`` of the bucketed step, ``benchmark:unbucketed``, ``benchmark:<pass>``."""

    @classmethod
    def of(cls, parent: pytest.Collector, name: str, plan: Any) -> BenchmarkItem:
        """Return the item called ``name``."""
        has_plugin = parent.config.pluginmanager.hasplugin(PLUGIN)
        # pytest requests fixtures by the arguments of the function: the one with ``benchmark`` needs pytest-benchmark to be
        # there.
        item: BenchmarkItem = cls.from_parent(parent, name=name, plan=plan, callobj=_timed if has_plugin else _untimed)
        if has_plugin:
            item.add_marker(pytest.mark.benchmark(group=parent.nodeid + (f"[{plan.matrix_id}]" if plan.matrix_id else "")))
        return item

    def time(self, benchmark: Any) -> None:
        """Measure, hand the samples to pytest-benchmark, and judge what they are compared with."""
        __tracebackhide__ = True
        if reason := why_not(self.config, benchmark):
            pytest.skip(f"{self.name}: {reason}")
        from pytest_fxbucket.pytest_plugin.saving import count_as_used

        self._benchmark = benchmark
        try:
            self.run_check()
        finally:
            count_as_used(benchmark)

    def ask(self, run: PlanRun) -> Verdict:
        """Return what was measured, judged by what it is compared with."""
        self.verdict = run.check("benchmark")  # set already here: the summary has it even if the comparison raises
        return self._judged(self._benchmark, run) if self.verdict else self.verdict

    def _judged(self, benchmark: Any, run: PlanRun) -> Verdict:
        """Say what was measured; of a bucketed step also how it compares with a stored run, if that was asked for.

        Under torchrun only rank 0 stores samples, so only rank 0 has a stored run to compare with.
        """
        step_time = run.step_time()
        said = passed("benchmark", step_time.summary(self.variant))
        fx = fx_session(self.config)
        if not fx.is_reporting:
            return said
        feed(benchmark, step_time.samples(self.variant), info_of(step_time, self.variant))
        if self.variant != BUCKETED:
            return said
        if fx.options.report is not None:
            # Before it is compared, which may raise; and by item, since pytest-rerunfailures may run it again.
            shown = self._shown(step_time)
            spans = {**shown.spans, **run.simulated_spans()}
            fx.measured[self.nodeid] = replace(shown, spans=spans, stages=run.stages_picture())
        return self._compared(benchmark, step_time, said) if fx.options.compare is not None else said

    def _compared(self, benchmark: Any, step_time: StepTime, said: Verdict) -> Verdict:
        from pytest_fxbucket.bench.compare import verdict_entry, verdict_of
        from pytest_fxbucket.pytest_plugin.saving import storage_folder

        fx = fx_session(self.config)
        options, checks = fx.options, self.plan.checks.benchmark
        assert options.compare is not None
        assert checks, "an item of a check that is on"
        fx.compared_step_times += 1
        benchmark.extra_info.update(verdict_entry(options.compare))  # stays if judging raises, so "latest" passes over this run
        folder = storage_folder(self.config)
        verdict = verdict_of(options.compare, step_time.record, checks.threshold, folder, options.rootdir)
        benchmark.extra_info.update(verdict_entry(options.compare, verdict))
        return replace(verdict, summary=f"{verdict.summary}; {said.summary}") if verdict else verdict

    def _shown(self, step_time: StepTime) -> ReportInput:
        """Return what the page of the plan shows: this run, and all that are stored."""
        from pytest_fxbucket.bench.report.page import ReportInput
        from pytest_fxbucket.bench.store import runs_of
        from pytest_fxbucket.pytest_plugin.saving import storage_folder

        fx, record = fx_session(self.config), step_time.record
        stored, unreadable = runs_of(record, storage_folder(self.config), fx.options.rootdir)
        fx.not_shown += unreadable
        return ReportInput(record, stored, step_time.spans)


def note_fixture(item: pytest.Item) -> None:
    """Let a test that asks for our fixture count as one of pytest-benchmark's."""
    # pytest-benchmark looks for its fixture among the names, as for --benchmark-only; ours requests it only while the test
    # runs.
    names: list[str] = getattr(item, "fixturenames", [])
    if FIXTURE in names and PLUGIN not in names and item.config.pluginmanager.hasplugin(PLUGIN):
        names.append(PLUGIN)


def measure_in(request: pytest.FixtureRequest, options: Mapping[str, Any]) -> StepTime:
    """What the fixture's function does: measure the plan in use; its bucketed samples are the test's in pytest-benchmark."""
    config, item = request.config, request.node
    has_plugin = config.pluginmanager.hasplugin(PLUGIN)
    benchmark = request.getfixturevalue(PLUGIN) if has_plugin else None
    if reason := why_not(config, benchmark):
        pytest.skip(f"{FIXTURE}: {reason}")
    run = request.getfixturevalue("fxbucket_run")
    with fx_session(config).progress.watching(FIXTURE):
        step_time: StepTime = run.step_time(_options_of(run.plan.checks.benchmark, options))
    if fx_session(config).is_reporting:
        feed(benchmark, step_time.samples(BUCKETED), info_of(step_time, BUCKETED, test=item.nodeid))
    return step_time


def _options_of(planned: Benchmark | Literal[False], changes: Mapping[str, object]) -> Benchmark:
    """The plan's options, or the defaults, with ``changes``. Raises PlanError for what no plan may hold."""
    from pytest_fxbucket.plan.schema_checks import Benchmark

    rules = {spec.name: cast("Rule", spec.metadata["rule"]) for spec in fields(Benchmark)}
    for key in changes:
        if key not in rules:
            raise PlanError(f'{FIXTURE} has no argument "{key}"{nearest(key, list(rules))}')
    # Rules read what TOML can give, which has lists and no tuples.
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    read = {key: rules[key].read(value, f"{FIXTURE}: {key}") for key, value in given.items()}
    return replace(planned or Benchmark(), **cast("dict[str, Any]", read))


def _timed(request: pytest.FixtureRequest, benchmark: Any) -> None:
    __tracebackhide__ = True
    request.node.time(benchmark)


def _untimed(request: pytest.FixtureRequest) -> None:
    __tracebackhide__ = True
    request.node.time(None)


def feed(benchmark: Any, samples: Sequence[float], extra_info: Mapping[str, Any]) -> None:
    """Let pytest-benchmark's fixture take each of ``samples`` (seconds) as a round."""
    from pytest_fxbucket.pytest_plugin.saving import set_timer

    now_s, left = 0.0, iter(samples)  # the clock that pytest-benchmark reads, and what each call of step() moves it on by

    def slowest_rank() -> float:
        return now_s

    def step() -> None:
        nonlocal now_s
        now_s += next(left, 0.0)  # with --benchmark-cprofile it is called again, when all samples are in

    set_timer(benchmark, slowest_rank)
    benchmark.extra_info.update(extra_info)
    benchmark.pedantic(step, rounds=len(samples), iterations=1)


def info_of(step_time: StepTime, variant: str, test: str = "") -> dict[str, Any]:
    """Return what is stored beside the samples: of the bucketed step the whole record, of others format, plan, row and variant.

    ``test``: node id of the test that measured by the fixture; its measurement is no stored run of the plan.
    """
    record = step_time.record.to_dict()
    if variant != BUCKETED:
        record = {name: record[name] for name in ("format", "plan", "row")} | {"variant": variant}
    return {"fxbucket": record | ({"test": test} if test else {})}


def why_not(config: pytest.Config, benchmark: Any) -> str:
    """Say why pytest-benchmark would not take samples here; "" if it would. ``benchmark``: its fixture, None if not there."""
    if benchmark is None:
        return "pytest-benchmark is not there, which keeps the samples; pip install 'pytest-fxbucket[benchmark]'"
    if find_spec("msgspec") is None:
        return "msgspec is not there, which reads what is kept; pip install 'pytest-fxbucket[benchmark]'"
    if benchmark.enabled:
        return ""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ:
        return "pytest-benchmark takes no samples in workers of pytest-xdist; run it with -n 0"
    return "pytest-benchmark takes no samples with --benchmark-disable"


# Plan files that no argument of pytest can name, since a path ends there at ``[`` and at ``::``: collected beside arguments.


class PlansBeside:
    """Adds the items of plan files that no argument names, or can name, to those that pytest collects."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """Before others deselect."""
        paths = [path for path in self._paths if not session.isinitpath(path)]
        items += [item for path in paths for item in session.genitems(plan_collector(path, session))]
        return (yield)


def as_arguments(paths: Iterable[Path], base: Path) -> tuple[list[str], list[Path]]:
    """``paths`` as arguments of pytest, started in ``base``, and those of them that no argument can name."""
    # The bracket may be in the name of a folder above ``base``, which a relative path does not have.
    shown = {path: str(path) if can_be_named(str(path)) else os.path.relpath(path, base) for path in paths}
    odd = [path for path, text in shown.items() if not can_be_named(text)]
    return [text for path, text in shown.items() if path not in odd], odd


def can_be_named(nodeid: str) -> bool:
    """Say whether an argument of pytest can name the file whose node id, or path, that is."""
    return "[" not in nodeid and "::" not in nodeid
