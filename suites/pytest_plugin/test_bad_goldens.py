"""Goldens that no plan can be compared with: one sentence each, and nothing is lost by looking or by accepting."""

from __future__ import annotations

import pytest

from pytest_fxbucket.golden.store import FORMAT, parse, render
from suites.pytest_plugin.golden_project import PLANS, files, make_project, write_plan

pytestmark = pytest.mark.usefixtures("warm")

ROW = '\n[[matrix]]\nid = "x"\nrun.seed = 1\n'
GOOD = render("a line\nanother line\n")
# plan -> what its golden holds, and the sentence that its item fails with; suites/golden/test_store.py has all that is damage
DAMAGED = {
    "cut": (
        GOOD[:-9].encode(),
        "golden/plans/cut.txt is cut short: *; restore it or accept it again: pytest *cut.toml::golden *",
    ),
    "newer": (
        GOOD.replace(f"golden {FORMAT}", "golden 99").encode(),
        f"golden/plans/newer.txt was written by a newer pytest-fxbucket (format 99, this one reads {FORMAT}); upgrade *",
    ),
}
TWO = "golden/plans/two.x.txt would belong to plans/two.toml (matrix row x) and to plans/two.x.toml; rename a plan or *"
LONG = "y" * 250


def test_each_is_one_sentence_and_accepting_mends_what_can_be_mended(pytester: pytest.Pytester) -> None:
    goldens = make_project(pytester, *DAMAGED)
    goldens.mkdir(parents=True)
    for name, (data, _) in DAMAGED.items():
        (goldens / f"{name}.txt").write_bytes(data)
    before = files(goldens)

    compared = pytester.runpytest_subprocess(PLANS)
    compared.assert_outcomes(failed=2)
    for _, sentence in DAMAGED.values():
        compared.stdout.fnmatch_lines_random([sentence])
    assert "Traceback" not in compared.stdout.str()
    assert files(goldens) == before

    accepted = pytester.runpytest_subprocess(PLANS, "--accept", "-v")
    accepted.stdout.fnmatch_lines(["    golden: to be written to golden/plans/cut.txt when the run ends"])
    assert accepted.ret == pytest.ExitCode.TESTS_FAILED
    accepted.stdout.fnmatch_lines([f"golden NOT written: {DAMAGED['newer'][1]}"])
    after = files(goldens)
    assert after.pop("newer.txt") == before["newer.txt"]
    assert parse(after.pop("cut.txt").decode(), "cut").startswith(("plan ", "# ", "format "))
    assert after == {}


def test_plans_that_cannot_have_a_golden_of_their_own_say_so(pytester: pytest.Pytester) -> None:
    """These are seen before anything is traced: two plans with one golden, and plans whose names no golden could have."""
    goldens = make_project(pytester)
    goldens.mkdir(parents=True)
    (goldens / "two.x.txt").write_text(GOOD)
    write_plan(pytester, "two", ROW)
    write_plan(pytester, LONG, ROW)
    for name in ("two.x", "line\nbreak"):
        write_plan(pytester, name)
    result = pytester.runpytest_subprocess(PLANS, "--accept", "-k", "x or break")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=4, deselected=2)
    result.stdout.fnmatch_lines_random(
        [
            TWO,
            f"plans/{LONG}.toml has no golden: {LONG[:20]}... would have 256 bytes, and a file name has at most 255; give *",
            "'plans/line?nbreak.toml' has no golden: a path with control characters, *; rename the plan, or *",
        ]
    )
    assert (goldens / "two.x.txt").read_text() == GOOD
