"""Plan files as items: names, node ids, selection, and files that cannot be loaded."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

CHECKS = ["audit", "golden", "collectives", "same", "bitwise", "eager"]
GOOD = [f"plans/good.toml::{check}" for check in CHECKS] + [f"plans/good.toml::{check}[keep]" for check in CHECKS]
PLAIN = [f"plans/plain.toml::{check}" for check in CHECKS]
BROKEN = ["plans/broken.toml::plan"]
TEST = "def test_own(): pass\n"
MARKED = "import pytest\n@pytest.mark.fxbucket_plan({})\ndef test_a(fxbucket_plan): pass\n"
PLAN_TEST = "def test_plan(fxbucket_plan): assert fxbucket_plan.parallel.dp_shard == 2\n"


def collected(project: pytest.Pytester, *args: str) -> list[str]:
    result = project.runpytest_inprocess("--collect-only", "-q", *args)
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return [line for line in result.outlines if "::" in line]


class TestCollection:
    @pytest.mark.parametrize(
        ("args", "names"),
        [
            ([], ["test_a.py::test_own"]),
            (["--fxbucket-plans=plans"], BROKEN + GOOD + PLAIN),
            (["-o", "testpaths=.", "--fxbucket-plans=plans/plain.toml"], PLAIN),
            (["-o", "testpaths=.", "-o", "fxbucket_plans=plans/plain.toml"], ["test_a.py::test_own", *PLAIN]),
            (["-o", "addopts=--fxbucket-plans=plans/plain.toml"], ["test_a.py::test_own", *PLAIN]),
            (["-o", "fxbucket_plans=plans/plain.toml", "test_a.py"], ["test_a.py::test_own"]),
            (["test_a.py", "plans/plain.toml"], ["test_a.py::test_own", *PLAIN]),
            ([".", "plans/plain.toml"], [*PLAIN, "test_a.py::test_own"]),
            (["plans/plain.toml::bitwise"], ["plans/plain.toml::bitwise"]),
            (["plans/good.toml::audit[keep]"], ["plans/good.toml::audit[keep]"]),
            (BROKEN, BROKEN),
            (["plans/good.toml::audit"], [GOOD[0], GOOD[6]]),
            (["plans/good.toml", "-k", "audit"], [GOOD[0], GOOD[6]]),
            (["--fxbucket-plans=plans", "-k", "audit and good"], [GOOD[0], GOOD[6], *BROKEN]),
            (["--fxbucket-plans=plans", "-k", "not (good or plain)"], BROKEN),
            (["--fxbucket-plans=plans", "-m", "slow"], BROKEN),
            (["--fxbucket-plans=plans", "-k", "plain and golden", "--deselect", *BROKEN], [PLAIN[1]]),
            (["plans/good.toml::golden", "--deselect=plans/good.toml::golden["], [GOOD[1]]),
            (["--rootdir=inner", "--fxbucket-plans=plans/plain.toml"], [f"../{name}" for name in PLAIN]),
        ],
        ids=lambda value: " ".join(value) if len(value) < 4 else "",
    )
    def test_what_is_named_is_collected(self, project: pytest.Pytester, args: list[str], names: list[str]) -> None:
        """The option alone stands for its plans alone, an ini file's are run beside other tests.

        A name without a row stands for its rows too.
        """
        project.mkdir("inner")
        project.makepyfile(test_a=TEST)
        assert collected(project, *args) == names


class TestBrokenPlan:
    def test_it_is_one_failed_item_with_its_sentence_and_no_traceback(self, project: pytest.Pytester) -> None:
        project.makepyfile(test_a=TEST)
        args = ("-x", "-v", "--junitxml=out.xml", "-p", "no:xdist")
        result = project.runpytest_inprocess("plans/broken.toml", "test_a.py", *args)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["plans/broken.toml::plan FAILED*"])
        (case,) = ElementTree.parse("out.xml").iter("testcase")
        assert (case.get("classname"), case.get("name")) == ("plans.broken.toml", "plan")
        assert "modle" in str(case[0].get("message"))
        result.stdout.fnmatch_lines(
            [
                "*_ plans/broken.toml: plan _*",
                "plans/broken.toml: *modle*model*",
                "FAILED plans/broken.toml::plan - *plans/broken.toml: *",
            ]
        )
        result.stdout.no_fnmatch_line("*Error*")

    def test_lf_runs_it_again_until_it_is_mended(self, project: pytest.Pytester) -> None:
        project.makepyfile(test_a=TEST)
        project.runpytest_inprocess("plans/broken.toml", "test_a.py").assert_outcomes(failed=1, passed=1)
        assert collected(project, "--lf", "plans/broken.toml", "test_a.py") == BROKEN


@pytest.mark.usefixtures("warm")
class TestOddPaths:
    """Pytest's arguments end a path at `[` and at `::`."""

    def test_such_a_plan_runs_beside_the_others(self, project: pytest.Pytester) -> None:
        for name in ("a[1].toml", "b::c.toml"):
            Path("plans", name).write_text(Path("plans/plain.toml").read_text())
        odd = [f"plans/{name}::{check}" for name in ("a[1].toml", "b::c.toml") for check in CHECKS]
        assert collected(project, "--fxbucket-plans=plans") == BROKEN + GOOD + PLAIN + odd
        assert collected(project, "--fxbucket-plans=plans/a[[]1].toml", "-k", "audit") == [odd[0]]

    def test_its_failures_are_headed_with_its_whole_path_and_run_on_one_worker(self, project: pytest.Pytester) -> None:
        pytest.importorskip("xdist", reason="-n needs pytest-xdist")
        names = ["plans/a[1].toml", "plans/b::c.toml"]
        for name in names:  # fails before anything is traced
            Path(name).write_text(Path("plans/plain.toml").read_text().replace("tiny:build", "none:build"))
        plans = ",".join(names).replace("[", "[[]")
        result = project.runpytest_subprocess(f"--fxbucket-plans={plans}", "-n2", "-v", "-k", "audit or collectives")
        result.assert_outcomes(failed=4)
        for name in names:
            ran = [line.split() for line in result.outlines if line.startswith("[gw") and name in line]
            assert len({words[0] for words in ran}) == 1
            assert sum(line.strip("_ ") == f"{name}: audit" for line in result.outlines) == 1

    def test_a_checkout_in_such_a_folder_runs_its_plans(
        self, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = project.mkdir("job[1]")
        Path("plans/plain.toml").rename(folder / "plain.toml")
        (folder / "pytest.ini").write_text("[pytest]\n")
        monkeypatch.chdir(folder)
        assert collected(project, "--rootdir=.", "--fxbucket-plans=plain.toml", "-k", "audit") == ["plain.toml::audit"]

    def test_its_failure_is_in_the_summary_with_a_command_that_accepts(self, project: pytest.Pytester) -> None:
        checks = "[checks]\naudit = false\ncollectives = false\nsame = false\nbitwise = false\neager = false\n"
        Path("plans/a[1].toml").write_text(Path("plans/plain.toml").read_text() + checks)
        result = project.runpytest_subprocess("--fxbucket-plans=plans/a[[]1].toml")
        result.assert_outcomes(failed=1)
        command = "pytest '--fxbucket-plans=plans/a[[]1].toml' -k 'golden and not golden[[]' --fxbucket-accept=new"
        result.stdout.fnmatch_lines([f"*plans/a[[]1].txt is missing; *{command}*".replace("a[[]1].toml", "a*1].toml")])
        result.stdout.fnmatch_lines(["plans/a[[]1].toml: *golden failed"])


class TestBrokenRow:
    """A row that is no plan is one failed item, and the others run."""

    ROWS = (
        '\n[[matrix]]\nid = "bad"\nparallel.reshard = 3\n'
        '\n[[matrix]]\nid = "keep"\nrun.steps = 5\n'
        '\n[[matrix]]\nid = "keep"\nrun.steps = 6\n'
        "\n[[matrix]]\nrun.steps = 7\n"
    )

    @pytest.fixture
    def rows(self, project: pytest.Pytester) -> pytest.Pytester:
        path = Path("plans/plain.toml")
        path.write_text(path.read_text() + self.ROWS)
        return project

    def test_the_other_rows_are_collected(self, rows: pytest.Pytester) -> None:
        broken = [f"plans/plain.toml::plan[{name}]" for name in ("bad", "3", "4")]
        expected = [*PLAIN, broken[0], *(f"{name}[keep]" for name in PLAIN), *broken[1:]]
        assert collected(rows, "plans/plain.toml") == expected

    def test_it_fails_with_its_sentence(self, rows: pytest.Pytester) -> None:
        result = rows.runpytest_inprocess("plans/plain.toml", "-k", "plan[")
        result.assert_outcomes(failed=3, deselected=12)
        for line in (
            'plans/plain.toml: [[][[]matrix]] "bad": [[]parallel] has no key "reshard"; did you mean *',
            'plans/plain.toml: [[][[]matrix]] "keep" is there twice; each id must be its own',
            "plans/plain.toml: [[][[]matrix]] row 4 has no id; *",
        ):
            result.stdout.fnmatch_lines([line])
        result.stdout.no_fnmatch_line("*Traceback*")

    @pytest.mark.parametrize(("option", "failed", "left"), [("--lf", 3, 12), ("--sw", 1, 6)])
    def test_rows_that_failed_are_found_by_the_cache(self, rows: pytest.Pytester, option: str, failed: int, left: int) -> None:
        rows.runpytest_inprocess("plans/plain.toml", "-k", "plan[", *([option] if option == "--sw" else []))
        rows.runpytest_inprocess("plans/plain.toml", option).assert_outcomes(failed=failed, deselected=left)

    def test_tests_that_ask_for_plans_get_the_other_rows(self, rows: pytest.Pytester) -> None:
        rows.makepyfile(test_a="def test_plan(fxbucket_plan): assert fxbucket_plan.run.steps in (3, 5)\n")
        result = rows.runpytest_inprocess("test_a.py", "--fxbucket-plans=plans/plain.toml")
        result.assert_outcomes(passed=2, errors=3)


class TestPlanFixture:
    def test_tests_are_parametrized_over_plans_and_rows(self, project: pytest.Pytester) -> None:
        project.makepyfile(test_a=PLAN_TEST + TEST)
        result = project.runpytest_inprocess("test_a.py", "--fxbucket-plans=plans/good.toml,plans/plain.toml", "-v")
        result.assert_outcomes(passed=4)
        for name in ("plans/good.toml", "plans/good.toml-keep", "plans/plain.toml"):
            result.stdout.fnmatch_lines([f"test_a.py::test_plan[[]{name}] PASSED*"])

    def test_a_plan_that_cannot_be_loaded_is_one_error_with_its_sentence(self, project: pytest.Pytester) -> None:
        project.makepyfile(test_a=PLAN_TEST)
        result = project.runpytest_inprocess("test_a.py", "--fxbucket-plans=plans/broken.toml")
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["*broken.toml: *modle*"])
        result.stdout.no_fnmatch_line("*During handling*")

    def test_a_marker_names_plan_and_row(self, project: pytest.Pytester) -> None:
        project.makepyfile(
            test_a="""
            import pytest

            @pytest.mark.fxbucket_plan("plans/plain.toml")
            def test_base(fxbucket_plan):
                assert (fxbucket_plan.path.name, fxbucket_plan.matrix_id) == ("plain.toml", None)

            @pytest.mark.fxbucket_plan("plans/good.toml", id="keep")
            def test_row(fxbucket_plan):
                assert (fxbucket_plan.path.name, fxbucket_plan.matrix_id) == ("good.toml", "keep")
            """
        )
        for args in ((), ("--fxbucket-plans=plans/plain.toml",)):  # which is for tests that name none
            result = project.runpytest_inprocess("-v", "--strict-markers", "test_a.py", *args)
            result.assert_outcomes(passed=2)
            result.stdout.fnmatch_lines(["test_a.py::test_base PASSED*", "test_a.py::test_row PASSED*"])

    def test_a_marker_that_names_nothing_is_one_sentence(self, project: pytest.Pytester) -> None:
        project.makepyfile(test_a=MARKED.format("'plans/good.toml', id='kep'"), test_b=MARKED.format("'plans/gone.toml'"))
        result = project.runpytest_inprocess()
        result.assert_outcomes(errors=2)
        row = "*good.toml: no [[][[]matrix]] row has the id 'kep'*keep*"
        result.stdout.fnmatch_lines([row, "*gone.toml: the plan cannot be read*"])

    def test_a_marker_with_other_arguments_is_a_sentence_and_no_traceback(self, project: pytest.Pytester) -> None:
        given = ["", "'a', 'b', 'c'", "'a', 'b', 'c', 'd'", "'a', row='b'", "3"]
        project.makepyfile(**{f"test_{number}": MARKED.format(one) for number, one in enumerate(given)})
        result = project.runpytest_inprocess()
        sentence = "test_{}.py::test_a: expected @pytest.mark.fxbucket_plan(path, id=None)*"
        result.stdout.fnmatch_lines([sentence.format(number) for number in range(len(given))])
        result.stdout.no_fnmatch_line("*plugin.py*")
        assert result.ret == pytest.ExitCode.INTERRUPTED

    @pytest.mark.parametrize(
        "given",
        [
            "'fxbucket_plan', ['plans/plain.toml'], indirect=True",
            "argnames='fxbucket_plan', argvalues=['plans/plain.toml'], indirect=True",
            "'tmp_path_retention_count, fxbucket_plan', [(1, 'plans/plain.toml')], indirect=['fxbucket_plan']",
        ],
    )
    def test_a_test_may_parametrize_paths_itself(self, project: pytest.Pytester, given: str) -> None:
        test = PLAN_TEST if "count" not in given else PLAN_TEST.replace("(fxbucket", "(tmp_path_retention_count, fxbucket", 1)
        project.makepyfile(test_a=f"import pytest\n@pytest.mark.parametrize({given})\n{test}")
        project.runpytest_inprocess("test_a.py", "--fxbucket-plans=plans/good.toml").assert_outcomes(passed=1)

    def test_without_any_plan_the_error_says_how_to_give_one(self, project: pytest.Pytester) -> None:
        project.makepyfile(test_a=PLAN_TEST)
        result = project.runpytest_inprocess()
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["fxbucket_plan: no plan is given; use --fxbucket-plans=PATH*"])
