"""Start-up: whoever has the plugin installed and runs something else must not pay for torch."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.pools import Pools

REPORT = """
import sys

def pytest_unconfigure(config):
    print("torch imported:", "torch" in sys.modules)
    rooms = {name.split(".")[1] for name in sys.modules if name.startswith("pytest_fxbucket.")}
    print("rooms of work:", *sorted(rooms & {"capture", "explain", "graph", "passes", "plan", "run", "step"}))
"""


@pytest.mark.parametrize(
    ("args", "ret"),
    [
        (["--fxbucket-plans=plans", "--fxbucket-pass=torch", "--collect-only"], 0),
        (["test_a.py", "plans/broken.toml", "--fxbucket-plans=plans/good.toml"], 1),
    ],
)
def test_torch_is_imported_only_when_a_check_runs(project: pytest.Pytester, args: list[str], ret: int) -> None:
    project.makeconftest(REPORT)
    project.makepyfile(test_a="def test_plan(fxbucket_plan): pass")
    result = project.runpytest_subprocess(*args, "-s")
    assert result.ret == ret
    result.stdout.fnmatch_lines(["*torch imported: False"])


def test_a_run_without_plans_imports_nothing_that_reads_or_runs_them(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(REPORT)
    pytester.makepyfile("def test_other(): pass")
    pytester.runpytest_subprocess("-s").stdout.fnmatch_lines(["torch imported: False", "rooms of work:"])


WARM = """
from pytest_fxbucket.pytest_plugin.session import fx_session

def pytest_runtestloop(session):
    print("before ranks are forked:", *fx_session(session.config).pools._warm)
    return True
"""


@pytest.mark.parametrize(
    ("asked", "has_steps"), [("plans/plain.toml::bitwise", True), ("test_check.py", True), ("test_ranks.py", False)]
)
def test_what_steps_need_is_imported_once_and_not_by_each_rank(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, asked: str, has_steps: bool
) -> None:
    monkeypatch.setattr(Pools, "start", lambda self: None)  # no ranks are to be forked, and other tests fork theirs
    project.makeconftest(WARM)
    project.makepyfile(
        test_check="""
        import pytest

        @pytest.mark.fxbucket_plan("plans/plain.toml")
        def test_a(fxbucket_check): pass
        """,
        test_ranks="def test_b(fxbucket_ranks): pass",
    )
    (told,) = [line for line in project.runpytest_inprocess("-s", asked).outlines if line.startswith("before ")]
    assert ("pytest_fxbucket.eager.job" in told) is has_steps
