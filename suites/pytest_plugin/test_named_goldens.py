"""`assert graph == fxbucket_golden("name")` in users' own tests: what passes, what a failure says, and what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.plans.traced import TRACED
from suites.pytest_plugin.graphs_project import run, write

GOLDEN = Path("golden/tests/test_x/two.txt")
TEST = """
    import graphs

    def test_two(fxbucket_golden):
        assert graphs.make({arguments}) == fxbucket_golden("two")
"""
COMMAND = "pytest tests/test_x.py::test_two --fxbucket-accept="


def make(arguments: str = "") -> None:
    write(TEST.format(arguments=arguments))


def accepted(user: pytest.Pytester) -> str:
    """Accept the golden of `make()` and give its file's text."""
    make()
    run(user, "--fxbucket-accept=new").assert_outcomes(passed=1)
    return GOLDEN.read_text()


class TestVerdict:
    def test_a_changed_schedule_is_told_in_words_with_diff_and_command(self, user: pytest.Pytester) -> None:
        old = accepted(user)
        assert "  launch  all_gather layers.0\n  launch  all_gather layers.1\n" in old
        run(user).assert_outcomes(passed=1)
        make("late=True")
        result = run(user)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                f"E *the text is not the one in {GOLDEN}",
                f"E *to accept: {COMMAND}changed",
                "E *what changed:",
                "E *launch all_gather layers.1 moved later past *",
                f"*the text is not the one in {GOLDEN}*",
                "--- expected",
                "+  launch  all_gather layers.1",
            ]
        )
        assert GOLDEN.read_text() == old

    def test_vv_shows_all_of_it_in_the_assertion_and_not_twice(self, user: pytest.Pytester) -> None:
        accepted(user)
        make("late=True")
        result = run(user, "-vv", "--tb=short")
        result.stdout.fnmatch_lines([f"E *to accept: {COMMAND}changed", "E *+  launch  all_gather layers.1"])
        result.stdout.no_fnmatch_line(f"-* the text is not the one in {GOLDEN} -*")

    def test_modes_are_those_of_plans(self, user: pytest.Pytester) -> None:
        old = accepted(user)
        make("late=True")
        for mode, is_written in (("new", False), ("changed", True), ("all", True)):
            GOLDEN.write_text(old)
            result = run(user, *f"{COMMAND}{mode}".split()[1:])
            result.assert_outcomes(passed=int(is_written), failed=int(not is_written))
            assert (GOLDEN.read_text() != old) == is_written
        run(user).assert_outcomes(passed=1)

    def test_a_damaged_golden_fails_with_its_sentence(self, user: pytest.Pytester) -> None:
        GOLDEN.write_text(accepted(user)[:-30])
        result = run(user)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E *{GOLDEN} is cut short*"])

    def test_either_side_a_plain_comparison_is_a_bool_and_no_accept_for_unequal(self, user: pytest.Pytester) -> None:
        accepted(user)
        write(
            """
            import graphs

            def test_two(fxbucket_golden):
                golden = fxbucket_golden("two")
                assert golden == graphs.make()
                assert (graphs.make() == golden) is True
                assert (graphs.make(late=True) == golden) is False
                assert graphs.make().graph == golden
                assert graphs.make(late=True) != golden
                assert golden != graphs.make(late=True)
            """
        )
        old = GOLDEN.read_text()
        run(user).assert_outcomes(passed=1)
        write(TEST.format(arguments="late=True").replace("==", "!="))
        run(user, "--accept").assert_outcomes(passed=1)
        assert GOLDEN.read_text() == old
        write(TEST.format(arguments="").replace("==", "!="))
        result = run(user)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E *the text is the one in {GOLDEN}"])

    def test_a_missing_golden_never_passes_however_it_is_compared(self, user: pytest.Pytester) -> None:
        lines = ("assert graph == golden", "assert not graph == golden", "graph == golden", "assert graph != golden")
        head = 'def test_{number}(fxbucket_golden):\n    graph, golden = graphs.make(), fxbucket_golden("two")\n    '
        write("import graphs\n\n" + "\n\n".join(f"{head.format(number=n)}{line}" for n, line in enumerate(lines)))
        result = run(user)
        result.assert_outcomes(failed=len(lines))
        said = f"*{GOLDEN} is missing; write it with: pytest tests/test_x.py::test_%d --fxbucket-accept=new"
        result.stdout.fnmatch_lines([said % number for number in range(len(lines))])
        assert not GOLDEN.exists()


class TestNamesAndTexts:
    def test_a_golden_that_is_compared_with_nothing_is_neither_true_nor_false(self, user: pytest.Pytester) -> None:
        write("def test_two(fxbucket_golden):\n    assert fxbucket_golden('two')\n")
        result = run(user, "--accept")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [f"E *golden {GOLDEN} is true or false only compared: assert graph == fxbucket_golden(...)"]
        )

    def test_a_name_that_is_no_file_name_is_one_sentence_and_the_longest_is_written(self, user: pytest.Pytester) -> None:
        wrong, longest = ["a/b", "..", ".", ".hidden", "", "é", "a b", "x" * 101], "x" * 96 + "_.-9"
        write(
            """
            import pytest

            @pytest.mark.parametrize("name", NAMES)
            def test_two(name, fxbucket_golden): assert "text" == fxbucket_golden(name)
            """,
            NAMES=repr([*wrong, longest]),
        )
        result = run(user, "--accept", "--tb=line")
        result.assert_outcomes(failed=len(wrong), passed=1)
        said = "*fxbucket_golden: '{}*' is no name for a golden; expected at most 100 letters*"
        result.stdout.fnmatch_lines([said.format(name[:20]) for name in wrong])
        assert [path.name for path in Path("golden/tests/test_x").iterdir()] == [f"{longest}.txt"]
        run(user).assert_outcomes(failed=len(wrong), passed=1)

    def test_parametrized_tests_name_theirs_and_the_command_names_the_case(self, user: pytest.Pytester) -> None:
        write(
            """
            import pytest

            @pytest.mark.parametrize("word", ["a", "b c"])
            def test_two(word, fxbucket_golden):
                assert f"text of {word}" == fxbucket_golden("of_" + word[0])
            """
        )
        result = run(user)
        result.stdout.fnmatch_lines([r"E *with: pytest 'tests/test_x.py::test_two[[]b c]' --fxbucket-accept=new"])
        run(user, "--accept").assert_outcomes(passed=2)
        assert sorted(path.name for path in Path("golden/tests/test_x").iterdir()) == ["of_a.txt", "of_b.txt"]

    def test_two_texts_under_one_name_are_refused_and_nothing_is_written(self, user: pytest.Pytester) -> None:
        """By two tests, of which the first may give the text that is there already; or by one, which is named once."""
        write("def test_two(fxbucket_golden): assert 'same' == fxbucket_golden('one') and 'same' == fxbucket_golden('two')")
        run(user, "--accept").assert_outcomes(passed=1)
        folder = GOLDEN.parent
        old = {path.name: path.read_text() for path in folder.iterdir()}
        write(
            """
            import pytest

            @pytest.mark.parametrize("text", ["same", "third"])
            def test_one(text, fxbucket_golden):
                assert text == fxbucket_golden("one")

            @pytest.mark.parametrize("text", ["other", "third"])
            def test_two(text, fxbucket_golden):
                assert text == fxbucket_golden("two")

            def test_both(fxbucket_golden):
                assert 'a' == fxbucket_golden('three') and 'b' == fxbucket_golden('three')
            """
        )
        result = run(user, "--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=5)
        said = "*NOT written: {} was given two texts in one run, by tests/test_x.py::{}, so neither is written; {}"
        result.stdout.fnmatch_lines_random(
            [
                said.format(
                    folder / "one.txt", "test_one?same? and by tests/test_x.py::test_one?third?", "put the case into the name"
                ),
                said.format(
                    folder / "two.txt", "test_two?other? and by tests/test_x.py::test_two?third?", "put the case into the name"
                ),
                said.format(folder / "three.txt", "test_both", "give each text a golden of *"),
            ]
        )
        assert {path.name: path.read_text() for path in folder.iterdir()} == old

    def test_an_error_shows_its_sentence_and_the_users_line_and_none_of_ours(self, user: pytest.Pytester) -> None:
        lines = (
            "fxbucket_golden('no name')",
            "fxbucket_golden(3)",
            "assert 3 == fxbucket_golden('two')",
            "assert fxbucket_golden('two') != 3",
            "assert fxbucket_golden('two') == fxbucket_golden('two')",
            "assert 'text' != fxbucket_golden('two')",
        )
        write("".join(f"def test_{number}(fxbucket_golden):\n    {line}\n" for number, line in enumerate(lines)))
        result = run(user)
        result.assert_outcomes(failed=len(lines))
        shown = [[f">   *{line}", "E  *Error: *", f"tests/test_x.py:{2 * n + 2}: *Error"] for n, line in enumerate(lines)]
        result.stdout.fnmatch_lines([line for part in shown for line in part])
        result.stdout.no_fnmatch_line("*pytest_fxbucket/*")

    def test_a_plan_that_owns_the_file_too_is_named(self, user: pytest.Pytester) -> None:
        make()
        Path("tests/test_x").mkdir()
        Path("tests/test_x/two.toml").write_text("[model]\n")
        result = run(user, "--accept")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [f"E *{GOLDEN} would belong to tests/test_x/two.toml and to tests/test_x.py; rename one of the two"]
        )

    def test_plan_groups_parameters_and_an_entry_that_matches_nothing_is_an_error(self, user: pytest.Pytester) -> None:
        write(
            """
            import graphs

            def test_two(fxbucket_golden):
                assert graphs.make() == fxbucket_golden("two", plan=["layers.0+layers.1"])

            def test_typo(fxbucket_golden):
                assert graphs.make() == fxbucket_golden("typo", plan=["layer.0"])
            """
        )
        result = run(user, "--accept")
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(['E *PlanError: *entry "layer.0" matches nothing; did you mean "layers.0" or "layers.1"?'])
        assert "  launch  all_gather layers.0+layers.1\n" in GOLDEN.read_text()

    @pytest.mark.usefixtures("warm")
    def test_a_test_on_ranks_is_told_what_to_do_instead(self, user: pytest.Pytester) -> None:
        write(
            """
            import pytest

            @pytest.mark.fxbucket_ranks(2)
            def test_two(fxbucket_golden): pass

            @pytest.mark.fxbucket_ranks(2)
            def test_inline(fxbucket_expect): pass
            """
        )
        result = user.runpytest_subprocess()  # which starts the ranks' server
        result.assert_outcomes(failed=2)
        for name in ("fxbucket_golden", "fxbucket_expect"):
            result.stdout.fnmatch_lines([f"*the fixture {name} works in pytest's own process only*; compare in*"])


WITH_PLAN = """
    import pytest
    from pytest_fxbucket.checks.invariants import assert_invariants

    @pytest.mark.fxbucket_plan("plans/mlp.toml")
    def test_step(fxbucket_graph, fxbucket_golden):
        assert fxbucket_graph == fxbucket_golden("before")
        assert fxbucket_graph.graphs["joint"] == fxbucket_golden("before")

    @pytest.mark.fxbucket_plan("plans/mlp.toml")
    def test_bucketed(fxbucket_graph, fxbucket_bucketed, fxbucket_golden):
        assert_invariants(fxbucket_graph, fxbucket_bucketed)
        assert fxbucket_bucketed == fxbucket_golden("after")
        assert fxbucket_bucketed.graph_module == fxbucket_golden("after")
        assert fxbucket_bucketed.graph == fxbucket_golden("by_parameter", plan=["layers.*.weight", "layers.*.bias"])
"""


@pytest.mark.usefixtures("warm")
def test_with_a_plan_the_text_is_that_of_the_plans_own_golden(user: pytest.Pytester) -> None:
    write(WITH_PLAN)
    user.mkdir("plans")
    Path("plans/mlp.toml").write_text(TRACED)
    # tracing imports much of torch that cannot be imported twice
    result = user.runpytest_subprocess("plans/mlp.toml::golden", "tests", "--accept")
    result.assert_outcomes(passed=3)
    assert Path("golden/tests/test_x/after.txt").read_text() == Path("golden/plans/mlp.txt").read_text()
    before = Path("golden/tests/test_x/before.txt").read_text()
    assert "plan plans/mlp.toml\nmesh dp_shard=4\n" in before
    assert "reduce_scatter layers.0 #2" in before
