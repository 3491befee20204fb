"""Accepting: all that a run accepts is written at its end, by one process; nothing that somebody else did meanwhile is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.golden.store import FORMAT, render
from suites.pytest_plugin.golden_project import files, make_tests, put

THREE = """
import pytest

@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_it(name, golden):
    golden(name, "new\\n")
"""
OLD, NEW = render("old\n").encode(), render("new\n").encode()


@pytest.fixture
def goldens(pytester: pytest.Pytester) -> Path:
    """The folder of the goldens of test_three.py, where a and b are what they were and c is missing."""
    folder = make_tests(pytester, test_three=THREE) / "test_three"
    put(folder, a="old\n", b="old\n")
    return folder


def hook(pytester: pytest.Pytester, source: str) -> None:
    """Add a hook that does something beside the run, as somebody else would."""
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(source)


class TestWriting:
    def test_all_that_a_run_accepts_is_written_in_one_go(self, pytester: pytest.Pytester, goldens: Path) -> None:
        """And what is replaced keeps its mode."""
        (goldens / "a.txt").chmod(0o640)
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == 0
        result.stdout.fnmatch_lines([f"golden written: golden/test_three/{name}.txt" for name in "abc"])
        assert files(goldens) == {"a.txt": NEW, "b.txt": NEW, "c.txt": NEW}
        assert (goldens / "a.txt").stat().st_mode & 0o777 == 0o640
        pytester.runpytest_inprocess().assert_outcomes(passed=3)

    def test_goldens_of_tests_that_were_not_run_are_untouched(self, pytester: pytest.Pytester, goldens: Path) -> None:
        assert pytester.runpytest_inprocess("--accept", "--deselect=test_three.py::test_it[b]").ret == 0
        assert files(goldens) == {"a.txt": NEW, "b.txt": OLD, "c.txt": NEW}

    def test_what_was_accepted_before_a_first_failure_is_written(self, pytester: pytest.Pytester, goldens: Path) -> None:
        (pytester.path / "test_three.py").write_text(THREE + "    assert name != 'b'\n")
        assert pytester.runpytest_inprocess("--accept", "-x").ret == pytest.ExitCode.TESTS_FAILED
        assert files(goldens) == {"a.txt": NEW, "b.txt": NEW}

    def test_what_a_killed_run_left_is_cleaned_up_by_the_next_that_accepts(
        self, pytester: pytest.Pytester, goldens: Path
    ) -> None:
        (goldens / ".fxbucket-ab_cd012.tmp").write_bytes(NEW[:20])
        (goldens / ".fxbucket-notes").write_bytes(b"mine")
        pytester.runpytest_inprocess()
        assert ".fxbucket-ab_cd012.tmp" in files(goldens)
        pytester.runpytest_inprocess("--accept")
        assert sorted(files(goldens)) == [".fxbucket-notes", "a.txt", "b.txt", "c.txt"]


class TestInterrupts:
    @pytest.mark.parametrize(
        ("line", "status"),
        [
            ("raise KeyboardInterrupt", pytest.ExitCode.INTERRUPTED),
            ("pytest.exit('enough', returncode=0)", 0),
        ],
    )
    def test_an_interrupted_run_writes_nothing_and_says_so(
        self, pytester: pytest.Pytester, goldens: Path, line: str, status: int
    ) -> None:
        (pytester.path / "test_three.py").write_text(THREE + f"    if name == 'c': {line}\n")
        result = pytester.runpytest_inprocess("--accept", no_reraise_ctrlc=True)
        assert result.ret == status
        result.stdout.fnmatch_lines(["golden NOT written: 2 accepted, but the run was interrupted"])
        assert files(goldens) == {"a.txt": OLD, "b.txt": OLD}

    def test_a_crash_of_pytest_itself_writes_nothing_and_says_so(self, pytester: pytest.Pytester, goldens: Path) -> None:
        hook(pytester, "\ndef pytest_runtest_logfinish(nodeid): assert '[b]' not in nodeid\n")
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == pytest.ExitCode.INTERNAL_ERROR
        result.stdout.fnmatch_lines(["golden NOT written: 2 accepted, but the run was interrupted"])
        assert files(goldens) == {"a.txt": OLD, "b.txt": OLD}


IN_THREE = "folder = session.path / 'golden/test_three'"
SINCE_THE_START = f"""
def pytest_runtestloop(session):
    {IN_THREE}
    (folder / "a.txt").write_text("theirs")
    (folder / "b.txt").unlink()
    (folder / "linked.txt").unlink()
    (folder / "linked.txt").symlink_to("other.txt")
"""
IN_THE_END = f"""
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    {IN_THREE}
    (folder / "a.txt").unlink()
    (folder / "c.txt").write_text("theirs")
"""


class TestMeanwhile:
    def test_what_somebody_else_did_to_goldens_since_the_start_is_kept(self, pytester: pytest.Pytester, goldens: Path) -> None:
        put(goldens, linked="old\n", other="old\n")
        (pytester.path / "test_three.py").write_text(THREE.replace('"c"]', '"linked", "other"]'))
        hook(pytester, SINCE_THE_START)
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        said = "golden NOT written: golden/test_three/"
        result.stdout.fnmatch_lines_random(
            [
                f"{said}a.txt was changed since the run began*",
                f"{said}b.txt was removed since the run began*",
                f"{said}linked.txt is a symbolic link*",
            ]
        )
        assert (goldens / "linked.txt").is_symlink()
        assert files(goldens) == {"a.txt": b"theirs", "linked.txt": NEW, "other.txt": NEW}

    def test_a_golden_that_vanishes_or_appears_after_it_was_compared_is_left_so(
        self, pytester: pytest.Pytester, goldens: Path
    ) -> None:
        hook(pytester, IN_THE_END)
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        said = "golden NOT written: golden/test_three/{}.txt {} since the run began, so it is left alone; *"
        result.stdout.fnmatch_lines_random([said.format("a", "was removed"), said.format("c", "was written by somebody else")])
        assert files(goldens) == {"b.txt": NEW, "c.txt": b"theirs"}

    def test_a_golden_that_somebody_else_has_accepted_alike_is_no_problem(
        self, pytester: pytest.Pytester, goldens: Path
    ) -> None:
        write = f"(session.path / 'golden/test_three/a.txt').write_bytes({NEW!r})"
        hook(pytester, f"\n@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish(session):\n    {write}\n")
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == 0
        result.stdout.no_fnmatch_line("*golden/test_three/a.txt*")


IN_THE_WAY = {
    "read_only": "is read-only; make it writable first: chmod u+w golden/*",
    "folder": "is a folder, where a golden's file was expected; move it away",
    "link": "is a symbolic link, and goldens are written to no other place; *",
    "newer": "was written by a newer pytest-fxbucket (format 99, this one reads *",
}


class TestInTheWay:
    def test_what_must_not_be_replaced_is_one_sentence_and_stays(self, pytester: pytest.Pytester, goldens: Path) -> None:
        put(goldens, read_only="old\n")
        (goldens / "read_only.txt").chmod(0o444)
        (goldens / "folder.txt").mkdir()
        target = pytester.path / "elsewhere.txt"
        target.write_bytes(OLD)
        (goldens / "link.txt").symlink_to(target)
        (goldens / "newer.txt").write_bytes(OLD.replace(b"golden %d" % FORMAT, b"golden 99"))
        before = files(goldens)
        names = ["a", *IN_THE_WAY, "c"]
        (pytester.path / "test_three.py").write_text(THREE.replace('["a", "b", "c"]', str(names)))
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=len(names))
        said = [f"golden NOT written: golden/test_three/{name}.txt {sentence}" for name, sentence in IN_THE_WAY.items()]
        result.stdout.fnmatch_lines_random([*said, "golden written: golden/test_three/a.txt"])
        assert files(goldens) == before | {"a.txt": NEW, "c.txt": NEW}
        assert (target.read_bytes(), (goldens / "folder.txt").is_dir()) == (OLD, True)

    def test_a_folder_that_is_a_link_is_not_written_into(self, pytester: pytest.Pytester, goldens: Path) -> None:
        elsewhere = goldens.rename(pytester.path / "elsewhere")
        goldens.symlink_to(elsewhere)
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        said = "golden NOT written: golden/test_three is a symbolic link, and goldens are written to no other *"
        result.stdout.fnmatch_lines([said])
        assert files(elsewhere) == {"a.txt": OLD, "b.txt": OLD}

    @pytest.mark.usefixtures("warm")
    def test_a_disk_that_is_full_keeps_the_old_golden_and_leaves_no_litter(
        self, pytester: pytest.Pytester, goldens: Path
    ) -> None:
        large = "golden(name, 'x' * 300_000 + '\\n' if name == 'b' else 'new\\n')"
        (pytester.path / "test_three.py").write_text(THREE.replace('golden(name, "new\\n")', large))
        limit = "import resource\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish():\n    "
        hook(pytester, "\n" + limit + "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n")
        result = pytester.runpytest_subprocess("--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["golden NOT written: golden/test_three/b.txt could not be written: File too large"])
        assert files(goldens) == {"a.txt": NEW, "b.txt": OLD, "c.txt": NEW}

    def test_a_file_where_the_golden_folder_is_meant_to_be_is_a_usage_error(self, pytester: pytest.Pytester) -> None:
        make_tests(pytester, test_three=THREE).write_text("mine")
        result = pytester.runpytest_inprocess("--accept")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: ini fxbucket_golden: */golden is a file; expected the folder of the goldens, *"])
        result = pytester.runpytest_inprocess()
        result.stdout.fnmatch_lines(["*golden is a file, where a folder of goldens was expected; move it away"])
        assert (pytester.path / "golden").read_text() == "mine"


class TestContinuousIntegration:
    @pytest.mark.parametrize("flag", ["--accept", "--fxbucket-accept"])
    def test_there_the_bare_option_is_refused_and_nothing_is_run(
        self, pytester: pytest.Pytester, goldens: Path, monkeypatch: pytest.MonkeyPatch, flag: str
    ) -> None:
        monkeypatch.setenv("CI", "true")
        result = pytester.runpytest_inprocess(flag, "-o", "fxbucket_accept=all")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: --fxbucket-accept without a value where CI is set *, e.g. --fxbucket-accept=all"])
        assert files(goldens) == {"a.txt": OLD, "b.txt": OLD}

    def test_with_a_value_it_is_as_on_a_desk(
        self, pytester: pytest.Pytester, goldens: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CI", "1")
        assert pytester.runpytest_inprocess("--accept=changed", "--deselect=test_three.py::test_it[c]").ret == 0
        assert files(goldens) == {"a.txt": NEW, "b.txt": NEW}

    @pytest.mark.parametrize("value", ["", "0", "false", "False"])
    def test_a_value_that_says_no_is_none(
        self, pytester: pytest.Pytester, goldens: Path, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        monkeypatch.setenv("CI", value)
        assert pytester.runpytest_inprocess("--accept", "--collect-only").ret == 0
