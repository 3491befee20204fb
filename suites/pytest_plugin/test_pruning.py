"""Goldens that no plan and no test owns: listed, a failure where everything was run, and removed where that is asked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_fxbucket.golden.store import FORMAT
from suites.pytest_plugin.golden_project import INI, PLAN, files, make_tests, put

ASKS = """
def test_one(golden):
    golden("one", "text\\n")

def test_two(golden):
    golden("two", "text\\n")
"""
GONE = "golden that nobody owns: golden/"
PRUNE = "to remove what nobody owns, run again with --fxbucket-prune"


@pytest.fixture
def goldens(pytester: pytest.Pytester) -> Path:
    """The golden folder, with the goldens of test_asks.py and one of a plan that is gone."""
    folder = make_tests(pytester, test_asks=ASKS)
    put(folder / "test_asks", one="text", two="text")
    put(folder / "plans", gone="text")
    return folder


class TestListing:
    def test_where_everything_was_run_they_fail_the_run(self, pytester: pytest.Pytester, goldens: Path) -> None:
        result = pytester.runpytest_inprocess()
        result.assert_outcomes(passed=2)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(
            [
                GONE + "plans/gone.txt (plans/gone.toml is not there)",
                "every other golden was compared, so this fails the run; " + PRUNE,
            ]
        )
        assert len(files(goldens)) == 3

    @pytest.mark.parametrize("args", [("-k", "one"), ("test_asks.py::test_one",), ("--deselect=test_asks.py::test_two",)])
    def test_where_a_part_was_run_they_are_listed_and_nothing_more(
        self, pytester: pytest.Pytester, goldens: Path, args: tuple[str, ...]
    ) -> None:
        result = pytester.runpytest_inprocess(*args)
        assert result.ret == 0
        result.stdout.fnmatch_lines([GONE + "plans/gone.txt *", PRUNE])
        result.stdout.no_fnmatch_line("*test_asks/two.txt*")

    def test_a_run_that_compares_no_golden_says_nothing(self, pytester: pytest.Pytester, goldens: Path) -> None:
        pytester.makepyfile(test_other="def test_other(): pass\n")
        result = pytester.runpytest_inprocess("test_other.py")
        assert result.ret == 0
        result.stdout.no_fnmatch_line("*fxbucket ==*")

    def test_files_that_are_no_goldens_are_none_of_ours(self, pytester: pytest.Pytester, goldens: Path) -> None:
        (goldens / "plans" / "gone.txt").rename(goldens / "plans" / "gone.orig")
        (goldens / "notes.txt").write_text("# fxbucket golden notes\n")
        (goldens / "binary.txt").write_bytes(b"\xff\xfe\0")
        (goldens / "newer.txt").write_text("# fxbucket golden 99\nwhat this version knows nothing of\n")
        (goldens / "link.txt").symlink_to(goldens / "test_asks" / "one.txt")
        before = files(goldens)
        result = pytester.runpytest_inprocess("--fxbucket-prune")
        assert result.ret == 0
        result.stdout.no_fnmatch_line("*golden *removed*")
        assert files(goldens) == before


class TestPruning:
    def test_it_removes_them_and_folders_that_this_leaves_empty(self, pytester: pytest.Pytester, goldens: Path) -> None:
        put(goldens / "deep" / "er", lost="text")
        result = pytester.runpytest_inprocess("--fxbucket-prune")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["golden removed: golden/deep/er/lost.txt", "golden removed: golden/plans/gone.txt"])
        result.stdout.no_fnmatch_line("*run again*")
        assert sorted(files(goldens)) == ["test_asks/one.txt", "test_asks/two.txt"]
        assert [path.name for path in goldens.iterdir()] == ["test_asks"]

    def test_the_ini_twin_does_so_too(self, pytester: pytest.Pytester, goldens: Path) -> None:
        assert pytester.runpytest_inprocess("-o", "fxbucket_prune=true").ret == 0
        assert not (goldens / "plans").exists()

    def test_a_plan_owns_the_goldens_of_its_rows_and_no_others(self, pytester: pytest.Pytester, goldens: Path) -> None:
        plans = pytester.mkdir("plans")
        (plans / "here.toml").write_text(PLAN + '[[matrix]]\nid = "a.b"\nrun.seed = 1\n')
        (plans / "off.toml").write_text(PLAN + "golden = false\n")
        put(goldens / "plans", **{"here": "", "here.a.b": "", "here.a": "", "off": "", "off.x": ""})
        result = pytester.runpytest_inprocess("-v")
        assert result.ret == 0, "not all was run: the plan's golden was not compared"
        result.stdout.fnmatch_lines(
            [
                GONE + "plans/gone.txt (plans/gone.toml is not there)",
                GONE + "plans/here.a.txt (plans/here.toml has no matrix row a)",
                GONE + "plans/off.txt (checks.golden is false in plans/off.toml)",
                GONE + "plans/off.x.txt (plans/off.toml has no matrix row x)",
            ]
        )
        pytester.runpytest_inprocess("--fxbucket-prune")
        assert sorted(path.name for path in (goldens / "plans").iterdir()) == ["here.a.b.txt", "here.txt"]

    def test_a_plan_that_a_sparse_checkout_leaves_out_keeps_its_golden(self, pytester: pytest.Pytester, goldens: Path) -> None:
        (pytester.mkdir("plans") / "gone.toml").write_text(PLAN)
        put(goldens / "plans", lost="text")
        as_somebody = ("-c", "user.name=a", "-c", "user.email=a@b")
        for command in (
            ("init", "--quiet"),
            ("add", "--all"),
            (*as_somebody, "commit", "--quiet", "--message=goldens"),
            ("sparse-checkout", "set", "--no-cone", "/*", "!/plans"),
        ):
            subprocess.run(["git", *command], cwd=pytester.path, check=True)
        assert not (pytester.path / "plans").exists()
        assert pytester.runpytest_inprocess("--fxbucket-prune").ret == 0
        assert sorted(path.name for path in (goldens / "plans").iterdir()) == ["gone.txt"]

    def test_a_typo_in_a_plan_never_costs_a_golden(self, pytester: pytest.Pytester, goldens: Path) -> None:
        plans = pytester.mkdir("plans")
        texts = {"gone": "[modle]\n", "odd": "not toml", "rows": PLAN + "[[matrix]]\nid = 3\n"}
        kept = [f"{name}{row}" for name in texts for row in ("", ".row", ".row.x")]
        for name, text in texts.items():
            (plans / f"{name}.toml").write_text(text)
        put(goldens / "plans", **dict.fromkeys([*kept, "goner"], "text"))
        pytester.runpytest_inprocess("--fxbucket-prune")
        assert sorted(path.stem for path in (goldens / "plans").iterdir()) == sorted(kept)

    def test_a_test_file_with_dots_in_its_name_owns_its_goldens(self, pytester: pytest.Pytester, goldens: Path) -> None:
        (pytester.path / "test_v1.2.py").write_text(ASKS)
        put(goldens / "test_v1.2", one="text")
        pytester.runpytest_inprocess("test_asks.py", "--fxbucket-prune")
        assert "test_v1.2/one.txt" in files(goldens)

    def test_a_golden_that_was_asked_for_and_not_compared_stays(self, pytester: pytest.Pytester, goldens: Path) -> None:
        text = """
        def test_pick(fxbucket_golden):
            both = {name: fxbucket_golden(name) for name in ("one", "two")}
            assert "text" == both["one"]
        """
        pytester.makepyfile(test_picks=text)
        put(goldens / "test_picks", one="text", two="text", three="text")
        pytester.runpytest_inprocess("--fxbucket-prune").assert_outcomes(passed=3)
        assert sorted(path.stem for path in (goldens / "test_picks").iterdir()) == ["one", "two"]

    @pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="pytest has subtests from 9.0 on")
    @pytest.mark.parametrize("ends", ["pytest.skip('no driver')", "raise RuntimeError('no driver')", "pass"])
    def test_goldens_of_subtests_that_did_not_run_to_their_end_stay(
        self, pytester: pytest.Pytester, goldens: Path, ends: str
    ) -> None:
        text = f"""
        import pytest

        def test_each(subtests, fxbucket_golden):
            with subtests.test("one"):
                assert "text" == fxbucket_golden("one")
            with subtests.test("two"):
                {ends}
        """
        pytester.makepyfile(test_within=text)
        put(goldens / "test_within", one="text", two="text")
        pytester.runpytest_inprocess("--fxbucket-prune")
        assert (goldens / "test_within" / "two.txt").exists() is (ends != "pass")

    def test_a_golden_that_two_plans_would_own_stays(self, pytester: pytest.Pytester, goldens: Path) -> None:
        plans = pytester.mkdir("plans")
        (plans / "gone.toml").write_text(PLAN + '[[matrix]]\nid = "x"\nrun.seed = 1\n')
        (plans / "gone.x.toml").write_text(PLAN)
        put(goldens / "plans", **{"gone.x": "text"})
        pytester.runpytest_inprocess("--fxbucket-prune")
        assert (goldens / "plans" / "gone.x.txt").exists()

    @pytest.mark.parametrize("args", [("--collect-only",), ("-k", "none")])
    def test_without_a_run_of_anything_it_removes_what_no_plan_owns_at_most(
        self, pytester: pytest.Pytester, goldens: Path, args: tuple[str, ...]
    ) -> None:
        result = pytester.runpytest_inprocess("--fxbucket-prune", *args)
        assert (goldens / "plans").exists() is (args == ("--collect-only",))
        assert len(files(goldens / "test_asks")) == 2
        assert result.ret == (0 if args == ("--collect-only",) else pytest.ExitCode.NO_TESTS_COLLECTED)

    def test_an_interrupted_run_removes_nothing(self, pytester: pytest.Pytester, goldens: Path) -> None:
        pytester.makepyfile(test_stop="import pytest\ndef test_stop(): pytest.exit('enough')\n")
        pytester.runpytest_inprocess("--fxbucket-prune")
        assert (goldens / "plans" / "gone.txt").exists()

    def test_what_cannot_be_removed_is_one_sentence(self, pytester: pytest.Pytester, goldens: Path) -> None:
        (goldens / "plans" / "gone.txt").chmod(0o444)
        put(goldens, changed="text")
        with (pytester.path / "conftest.py").open("a") as file:
            file.write(
                "\n@pytest.hookimpl(tryfirst=True)\ndef pytest_sessionfinish(session):\n"
                f"    (session.path / 'golden/changed.txt').write_text('# fxbucket golden {FORMAT}\\ntheirs')\n"
                f"    (session.path / 'golden/new.txt').write_text('# fxbucket golden {FORMAT}\\ntheirs')\n"
            )
        result = pytester.runpytest_inprocess("--fxbucket-prune")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(
            [
                "golden NOT removed: golden/changed.txt was changed since the run began, so it stays",
                "golden NOT removed: golden/new.txt was written by somebody else since the run began, so it stays",
                "golden NOT removed: golden/plans/gone.txt is read-only; make it writable first: chmod *",
            ]
        )
        assert len(files(goldens)) == 5

    def test_accepting_and_pruning_in_one_run_follow_a_plan_that_was_renamed(
        self, pytester: pytest.Pytester, goldens: Path
    ) -> None:
        (pytester.path / "test_asks.py").rename(pytester.path / "test_renamed.py")
        assert pytester.runpytest_inprocess("--fxbucket-prune", "--accept").ret == 0
        assert sorted(files(goldens)) == ["test_renamed/one.txt", "test_renamed/two.txt"]


# How a test file may come to be run in part, and the goldens that are then not its own; the usual ways are tried on workers
ONLY_ONE = "def test_one(golden):\n    golden('one', 'text\\n')\n"
MARKED = ONLY_ONE + "\ndef test_other(golden):\n    {}\n"
PARTS = {
    "whole, no golden at all": ("def test_one(): pass\n", (), True),
    "another file's test named": (ONLY_ONE, ("test_asks.py", "test_keeps.py::test_keeps"), True),
    "failed": (MARKED.format("assert False"), (), False),
    "stopped before": ("def test_first(): assert False\n" + ONLY_ONE, ("-x", "test_keeps.py", "test_asks.py"), False),
    "not collected": ("assert False\n", ("--continue-on-collection-errors",), False),
    "over the plans of the command line": (
        ONLY_ONE + "def test_all(fxbucket_plan): pass\n",
        ("--fxbucket-plans=plans/here.toml", "test_asks.py", "test_keeps.py"),
        False,
    ),
}


class TestFilesOfTests:
    @pytest.mark.parametrize("case", PARTS)
    def test_only_a_file_that_was_run_whole_disowns_a_golden(self, pytester: pytest.Pytester, goldens: Path, case: str) -> None:
        source, args, is_disowned = PARTS[case]
        pytester.makepyfile(test_asks=source, test_keeps="def test_keeps(golden): golden('keeps', 'text\\n')\n")
        put(goldens / "test_keeps", keeps="text")
        (pytester.mkdir("plans") / "here.toml").write_text(PLAN)
        result = pytester.runpytest_inprocess("--fxbucket-prune", *args)
        assert (goldens / "test_asks" / "two.txt").exists() is not is_disowned
        assert (goldens / "test_keeps" / "keeps.txt").exists()
        if is_disowned:
            result.stdout.fnmatch_lines(["golden removed: golden/test_asks/two.txt"])

    def test_workers_tell_which_files_were_run_whole(self, pytester: pytest.Pytester, goldens: Path) -> None:
        pytest.importorskip("xdist", reason="-n needs pytest-xdist")
        skipped = "import pytest\n" + ONLY_ONE + "    pytest.skip('not here')\n"
        named = ONLY_ONE + "\ndef test_one_more(): pass\n"
        pytester.makepyfile(test_asks=ONLY_ONE, test_part=MARKED.format("pass"), test_skipped=skipped, test_named=named)
        for name in ("part", "skipped", "named"):
            put(goldens / f"test_{name}", one="text", two="text")
        args = ("test_asks.py", "test_part.py", "test_skipped.py", "test_named.py::test_one", "-k", "one")
        result = pytester.runpytest_inprocess("--fxbucket-prune", *args, "-n2")
        result.assert_outcomes(passed=3, skipped=1)
        left = {path.parent.name for path in goldens.rglob("two.txt")}
        assert left == {"test_part", "test_skipped", "test_named"}
        result.stdout.fnmatch_lines(["golden removed: golden/test_asks/two.txt"])

    def test_the_reason_names_the_file(self, pytester: pytest.Pytester, goldens: Path) -> None:
        pytester.makepyfile(test_asks=ONLY_ONE)
        result = pytester.runpytest_inprocess()
        result.stdout.fnmatch_lines([GONE + "test_asks/two.txt (no test of test_asks.py asks for it)"])
        assert result.ret == pytest.ExitCode.TESTS_FAILED

    def test_after_lf_nothing_is_disowned(self, pytester: pytest.Pytester, goldens: Path) -> None:
        pytester.makeini(INI.replace("-p no:cacheprovider", ""))
        pytester.makepyfile(test_asks=ONLY_ONE + "def test_bad(): assert False\n")
        pytester.runpytest_inprocess()
        pytester.makepyfile(test_asks=ONLY_ONE + "def test_bad(): pass\n")
        pytester.runpytest_inprocess("--fxbucket-prune", "--lf").assert_outcomes(passed=1)
        assert (goldens / "test_asks" / "one.txt").exists()
