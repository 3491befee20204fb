"""The hooks and fixtures of pytest-fxbucket; torch is imported only when an item or a fixture needs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.errors import BenchmarkError, FxbucketError, without_our_frames
from pytest_fxbucket.progress import Progress
from pytest_fxbucket.pytest_plugin.broken_plan import AlwaysChosen
from pytest_fxbucket.pytest_plugin.controller import Controller, WholeFiles
from pytest_fxbucket.pytest_plugin.distributed_test import item as body
from pytest_fxbucket.pytest_plugin.expectations.inline import Expectation, edits_of, expectation_of
from pytest_fxbucket.pytest_plugin.expectations.named import NamedGolden, book_of, explained, texts_of
from pytest_fxbucket.pytest_plugin.items import (
    OfPlan,
    PlanFile,
    PlanRef,
    PlansBeside,
    as_arguments,
    is_last_of_plan,
    measure_in,
    needs_ranks,
    needs_steps,
    note_fixture,
    plan_collector,
    plan_params,
)
from pytest_fxbucket.pytest_plugin.options import add_accept_alias, add_options, close_bare_accept, read_options, reparse
from pytest_fxbucket.pytest_plugin.session import STATE, FxSession, fx_session, key_of
from pytest_fxbucket.pytest_plugin.terminal import error_text, header_lines, wait_printer
from pytest_fxbucket.ranks.torchrun.member import member_of

if TYPE_CHECKING:
    from pytest_fxbucket.bench.step_time import StepTime
    from pytest_fxbucket.checks.verdict import Verdict
    from pytest_fxbucket.passes.registry import Bucketed
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.pytest_plugin.torchrun import Torchrun
    from pytest_fxbucket.ranks.pool import RankPool
    from pytest_fxbucket.run import PlanRun
    from pytest_fxbucket.step.roles import StepGraph

MARKER = "fxbucket_plan(path, id=None): the plan file, from rootdir, that the fxbucket fixtures of this test use"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the table of options and their ini twins."""
    add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Keep a bare accept option from eating a path; then add --accept, if no plugin and no conftest has it."""
    # pytest finds the first conftests by the paths that it has parsed already, and a path behind a bare option is not among
    # them. Conftests add options while this wrapper yields, so whether --accept is free is known only after it.
    if close_bare_accept(args):
        reparse(early_config, parser, args)
    yield
    add_accept_alias(parser, args)


def pytest_configure(config: pytest.Config) -> None:
    """Check the options; where these alone say what to run, plans are."""
    config.addinivalue_line("markers", MARKER)
    config.addinivalue_line("markers", body.MARKER)
    options = read_options(config)
    torchrun = _torchrun(config)
    log_of = torchrun.log_name if torchrun is not None else None
    config.stash[STATE] = FxSession(replace(options, log_of=log_of), torchrun=torchrun)
    # Plans that were asked for on the command line are run alone; an ini file's, beside what pytest would collect by itself.
    if options.plans and config.args_source is not pytest.Config.ArgsSource.ARGS:
        beside: Sequence[Path] = options.plans
        if any(arg.partition("=")[0] == "--fxbucket-plans" for arg in config.invocation_params.args):
            config.args, beside = as_arguments(options.plans, config.invocation_params.dir)
            config.args_source = pytest.Config.ArgsSource.ARGS
        if beside:
            config.pluginmanager.register(PlansBeside(beside), "fxbucket-plans-beside")
    config.pluginmanager.register(AlwaysChosen(), "fxbucket-always-chosen")
    config.pluginmanager.register(WholeFiles(fx_session(config)), "fxbucket-whole-files")
    if not hasattr(config, "workerinput"):
        controller = Controller(fx_session(config))
        config.pluginmanager.register(controller, "fxbucket-controller")
        if options.accept:
            from pytest_fxbucket.pytest_plugin.expectations.rewriting import ExpectationHooks

            config.pluginmanager.register(ExpectationHooks(fx_session(config), controller), "fxbucket-expectations")
    if config.pluginmanager.hasplugin("benchmark"):
        from pytest_fxbucket.pytest_plugin.saving import BenchmarkSaving

        config.pluginmanager.register(BenchmarkSaving(), "fxbucket-saving")
    if config.pluginmanager.hasplugin("timeout"):
        from pytest_fxbucket.pytest_plugin import imports_first

        config.pluginmanager.register(imports_first, "fxbucket-imports-first")
    if config.pluginmanager.hasplugin("xdist") and _named_plans(config):
        from pytest_fxbucket.pytest_plugin import xdist

        config.pluginmanager.register(xdist, "fxbucket-xdist")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say once what is run with what."""
    return list(header_lines(fx_session(config).options, _named_plans(config)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show long waits, now that the terminal reporter is there."""
    fx_session(session.config).progress = Progress(wait_printer(session.config))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> PlanFile | None:
    """Collect a plan file that was named."""
    is_named = file_path.suffix == ".toml" and (parent.session.isinitpath(file_path) or file_path in _named(parent.config))
    return plan_collector(file_path, parent) if is_named else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let pytest-benchmark know tests whose benchmark is ours."""
    note_fixture(item)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that ask for ``fxbucket_plan`` by their marker, or else over the plans."""
    if "fxbucket_plan" not in metafunc.fixturenames or _has_own_plans(metafunc):
        return
    options = fx_session(metafunc.config).options
    if marker := metafunc.definition.get_closest_marker("fxbucket_plan"):
        ref = _marked(marker, options.rootdir, metafunc.definition.nodeid)
        # There is one plan only, and the node id stays that of the function.
        hidden = pytest.param(ref, id=pytest.HIDDEN_PARAM)
        metafunc.parametrize("fxbucket_plan", [hidden], indirect=True, scope="session")
    elif options.plans:
        params = list(plan_params(options.plans, options.rootdir))
        refs, ids = [ref for _, ref in params], [name for name, _ in params]
        # pytest runs tests that share a parameter of session scope side by side, so each plan is set up once.
        metafunc.parametrize("fxbucket_plan", refs, indirect=True, ids=ids, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse to accept inline expectations in several processes; after others have deselected."""
    if fx_session(config).options.accept:
        from pytest_fxbucket.pytest_plugin.expectations.rewriting import note_sources, refuse_workers

        refuse_workers(config, items)
        note_sources(fx_session(config), items)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Say what differs from a golden, in words and as a diff, and how to accept it."""
    lines = explained(left, right) if op in ("==", "!=") else None
    return list(lines) if lines else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the ranks' fork server now, so that it imports torch while this process does."""
    on_ranks: list[pytest.Item] = (
        [] if session.config.option.collectonly else [item for item in session.items if needs_ranks(item)]
    )
    if on_ranks:
        fx = fx_session(session.config)
        fx.has_steps_on_ranks = any(map(needs_steps, on_ranks))
        fx.pools.start()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test that is marked for ranks and cannot run there; after pytest's own hook for skips, before any fixture."""
    body.check(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test that is marked for ranks there."""
    __tracebackhide__ = True
    if not body.is_marked(pyfuncitem):
        return None
    body.run_body(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that changed a graph that it was given: checks and tests after it would compare with that one."""
    __tracebackhide__ = True
    yield
    if "fxbucket_run" in getattr(item, "fixturenames", ()):
        with _sentences():
            fx_session(item.config).refuse_changes()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let go of a plan's graphs after its last item, so that memory stays flat; and of GPUs that another run waits for."""
    fx_session(item.config).give_back_gpus()
    if isinstance(item, OfPlan) and is_last_of_plan(item, nextitem):
        fx_session(item.config).release(key_of(item.plan))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what the controller needs, as plain data: it is all that survives a worker that dies."""
    report = yield
    fx = fx_session(item.config)
    if call.excinfo is not None and report.failed and isinstance(call.excinfo.value, FxbucketError):
        # A user's test raised it, so pytest shows its sentence with the test. What ranks did is longer and gets its own
        # section.
        text = error_text(call.excinfo.value)
        report.sections += [("what the ranks did", text)] if "\n" in text else []
    # pytest-xdist sends reports as their attributes, so what is put on one must be plain data to reach the controller.
    sent: dict[str, Any] = dict(fx.drain())
    sent |= edits_of(item) | texts_of(item, report)
    # A skip is raised in our code, which says nothing to a user: the summary shows the test or the plan file as its place.
    if body.is_marked(item) and report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, report.longrepr[2])
    if isinstance(item, OfPlan) and call.when == "call":
        sent |= {"sizes": fx.sizes_of(item.plan), "note": item.verdict.summary if item.verdict else None}
        if report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (str(item.path), 1, report.longrepr[2])
    if sent:
        vars(report)["fxbucket"] = sent
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every rank."""
    if (fx := config.stash.get(STATE, None)) is not None:
        fx.close()


@pytest.fixture(scope="session")
def fxbucket_plan(request: pytest.FixtureRequest) -> Plan:
    """The Plan this test is parametrized with, by --fxbucket-plans, its marker, or its own parametrize (a path)."""
    param = getattr(request, "param", None)
    if param is None:
        pytest.fail(
            "fxbucket_plan: no plan is given; use --fxbucket-plans=PATH, or mark the test with "
            "@pytest.mark.fxbucket_plan('path/from/rootdir.toml')",
            pytrace=False,
        )
    with _sentences():
        return (param if isinstance(param, PlanRef) else PlanRef(request.config.rootpath / param)).load()


@pytest.fixture(scope="session")
def fxbucket_run(request: pytest.FixtureRequest, fxbucket_plan: Plan) -> Iterator[PlanRun]:
    """The PlanRun of ``fxbucket_plan``, shared by the tests of that plan; traces and runs nothing by itself."""
    fx = fx_session(request.config)
    with _sentences():
        run = fx.run_of(fxbucket_plan)
    yield run
    fx.release(key_of(fxbucket_plan))


@pytest.fixture(scope="session")
def fxbucket_graph(request: pytest.FixtureRequest, fxbucket_run: PlanRun) -> StepGraph:
    """The traced step of ``fxbucket_plan``, before the pass."""
    with _sentences(), fx_session(request.config).progress.watching("fxbucket_graph"):
        return fxbucket_run.step


@pytest.fixture(scope="session")
def fxbucket_bucketed(request: pytest.FixtureRequest, fxbucket_run: PlanRun) -> Bucketed:
    """What the pass made of the step: ``.graph_module`` and ``.report``."""
    with _sentences(), fx_session(request.config).progress.watching("fxbucket_bucketed"):
        return fxbucket_run.bucketed


@pytest.fixture(scope="session")
def fxbucket_check(request: pytest.FixtureRequest, fxbucket_run: PlanRun) -> Callable[[str], Verdict]:
    """A function that runs one check by name and returns its Verdict; FxbucketError if it could not be run."""

    @without_our_frames
    def check(name: str) -> Verdict:
        with fx_session(request.config).progress.watching(name):
            return fxbucket_run.check(name)

    return check


@pytest.fixture
def fxbucket_benchmark(request: pytest.FixtureRequest, fxbucket_run: PlanRun) -> Callable[..., StepTime]:
    """A function that times the plan's step on its ranks and returns its StepTime; the samples go to pytest-benchmark.

    Its keyword arguments are those of ``[checks] benchmark``: threshold, precision, budget_s, against; left out: the plan's.
    Without pytest-benchmark, and where that takes no samples, the test is skipped.
    """

    measured: list[StepTime] = []  # of this attempt at the test, which pytest-rerunfailures may run again

    @without_our_frames
    def measure(**options: object) -> StepTime:
        if measured:
            raise BenchmarkError(
                "fxbucket_benchmark measures once in a test, since pytest-benchmark has one entry a test; write another one"
            )
        measured.append(measure_in(request, options))
        return measured[0]

    return measure


@pytest.fixture
def fxbucket_golden(request: pytest.FixtureRequest) -> Callable[..., NamedGolden]:
    """A function ``(name, plan=None)`` that gives a golden of this test's file: ``assert graph == fxbucket_golden("name")``.

    ``plan`` groups parameters into entries, as ``[bucket] plan`` does, instead of by module or by the plan in use.
    """
    return book_of(request).golden


@pytest.fixture
def fxbucket_expect(request: pytest.FixtureRequest) -> Expectation:
    """A function ``(actual, expected)`` that compares the text of a graph with a literal, which the accept option rewrites."""
    if fx_session(request.config).options.accept:
        from pytest_fxbucket.pytest_plugin.expectations.rewriting import refuse_worker

        refuse_worker(request.config, request.node.nodeid)
    return expectation_of(request)


@pytest.fixture(scope="session")
def fxbucket_ranks(request: pytest.FixtureRequest) -> Callable[..., RankPool]:
    """A function ``(world, backend="gloo")`` that returns the session's warm RankPool of that size."""
    return fx_session(request.config).pools.get


@pytest.fixture
def fxbucket_rank(request: pytest.FixtureRequest) -> object:
    """In a test marked ``fxbucket_ranks``: the number of the rank that runs the body, an int."""
    return body.per_rank(request, "rank")


@pytest.fixture
def fxbucket_mesh(request: pytest.FixtureRequest) -> object:
    """In a test marked ``fxbucket_ranks``: a DeviceMesh over all ranks, of one dimension ``dp_shard`` or as the marker says."""
    return body.per_rank(request, "mesh")


@contextmanager
def _sentences() -> Iterator[None]:
    """Let a FxbucketError in the block fail the test with its sentence alone, without a traceback."""
    try:
        yield
    except FxbucketError as error:
        raise pytest.fail.Exception(error_text(error), pytrace=False) from None


def _torchrun(config: pytest.Config) -> Torchrun | None:
    """Register and return the hooks for a process of torchrun; None if torchrun did not start this process."""
    try:
        member = member_of()
    except FxbucketError as error:
        raise pytest.UsageError(str(error)) from None
    if member is None:
        return None
    from pytest_fxbucket.pytest_plugin.torchrun import Torchrun

    hooks = Torchrun(config, member)
    config.pluginmanager.register(hooks, "fxbucket-torchrun")
    return hooks


def _named_plans(config: pytest.Config) -> int:
    """Return how many plan files the option and the arguments name."""
    return len(_named(config) | set(fx_session(config).options.plans))


def _named(config: pytest.Config) -> set[Path]:
    """Return the plan files that arguments name: also those that pytest passes over, since another argument is their folder."""
    files = (arg.partition("::")[0] for arg in config.args)
    return {Path(os.path.normpath(config.invocation_params.dir / file)) for file in files if file.endswith(".toml")}


def _has_own_plans(metafunc: pytest.Metafunc) -> bool:
    """Say whether the test parametrizes ``fxbucket_plan`` itself."""
    names = (
        marker.args[0] if marker.args else marker.kwargs.get("argnames", ())
        for marker in metafunc.definition.iter_markers("parametrize")
    )
    return any("fxbucket_plan" in (map(str.strip, name.split(",")) if isinstance(name, str) else name) for name in names)


def _marked(marker: pytest.Mark, rootdir: Path, nodeid: str) -> PlanRef:
    """Return what the marker names; an error of collection, one sentence, if it was not given a path and perhaps an id."""
    unknown = sorted(set(marker.kwargs) - {"path", "id"})
    given = dict(zip(("path", "id"), marker.args, strict=False)) | dict(marker.kwargs)
    if unknown or len(marker.args) > 2 or not isinstance(given.get("path"), str):
        raise pytest.Collector.CollectError(
            f"{nodeid}: expected @pytest.mark.{MARKER.partition(':')[0]}, got {marker.args} {marker.kwargs}"
        )
    return PlanRef(rootdir / given["path"], given.get("id"))
