"""`fxbucket_expect(actual, literal)`: what passes, what a failure says, and how the accept option rewrites the test itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from suites.pytest_plugin.graphs_project import run, write

SOURCE = Path("tests/test_x.py")
TEXT = '''def test_text(fxbucket_expect):
    fxbucket_expect("one\\ntwo\\n", """LITERAL""")
'''
GRAPH = '''import graphs

def test_graph(fxbucket_expect):
    fxbucket_expect(graphs.make(ARGUMENTS), """\\
""")
'''


class TestVerdict:
    def test_an_equal_text_passes_and_another_fails_with_diff_and_command(self, user: pytest.Pytester) -> None:
        write(TEXT, LITERAL="one\\ntwo\\n")
        run(user).assert_outcomes(passed=1)
        write(TEXT, LITERAL="one\\n2\\n")
        result = run(user)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "E *AssertionError: the text is not what is expected here",
                "E *to accept: pytest tests/test_x.py::test_text --fxbucket-accept=changed",
                "E *--- expected",
                "E *-2",
                "E *+two",
                "tests/test_x.py:2: AssertionError",
            ]
        )
        assert "2" in SOURCE.read_text()

    def test_it_is_accepted_in_a_folder_that_is_reached_through_a_link(self, user: pytest.Pytester) -> None:
        write(TEXT, LITERAL="one\\n2\\n")
        link = user.path.with_name("linked")
        link.symlink_to(user.path)
        result = run(user, f"--rootdir={link}", str(link / SOURCE), "--accept")
        result.assert_outcomes(passed=1)
        assert "two" in SOURCE.read_text()

    def test_a_graph_is_told_in_words_too(self, user: pytest.Pytester) -> None:
        write(GRAPH, ARGUMENTS="")
        result = run(user)
        result.stdout.fnmatch_lines(["E *which is nothing yet", "E *to accept: pytest *::test_graph --fxbucket-accept=new"])
        run(user, "--accept").assert_outcomes(passed=1)
        write(SOURCE.read_text().replace("make()", "make(late=True)"))
        result = run(user)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["E *launch all_gather layers.1 moved later past *", "E *+  launch  all_gather layers.1"])

    def test_what_has_no_text_and_what_is_no_expectation_are_named(self, user: pytest.Pytester) -> None:
        write("def test_a(fxbucket_expect): fxbucket_expect(3, '')\ndef test_b(fxbucket_expect): fxbucket_expect('', 3)\n")
        result = run(user)
        result.assert_outcomes(failed=2)
        result.stdout.fnmatch_lines(["*a value of type int has no structure text*", "*3 is no expectation; expected a string*"])


class TestAccept:
    def test_modes_name_empty_and_other_literals(self, user: pytest.Pytester) -> None:
        both = TEXT.replace("LITERAL", "") + TEXT.replace("LITERAL", "old").replace("test_text", "test_changed")
        for mode, named in (("new", ("",)), ("changed", ("old",)), ("all", ("", "old"))):
            write(both)
            result = run(user, f"--accept={mode}")
            result.assert_outcomes(passed=len(named), failed=2 - len(named))
            result.stdout.fnmatch_lines([f"rewritten: tests/test_x.py ({len(named)} expectation*)"])
            wanted = both
            for literal in named:
                wanted = wanted.replace(f'"""{literal}"""', '"""\\\none\ntwo\n"""')
            assert SOURCE.read_text() == wanted
        run(user).assert_outcomes(passed=2)

    def test_a_whole_file_of_them_is_rewritten_and_nothing_else_in_it(self, user: pytest.Pytester) -> None:
        write('''\
            """Not this one."""
            import pytest

            def text(given, fallback): return given

            class TestMany:
                def test_a(self, fxbucket_expect):
                    fxbucket_expect(text("""first""", """no"""), """""")  # é, before others
                    fxbucket_expect(
                        actual="x" * 3, expected="")
                    with pytest.raises(ZeroDivisionError): fxbucket_expect("q", ""), 1 / 0

                def test_b(self, fxbucket_expect):
                    assert fxbucket_expect("é".encode("ascii", "backslashreplace").decode(), r\'\'\'raw\'\'\') is None
                    for _ in range(2):
                        fxbucket_expect('quote "', 'single')
                    fxbucket_expect("stays", "stays"); fxbucket_expect("a\\nb", \'\'\'s\'\'\')
                    assert """before""" and (fxbucket_expect("in an assert", """ü"""), 1)
            ''')
        result = run(user, "--accept")
        result.assert_outcomes(passed=2)
        assert SOURCE.read_text() == (
            '''\
"""Not this one."""
import pytest

def text(given, fallback): return given

class TestMany:
    def test_a(self, fxbucket_expect):
        fxbucket_expect(text("""first""", """no"""), """first""")  # é, before others
        fxbucket_expect(
            actual="x" * 3, expected="""xxx""")
        with pytest.raises(ZeroDivisionError): fxbucket_expect("q", """q"""), 1 / 0

    def test_b(self, fxbucket_expect):
        assert fxbucket_expect("é".encode("ascii", "backslashreplace").decode(), r\'\'\'\\xe9\'\'\') is None
        for _ in range(2):
            fxbucket_expect('quote "', """quote \\"""")
        fxbucket_expect("stays", "stays"); fxbucket_expect("a\\nb", \'\'\'\\
a
b\'\'\')
        assert """before""" and (fxbucket_expect("in an assert", """in an assert"""), 1)
'''
        )
        run(user).assert_outcomes(passed=2)
        result.stdout.fnmatch_lines(["rewritten: tests/test_x.py (7 expectations)"])

    def test_a_literal_given_two_texts_stays_as_it_is_and_the_rest_is_written(self, user: pytest.Pytester) -> None:
        write(
            '''
            import pytest

            @pytest.mark.parametrize("text", ["same", "other"])
            def test_a(text, fxbucket_expect):
                fxbucket_expect(text, """same""")

            def test_b(fxbucket_expect):
                fxbucket_expect("b", """""")
            '''
        )
        old = SOURCE.read_text()
        result = run(user, "--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(
            [
                "NOT rewritten: tests/test_x.py:6: the expectation was given two texts in one run, by *::test_a*same*"
                "and by tests/test_x.py::test_a*other*, so it is left as it is; compare with an fxbucket_golden that has *",
            ]
        )
        assert SOURCE.read_text() == old.replace('""""""', '"""b"""')

    def test_one_call_in_a_function_of_two_tests_is_told_to_be_two(self, user: pytest.Pytester) -> None:
        write(
            """
            def same(expect, text): expect(text, "")
            def test_a(fxbucket_expect): same(fxbucket_expect, "a")
            def test_b(fxbucket_expect): same(fxbucket_expect, "b")
            """
        )
        result = run(user, "--accept")
        result.stdout.fnmatch_lines(
            ["NOT rewritten: *:2: *by *::test_a and by *::test_b, *; give each its own fxbucket_expect"]
        )

    def test_what_cannot_be_rewritten_fails_with_its_place(self, user: pytest.Pytester) -> None:
        rows = (
            ("expected = ''; fxbucket_expect('new', expected)", "is no string literal in the call itself"),
            ("fxbucket_expect('new', '' '')", "is several literals in a row"),
            ("fxbucket_expect('new', f'')", "is no string literal in the call itself"),
            ("fxbucket_expect('n\\u00e9w', '')", "'é' cannot stand in a rewritten literal"),
            ("fxbucket_expect('a\\rb', '')", "cannot be written as a literal that gives it back"),
        )
        write("".join(f"def test_{number}(fxbucket_expect):\n    {call}\n" for number, (call, _) in enumerate(rows)))
        old = SOURCE.read_text()
        result = run(user, "--accept")
        result.assert_outcomes(failed=len(rows))
        for number, (_, said) in enumerate(rows):
            place = f"tests/test_x.py:{2 * number + 2}"
            result.stdout.fnmatch_lines(
                [">   *fxbucket_expect('*", f"E *{place}: fxbucket_expect: *{said}*", f"{place}: UsageError"]
            )
        result.stdout.no_fnmatch_line("*pytest_fxbucket/*")
        assert SOURCE.read_text() == old

    @pytest.mark.parametrize(
        ("mine", "said"),
        [("odd", "the literal has another value than the one that ran"), ("older", "the call is not there now")],
    )
    def test_a_literal_that_was_changed_between_import_and_collection_is_left_alone(
        self, user: pytest.Pytester, mine: str, said: str
    ) -> None:
        write(TEXT + f"text = open(__file__).read()\nopen(__file__, 'w').write(text.replace('old', '{mine}'))\n", LITERAL="old")
        result = run(user, "--accept")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E *:2: fxbucket_expect: {said}"])
        assert f'"""{mine}"""' in SOURCE.read_text()

    def test_where_python_runs_without_places_of_calls_it_says_so(self, user: pytest.Pytester) -> None:
        write(TEXT, LITERAL="")
        result = user.run(sys.executable, "-X", "no_debug_ranges", "-m", "pytest", "-p", "no:cacheprovider", "--accept")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["E *test_x.py: Python runs without places of calls; start it without -X no_debug_ranges"])


class TestFile:
    def test_line_ends_mode_and_links_stay(self, user: pytest.Pytester) -> None:
        Path("elsewhere.py").write_bytes(TEXT.replace("LITERAL", "").replace("\n", "\r\n").encode())
        os.chmod("elsewhere.py", 0o755)
        SOURCE.symlink_to(Path("elsewhere.py").absolute())
        run(user, "--accept").assert_outcomes(passed=1)
        assert SOURCE.is_symlink()
        assert Path("elsewhere.py").stat().st_mode & 0o777 == 0o755
        assert Path("elsewhere.py").read_bytes().count(b"\r\n") == Path("elsewhere.py").read_bytes().count(b"\n") == 5
        run(user).assert_outcomes(passed=1)

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_file_changed_since_the_run_began_is_left_alone(self, user: pytest.Pytester, when: str) -> None:
        change = "open(__file__, 'a').write('# mine\\n')"
        lines = ["fxbucket_expect('new', '')", change]
        write("def test_a(fxbucket_expect):\n    " + "\n    ".join(lines[:: 1 if when == "after" else -1]) + "\n")
        old = SOURCE.read_text()
        result = run(user, "--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.assert_outcomes(passed=int(when == "after"), failed=int(when == "before"))
        result.stdout.fnmatch_lines(["*tests/test_x.py was changed since the run began, so its expectations are left *"])
        assert SOURCE.read_text() == old + "# mine\n"

    def test_a_file_changed_while_its_edits_are_made_is_left_alone(
        self, user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(TEXT, LITERAL="")
        old, sync = SOURCE.read_text(), os.fsync

        def somebody_else(handle: int) -> None:
            sync(handle)
            SOURCE.write_text(old + "# mine\n")

        monkeypatch.setattr(os, "fsync", somebody_else)
        result = run(user, "--accept")
        result.stdout.fnmatch_lines(["NOT rewritten: tests/test_x.py was changed since the run began, *"])
        assert SOURCE.read_text() == old + "# mine\n"
        assert [path.name for path in SOURCE.parent.iterdir() if path.suffix == ".tmp"] == []

    def test_what_a_killed_run_left_beside_it_is_cleaned_up(self, user: pytest.Pytester) -> None:
        write(TEXT, LITERAL="")
        litter = SOURCE.with_name(".fxbucket-ab_cd012.tmp")
        litter.write_text("half of")
        run(user, "--accept").assert_outcomes(passed=1)
        assert not litter.exists()

    def test_a_read_only_file_is_left_alone(self, user: pytest.Pytester) -> None:
        write(TEXT, LITERAL="")
        SOURCE.chmod(0o444)
        result = run(user, "--accept")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["NOT rewritten: tests/test_x.py is read-only*make it writable and run again"])
        assert '""""""' in SOURCE.read_text()

    def test_a_file_in_another_encoding_is_left_alone(self, user: pytest.Pytester) -> None:
        SOURCE.write_bytes(b"# coding: latin-1\nname = '\xe9'\n" + TEXT.replace("LITERAL", "").encode())
        result = run(user, "--accept")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["E *the file is in iso-8859-1, and only UTF-8*"])

    def test_an_interrupted_run_writes_nothing_and_says_so(self, user: pytest.Pytester) -> None:
        write(TEXT + "def test_z(): __import__('pytest').exit('enough')\n", LITERAL="")
        old = SOURCE.read_text()
        result = run(user, "--accept")
        assert result.ret == pytest.ExitCode.INTERRUPTED
        result.stdout.fnmatch_lines(["NOT rewritten: 1 expectation accepted, but the run was interrupted"])
        assert SOURCE.read_text() == old


class TestWorkers:
    def test_several_workers_are_refused_and_nothing_runs(self, user: pytest.Pytester) -> None:
        write(TEXT + "def test_other(): open('ran', 'w').close()\n", LITERAL="")
        old = SOURCE.read_text()
        result = run(user, "-n", "2", "--accept")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            ["ERROR: --fxbucket-accept with 2 workers: tests/test_x.py::test_text uses fxbucket_expect*with -n 0 or -n 1*"]
        )
        assert SOURCE.read_text() == old
        assert not Path("ran").exists()

    def test_one_worker_writes_through_the_controller(self, user: pytest.Pytester) -> None:
        write(TEXT, LITERAL="")
        run(user, "-n", "1", "--accept").assert_outcomes(passed=1)
        run(user, "-n", "0").assert_outcomes(passed=1)

    def test_several_workers_may_accept_what_is_no_expectation_and_refuse_who_comes_by_the_fixture_unseen(
        self, user: pytest.Pytester
    ) -> None:
        golden = "def test_golden(fxbucket_golden): assert 'a' == fxbucket_golden('a')\n"
        unseen = 'def test_unseen(request): request.getfixturevalue("fxbucket_expect")("new", "")\n'
        write(TEXT + golden + unseen, LITERAL="")
        old = SOURCE.read_text()
        result = run(user, "-n", "2", "--accept", "-k", "golden or unseen")
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(["*--fxbucket-accept with 2 workers: tests/test_x.py::test_unseen uses fxbucket_expect*"])
        assert Path("golden/tests/test_x/a.txt").exists()
        assert SOURCE.read_text() == old
