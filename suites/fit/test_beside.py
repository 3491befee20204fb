"""Plugins that people have beside ours change nothing but what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from suites.fit.project import plan_of, write
from suites.warm.runs import WarmRuns

ROOT = Path(__file__).parents[2]
BESIDE = ROOT / ".venv" / "beside"
FLAKY = """
from pathlib import Path

from mytrainer.net import build as build_net


def build(layers):
    tried = Path(__file__).with_name("tried")
    if not tried.exists():
        tried.touch()
        raise OSError("the disk is away for a moment")
    return build_net(layers)
"""
HANGS = """
import signal


def build(layers):
    signal.raise_signal(signal.SIGALRM)  # what pytest-timeout waits for, at once
"""


ENDS_AT_THE_FIRST = """
import sys

import pytest


def pytest_runtest_logstart(nodeid, location):
    pytest.exit(f"torch and its compiler are there: {'torch' in sys.modules and 'torch._dynamo' in sys.modules}")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    plans = {f"plans__{name}": plan_of(name, "same", "eager") for name in ("net", "flaky", "hangs")}
    write(tmp_path, mytrainer__flaky=FLAKY, mytrainer__hangs=HANGS, **plans)
    return tmp_path


def variables_of(project: Path, *, beside: bool) -> dict[str, str]:
    paths = [str(ROOT), *([str(BESIDE)] if beside else [])]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "COLUMNS": "160",
        "COVERAGE_FILE": str(project / "coverage"),
    }
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        variables.pop(name, None)
    return variables


def run(runs: WarmRuns, project: Path, *words: str, beside: bool = True) -> tuple[dict[str, str], str]:
    """Outcome of each item, and what was printed; ``beside`` the plugins are there."""
    report = project / "report.xml"
    said = runs.run(["-m", "pytest", f"--junitxml={report}", *words], project, variables_of(project, beside=beside))
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        outcomes[f"{case.get('classname')}.{case.get('name')}"] = next(
            (child.tag for child in case if child.tag != "properties"), "passed"
        )
    return outcomes, said.stdout


def test_outcomes_and_goldens_are_those_without_them(project: Path, warm_runs: WarmRuns) -> None:
    plan, golden = "--fxbucket-plans=plans/net.toml", project / "golden" / "plans" / "net.txt"
    outcomes, _ = run(warm_runs, project, plan, "--fxbucket-accept=all", beside=False)
    assert len(outcomes) == 4
    assert set(outcomes.values()) == {"passed"}
    written = golden.read_bytes()
    golden.unlink()
    them = ("--count=2", "--reruns=1", "--timeout=600", "--cov=mytrainer", "--force-sugar")
    beside, said = run(warm_runs, project, plan, "--fxbucket-accept=all", *them)
    assert beside == outcomes
    assert golden.read_bytes() == written
    for plugin in ("sugar", "rerunfailures", "repeat", "randomly", "timeout", "cov"):
        assert f" {plugin}-" in said
    assert "mytrainer/net.py" in said  # covered
    on_a_worker, _ = run(warm_runs, project, plan, *them, "-n1")
    assert on_a_worker == outcomes


def test_a_plan_that_fails_once_is_tried_again_from_the_beginning(project: Path, warm_runs: WarmRuns) -> None:
    outcomes, said = run(
        warm_runs, project, "--fxbucket-plans=plans/flaky.toml", "--reruns=1", "-p", "no:randomly", "-k", "audit"
    )
    assert set(outcomes.values()) == {"passed"}
    assert " 1 passed, " in said
    assert ", 1 rerun in " in said


def test_a_timeout_names_where_the_users_code_was(project: Path, warm_runs: WarmRuns) -> None:
    _, said = run(warm_runs, project, "--fxbucket-plans=plans/hangs.toml", "--timeout=600", "-k", "audit")
    assert "Timeout (>600.0s) from pytest-timeout at mytrainer/hangs.py:6 in build\n" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("beside", [False, True])
def test_torch_is_imported_before_the_clock_of_the_first_item_runs(beside: bool, project: Path) -> None:
    """In a process of its own, since others have torch already."""
    project.joinpath("conftest.py").write_text(ENDS_AT_THE_FIRST)
    variables = variables_of(project, beside=beside)
    words = [sys.executable, "-m", "pytest", "--fxbucket-plans=plans/net.toml", "-p", "no:cacheprovider"]
    said = subprocess.run(words, cwd=project, env=variables, capture_output=True, text=True, check=False).stdout
    assert f"torch and its compiler are there: {beside}" in said


def test_a_plan_below_another_rootdir_finds_its_own_code(
    project: Path, tmp_path_factory: pytest.TempPathFactory, warm_runs: WarmRuns
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    words = (f"--rootdir={elsewhere}", f"--fxbucket-plans={project}/plans/net.toml", "-k", "not golden")
    outcomes, _ = run(warm_runs, elsewhere, *words, beside=False)
    assert len(outcomes) == 3
    assert set(outcomes.values()) == {"passed"}
