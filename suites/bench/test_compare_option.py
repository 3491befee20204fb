"""--fxbucket-compare: what it names is checked before anything runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.pytest_plugin.saving import storage_folder
from pytest_fxbucket.pytest_plugin.session import fx_session
from suites.bench.storage import KIND, Project


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    """A repository in the folder that pytest runs in, with one stored run."""
    project = Project(pytester.path)
    project.store(1)
    project.git("branch", "speed")
    return project


def compare_of(pytester: pytest.Pytester, *args: str) -> str | None:
    return fx_session(pytester.parseconfigure(*args)).options.compare


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "",
            "--fxbucket-compare: nothing is given; expected latest, a file of pytest-benchmark, or a commit such as *",
        ),
        ("spede", '--fxbucket-compare spede is no commit of *; did you mean "speed"?'),
        ("latset", "--fxbucket-compare latset is no commit of *; did you mean latest?"),
        (
            f".benchmarks/{KIND}/0002_run.json",
            f"--fxbucket-compare: * is not there; did you mean .benchmarks/{KIND}/0001_run.json?",
        ),
        ("none.json", "--fxbucket-compare: none.json is not there"),
        ("-x", '--fxbucket-compare "-x" names no commit; *'),
        ("HEAD~9", "--fxbucket-compare HEAD~9 is no commit of *; HEAD is there, but not that far back"),
        (".benchmarks", "--fxbucket-compare .benchmarks is no commit of *"),
    ],
)
def test_a_bad_value_ends_pytest_with_4_and_one_sentence(
    pytester: pytest.Pytester, project: Project, value: str, sentence: str
) -> None:
    result = pytester.runpytest_inprocess(f"--fxbucket-compare={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])
    assert "Traceback" not in result.stderr.str()


def test_outside_a_repository_only_files_and_latest_can_be_named(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--fxbucket-compare=main")
    result.stderr.fnmatch_lines(["ERROR: * is in no git working tree, so --fxbucket-compare has no commits to look in"])
    assert compare_of(pytester, "--fxbucket-compare=latest") == "latest"


def test_commits_files_and_latest_are_kept(
    pytester: pytest.Pytester, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project.write("sub/speed", "{}")
    assert compare_of(pytester) is None
    assert compare_of(pytester, "--fxbucket-compare=latest") == "latest"
    assert compare_of(pytester, "--fxbucket-compare=speed") == "speed"
    assert compare_of(pytester, f"--fxbucket-compare={project.first[:9]}") == project.first[:9]
    monkeypatch.chdir(file.parent)
    assert compare_of(pytester, "--fxbucket-compare=speed") == str(file)  # a file wins, from where pytest was started


def test_the_ini_file_names_files_from_its_own_folder(
    pytester: pytest.Pytester, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project.write("base.json", "{}")
    project.write("pytest.ini", "[pytest]\nfxbucket_compare = base.json\n")
    monkeypatch.chdir(project.write("sub/x", "").parent)
    assert compare_of(pytester) == str(file)
    assert compare_of(pytester, "--fxbucket-compare=latest") == "latest"


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_on_the_command_line_turns_the_ini_files_off(
    pytester: pytest.Pytester, project: Project, value: str
) -> None:
    project.write("pytest.ini", "[pytest]\nfxbucket_compare = latest\n")
    assert compare_of(pytester) == "latest"
    assert compare_of(pytester, f"--fxbucket-compare={value}") is None
    project.write("pytest.ini", "[pytest]\nfxbucket_compare =\n")
    assert compare_of(pytester) is None


def test_without_the_option_git_is_not_asked(
    pytester: pytest.Pytester, project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compare_of(pytester) is None


class TestStorage:
    def test_it_is_the_folder_that_pytest_benchmark_stores_in(self, pytester: pytest.Pytester) -> None:
        assert storage_folder(pytester.parseconfigure()) == pytester.path / ".benchmarks"
        elsewhere = pytester.parseconfigure("--benchmark-storage=file://./speed")
        assert storage_folder(elsewhere) == pytester.path / "speed"

    def test_runs_that_are_stored_in_a_server_cannot_be_compared(self) -> None:
        class ElasticsearchStorage:
            """Stands for pytest-benchmark's, which needs a server."""

        config = SimpleNamespace(_benchmarksession=SimpleNamespace(storage=ElasticsearchStorage()))
        with pytest.raises(
            BenchmarkError, match="stored runs in ElasticsearchStorage cannot be read; --benchmark-storage must be"
        ):
            storage_folder(config)  # type: ignore[arg-type]  # no whole config

    def test_without_pytest_benchmark_it_says_so(self) -> None:
        with pytest.raises(BenchmarkError, match="stored by pytest-benchmark, which is not there"):
            storage_folder(SimpleNamespace())  # type: ignore[arg-type]  # no whole config
