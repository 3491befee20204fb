"""Goldens with pytest-xdist and without: the same verdicts and the same files, also when a worker dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fxbucket.golden.store import render
from suites.pytest_plugin.golden_project import PLANS, files, make_project, make_tests, put

NEW, OLD = render("new").encode(), render("old").encode()
# a: as it was, b: changed, c: missing; nobody owns the golden of a plan that is gone.
TESTS = {
    "test_a": "def test_a(golden):\n    golden('a', 'old\\n')\n",
    "test_b": "def test_b(golden):\n    golden('b', 'new\\n')\n",
    "test_c": "def test_c(golden):\n    golden('c', 'new\\n')\n",
    "test_d": "def test_d(golden):\n    assert False\n",
}
WITHOUT_XDIST = "import sys; sys.modules['xdist'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
WAYS = ("-n2", "not installed")


@pytest.fixture
def goldens(pytester: pytest.Pytester) -> Path:
    folder = make_tests(pytester, **TESTS)
    put(folder / "test_a", a="old")
    put(folder / "test_b", b="old")
    put(folder / "plans", gone="old")
    return folder


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, way: str, *args: str) -> pytest.RunResult:
    if way == "not installed":
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        return pytester.run(sys.executable, "-c", WITHOUT_XDIST, "-p", "pytest_fxbucket.pytest_plugin.plugin", *args)
    pytest.importorskip("xdist", reason="-n needs pytest-xdist")
    return pytester.runpytest_inprocess(way, *args)


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_run_give_the_same_verdicts_and_files(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, goldens: Path, way: str
) -> None:
    compared = run(pytester, monkeypatch, way)
    compared.assert_outcomes(passed=1, failed=3)
    compared.stdout.fnmatch_lines(["golden that nobody owns: golden/plans/gone.txt (plans/gone.toml is not there)"])
    assert files(goldens) == {"test_a/a.txt": OLD, "test_b/b.txt": OLD, "plans/gone.txt": OLD}
    accepted = run(pytester, monkeypatch, way, "--accept", "--fxbucket-prune")
    accepted.assert_outcomes(passed=3, failed=1)
    assert accepted.ret == pytest.ExitCode.TESTS_FAILED
    said = [line for line in accepted.outlines if line.startswith(("golden written", "golden removed", "golden NOT"))]
    assert said == [
        "golden written: golden/test_b/b.txt",
        "golden written: golden/test_c/c.txt",
        "golden removed: golden/plans/gone.txt",
    ]
    assert files(goldens) == {"test_a/a.txt": OLD, "test_b/b.txt": NEW, "test_c/c.txt": NEW}


class TestWorkers:
    @pytest.fixture(autouse=True)
    def _xdist(self) -> None:
        pytest.importorskip("xdist", reason="-n needs pytest-xdist")

    def test_a_worker_that_dies_costs_its_item_and_no_golden(self, pytester: pytest.Pytester, goldens: Path) -> None:
        dies = "import os\ndef test_dies(golden):\n    golden('b', 'new\\n')\n    os.kill(os.getpid(), 9)\n"
        pytester.makepyfile(test_b2=dies)
        result = pytester.runpytest_inprocess("-n1", "--accept")
        result.assert_outcomes(passed=3, failed=2)
        result.stdout.fnmatch_lines(["*worker 'gw0' crashed while running 'test_b2.py::test_dies'*"])
        after = {"test_a/a.txt": OLD, "test_b/b.txt": NEW, "test_c/c.txt": NEW, "plans/gone.txt": OLD}
        assert files(goldens) == after, "all that others accepted, and nothing of the one that died"

    def test_what_was_accepted_before_the_first_failure_is_written(self, pytester: pytest.Pytester, goldens: Path) -> None:
        result = pytester.runpytest_inprocess("-n1", "--accept", "-x", no_reraise_ctrlc=True)
        result.assert_outcomes(passed=3, failed=1)
        result.stdout.fnmatch_lines(["golden written: golden/test_b/b.txt", "golden written: golden/test_c/c.txt"])
        assert (goldens / "test_c" / "c.txt").read_bytes() == NEW

    def test_an_interrupted_worker_interrupts_the_run(self, pytester: pytest.Pytester, goldens: Path) -> None:
        pytester.makepyfile(test_d="def test_d(): raise KeyboardInterrupt\n")
        result = pytester.runpytest_inprocess("-n1", "--accept", no_reraise_ctrlc=True)
        assert result.ret == pytest.ExitCode.INTERRUPTED
        result.stdout.fnmatch_lines(["golden NOT written: 2 accepted, but the run was interrupted"])
        assert files(goldens) == {"test_a/a.txt": OLD, "test_b/b.txt": OLD, "plans/gone.txt": OLD}


@pytest.mark.usefixtures("warm")
def test_plans_are_accepted_by_workers_too(pytester: pytest.Pytester) -> None:
    """One plan that changed, one whose golden is missing, one that cannot be loaded."""
    pytest.importorskip("xdist", reason="-n needs pytest-xdist")
    goldens = make_project(pytester, "changed", "missing")
    (pytester.path / "plans" / "broken.toml").write_text("[modle]\n")
    put(goldens, changed="old", broken="old", gone="old")
    result = pytester.runpytest_subprocess(PLANS, "--accept", "--fxbucket-prune", "-n2")
    result.assert_outcomes(passed=2, failed=1)
    said = result.stdout.str().partition("= fxbucket =")[2].partition("FAILED")[0].splitlines()
    said = [line for line in said if line.startswith(("golden", "plans"))]
    after = files(goldens)
    assert sorted(after) == ["broken.txt", "changed.txt", "missing.txt"]
    assert after["broken.txt"] == OLD != after["changed.txt"]
    assert said[-3:] == [
        "golden written: golden/plans/changed.txt",
        "golden written: golden/plans/missing.txt",
        "golden removed: golden/plans/gone.txt",
    ]
