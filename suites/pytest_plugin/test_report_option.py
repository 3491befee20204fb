"""--fxbucket-report: where pages of step time go; what would fail when the run ends is refused when it begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fxbucket.pytest_plugin.session import fx_session


def report_of(project: pytest.Pytester, *args: str) -> Path | None:
    return fx_session(project.parseconfigure(*args)).options.report


def refused(project: pytest.Pytester, *args: str) -> str:
    result = project.runpytest_inprocess(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in result.stderr.str()
    (line,) = (line for line in result.errlines if line.startswith("ERROR: "))
    return line.removeprefix("ERROR: ")


def test_an_option_is_meant_from_where_pytest_was_started(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report_of(project) is None
    monkeypatch.chdir(project.path / "plans")
    assert report_of(project, "--fxbucket-report=../pages/new") == project.path / "pages" / "new"
    assert not (project.path / "pages").exists()


def test_the_ini_twin_is_meant_from_rootdir(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makeini("[pytest]\nfxbucket_report = pages\n")
    monkeypatch.chdir(project.path / "plans")
    assert report_of(project) == project.path / "pages"
    assert report_of(project, "--fxbucket-report=here") == project.path / "plans" / "here"


def test_a_file_is_no_folder_nor_is_nothing(project: pytest.Pytester) -> None:
    (project.path / "taken").write_text("mine")
    wanted = f"--fxbucket-report: {project.path}/taken is a file; expected a folder, or nothing yet"
    assert refused(project, "--fxbucket-report=taken/deeper/still") == wanted
    assert (project.path / "taken").read_text() == "mine"
    assert refused(project, "--fxbucket-report=").startswith("--fxbucket-report: no folder given; expected where")


def test_a_folder_that_may_not_be_written_to(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so that here the system's answer is given for it."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != project.path)
    wanted = f"--fxbucket-report: {project.path} may not be written to; expected a folder that may"
    assert refused(project, "--fxbucket-report=pages") == wanted


def test_without_plotly_the_run_does_not_begin(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)  # as an import sees a module that is not there
    assert refused(project, "-o", "fxbucket_report=pages") == (
        "ini fxbucket_report: a report needs plotly, which is not installed; install it with "
        "pip install 'pytest-fxbucket[report]'"
    )
