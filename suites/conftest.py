"""What every suite has: pytester, for runs of pytest within a test, and none of the settings of whoever runs the suites."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from pytest_fxbucket.eager import WARM
from pytest_fxbucket.ranks.pools import Pools
from suites.warm.runs import WarmRuns, of_pytester

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    """Where CI is set, accepting goldens asks for more, and pytest shows more; before fixtures of any scope.

    Models are small, so a second thread would do no work and wait for the first on a core of its own.
    """
    os.environ.pop("CI", None)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Nothing may hang on the clock: ranks of other tests take the cores while numbers are drawn.
    settings.register_profile("suites", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suites")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The dearest tests first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("zoo", "soak"))


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """One set of warm pools for all tests of a process; each rank would import FSDP2 and jobs anew, in a second."""
    pools = Pools(warm=(*WARM, "fixtures.reference.by_torch"))
    yield pools
    pools.close()


@pytest.fixture(scope="session", autouse=True)
def _operators() -> None:
    """What registers operators, once: pytester forgets the modules that a test imports, and the next one would do it again."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("pytest_fxbucket.captured_plan")


@pytest.fixture(scope="session")
def warm_runs() -> Iterator[WarmRuns]:
    """Runs of Python that need not import torch."""
    runs = WarmRuns()
    yield runs
    runs.close()


@pytest.fixture
def warm(warm_runs: WarmRuns, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pytester.runpytest_subprocess`` starts such runs."""
    monkeypatch.setattr(pytester, "popen", of_pytester(warm_runs, pytester))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C and SIGHUP are heeded here and by what a test starts, also where a shell or nohup has the suites ignore them."""
    heeding = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heeding.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _bytecode_of_ours_alone() -> None:
    """What was collected is compiled for all processes that tests start; what tests write may change within a second."""
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True


@pytest.fixture(autouse=True, scope="module")
def _walked_once() -> Iterator[None]:
    """What a module leaves for the rest of the run (graphs, imports) the collector need not walk again: 2 s each time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fewer_plugins_within(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run within a run would import hypothesis and trio anew, in 1 s."""
    is_within = "pytester" in request.fixturenames
    if is_within:
        request.getfixturevalue("pytester")  # which forgets what is set before it is made
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    if is_within:
        # A run within a run is no worker, where the outer one is; pytest-benchmark would take it for one.
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
