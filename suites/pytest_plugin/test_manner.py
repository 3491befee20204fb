"""What a marked test keeps of pytest's manner: marks, warnings, options, reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

MARK = "import pytest\npytestmark = pytest.mark.fxbucket_ranks(2)\n"
TESTS = (
    MARK
    + """
import warnings

@pytest.fixture
def early(fxbucket_rank):
    return "zero" if fxbucket_rank == 0 else "other"

@pytest.mark.xfail(raises=ArithmeticError, reason="divides")
def test_expected_error():
    1 / 0

@pytest.mark.xfail(raises=ArithmeticError)
def test_another_error_than_expected():
    assert 0

@pytest.mark.xfail(strict=True)
def test_strict():
    pass

def test_warning_of_the_ini():
    warnings.warn("of the ini")

@pytest.mark.filterwarnings("error:marked")
def test_warning_of_the_mark():
    warnings.warn("marked", FutureWarning)

@pytest.mark.filterwarnings("ignore:of the ini")
def test_ignored_warning():
    warnings.warn("of the ini")

def test_rank_in_a_fixture(early):
    pass

@pytest.mark.skip(reason="not today")
async def test_skipped_before_refused():
    pass

def test_breakpoint():
    breakpoint()
    assert False

def test_long_lists():
    print("printed", flush=True)
    assert list(range(100)) == list(range(99)) + [0]

def test_passes_and_prints():
    print("heard", flush=True)

@pytest.mark.fxbucket_ranks(2, backend="nccl")
def test_on_gpus():
    pass
"""
)
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")} | {
    "CUDA_VISIBLE_DEVICES": ""
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """Outcome, what is said of it, and captured output of each test, by name."""
    folder = tmp_path_factory.mktemp("manner")
    (folder / "test_theirs.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error::UserWarning\njunit_logging = all\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=junit.xml"]
    subprocess.run(command, cwd=folder, env=ENVIRON, capture_output=True, timeout=300, check=False)
    found = {}
    for case in ElementTree.parse(folder / "junit.xml").getroot().iter("testcase"):
        parts = {child.tag: f"{child.get('message', '')}\n{child.text or ''}" for child in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in parts), "passed")
        found[case.get("name", "")] = (outcome, parts.get(outcome, ""), parts.get("system-out", ""))
    return found


SAID = {
    "test_expected_error": ("skipped", "divides"),
    "test_another_error_than_expected": ("failure", "raised AssertionError: assert 0"),
    "test_strict": ("failure", r"XPASS\(strict\)"),
    "test_warning_of_the_ini": ("failure", "raised UserWarning: of the ini"),
    "test_warning_of_the_mark": ("failure", "raised FutureWarning: marked"),
    "test_ignored_warning": ("passed", ""),
    "test_rank_in_a_fixture": ("error", "<the rank of each rank> is known on the ranks only, not where fixtures run"),
    "test_skipped_before_refused": ("skipped", "not today"),
    "test_breakpoint": ("failure", "a debugger was started on a rank, where there is no terminal; print instead"),
    "test_long_lists": ("failure", r"At index 99 diff: 99 != 0[\s\S]*Use -v to get more diff"),
    "test_passes_and_prints": ("passed", ""),
    "test_on_gpus": ("skipped", "nccl needs 2 GPUs, this machine has 0"),
}


@pytest.mark.parametrize("name", SAID)
def test_marks_and_warnings_mean_what_they_do_elsewhere(told: dict[str, tuple[str, str, str]], name: str) -> None:
    outcome, pattern = SAID[name]
    assert told[name][0] == outcome, told[name]
    assert re.search(pattern, told[name][1]), told[name]


def test_reports_have_the_output_of_each_rank(told: dict[str, tuple[str, str, str]]) -> None:
    assert set(told) == set(SAID)
    assert told["test_passes_and_prints"][2].count("heard") == 2
    assert told["test_long_lists"][2].count("printed") == 2


def test_options_of_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MARK
        + """
def test_expected(tmp_path):
    pytest.xfail("not yet")
    (tmp_path.parents[2] / "went_on").touch()

def test_one():
    print("of one")
    assert list(range(50)) == [*range(49), 0]

def test_two():
    pass
"""
    )
    wide = pytester.runpytest_subprocess("--basetemp=temporary", "--runxfail", "-vv", "-x", "--show-capture=no", "-rA")
    wide.assert_outcomes(passed=1, failed=1)
    assert (pytester.path / "went_on").exists()
    wide.stdout.fnmatch_lines(["*At index 49 diff: 49 != 0*", "*-     0,", "*+     49,"])
    assert "of one" not in wide.stdout.str().partition("short test summary")[0].partition("FAILURES")[2].partition("PASSES")[0]

    command = [sys.executable, "-mpytest", "--lf", "--show-capture=stdout", "--pdb"]
    again = pytester.run(*command, stdin=b"q\n", timeout=120)
    again.stdout.fnmatch_lines(
        ["of one", "of one", "--pdb opens pytest's own process: the ranks of this test have ended", "*Quitting debugger*"]
    )
