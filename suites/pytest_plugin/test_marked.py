"""Tests marked `fxbucket_ranks`: one run of pytest, and what it says of each; options, and workers with ranks of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from suites.pytest_plugin.marked_project import MARK, run
from suites.warm.runs import WarmRuns

PASSED = [
    "test_sum[one]",
    "test_sum[five]",
    "test_folder",
    "test_two_dimensions",
    "test_one_dimension",
    "test_method",
    "test_plain",
    "test_ignored_warning",
    "test_passes_and_prints",
]
FAILED = {
    "test_list": [
        r"rank \d of 4 raised AssertionError: assert \[1, 2, \d\] == \[1, 2, 0\]",
        r"At index 2 diff: \d != 0",
        r"rank 0  returned",
    ],
    "test_call": [r"assert 3 == 4\n \+  where 3 = three\(\)"],
    "test_dict": [r"Differing items:", r"\{'b': \d\} != \{'b': 0\}"],
    "test_skip_on_one": [r"the ranks disagree: rank 0 passed, rank 1 skipped \(only here\), rank 2 passed, rank 3 passed"],
    "test_fail_inside": [r"raised Failed: on purpose"],
    "test_leave": [r"raised SystemExit: 3"],
    "test_vanish": [
        r"rank 3 of 4 exited with status 4",
        r"rank 0  (lost the connection to a peer|is still waiting) +waits for barrier, number [12]",
    ],
    "test_capsys": [r"the fixture capsys works in pytest's own process only, not on ranks; what ranks print is shown by rank"],
    "test_closure": [r"the value of closure cannot be sent to the ranks \(.*\); make it in the body"],
    "test_unit": [r"only test functions and methods of plain classes run on ranks"],
    "test_async": [r"an async test does not run on ranks; let a plain function call asyncio.run"],
    "test_hidden_async": [r"the test gave a coroutine, which nobody awaits; let a plain function call asyncio.run"],
    "test_unknown_argument": [r"got \(4, bakend='gloo'\): got an unexpected keyword argument 'bakend'"],
    "test_mesh_of_another_size": [r"mesh is \{'a': 2\}; expected a size for each dimension by name, 3 ranks in all"],
    "test_world_in_words": [r"world is '4'; expected a number of ranks, 1 or more"],
    "test_too_long": [r"timeout_s is 10000000.0; expected seconds, more than 0 and at most 1000000"],
    "test_unknown_backend": [r"'glow' is no backend; expected one of auto, gloo, "],
    "test_rank_without_ranks": [
        r"fxbucket_rank is for tests that run on ranks; mark this one with @pytest.mark.fxbucket_ranks"
    ],
}
SAID = {
    "test_expected_error": ("skipped", ["divides"]),
    "test_another_error_than_expected": ("failure", ["raised AssertionError: assert 0"]),
    "test_expected_text": ("skipped", ["says so"]),
    "test_another_text_than_expected": ("failure", ["raised ZeroDivisionError: division by zero"]),
    "test_expected_lines": ("skipped", ["both lines"]),
    "test_not_the_first_line_alone": ("failure", ["raised ValueError: first line"]),
    "test_expected_fail": ("skipped", ["is meant"]),
    "test_no_fail": ("failure", ["raised AssertionError: assert 0"]),
    "test_another_error_of_the_same_name": ("failure", ["raised KeyError: mine"]),
    "test_error_of_its_own": ("skipped", ["is mine"]),
    "test_another_error_on_another_rank": ("failure", ["not expected"]),
    "test_that_returns": ("failure", ["a test gives None, this one gave a bool: was assert meant"]),
    "test_thread": ("failure", [r"Exception in thread Thread-\d+[\s\S]*ZeroDivisionError: division by zero"]),
    "test_raised_as_it_goes": ("failure", [r"__del__[\s\S]*ValueError: held"]),
    "test_rank_that_is_handed_on": ("passed", []),
    "test_rank_in_a_fixtures_power": ("error", ["is known on the ranks only"]),
    "test_skipped_as_unittest_does": ("skipped", ["no disk"]),
    "test_strict": ("failure", [r"XPASS\(strict\)"]),
    "test_warning_of_the_ini": ("failure", ["raised UserWarning: of the ini"]),
    "test_warning_of_the_mark": ("failure", ["raised FutureWarning: marked"]),
    "test_rank_in_a_fixture": ("error", ["<the rank of each rank> is known on the ranks only, not where fixtures run"]),
    "test_skipped_before_refused": ("skipped", ["not today"]),
    "test_breakpoint": ("failure", ["a debugger was started on a rank, where there is no terminal; print instead"]),
    "test_long_lists": ("failure", [r"At index 99 diff: 99 != 0[\s\S]*Use -v to get more diff"]),
    "test_on_gpus": ("skipped", ["nccl needs 2 GPUs, this machine has 0"]),
    "test_skip": ("skipped", ["no reason"]),
    "test_expected": ("skipped", ["known"]),
    "test_xfail_inside": ("skipped", ["later"]),
}
"""Outcome, and what is said of it."""


def test_each_has_the_outcome_of_its_ranks_and_says_why(tmp_path: Path, warm_runs: WarmRuns) -> None:
    told, printed = run(warm_runs, tmp_path)
    assert set(told) == {*PASSED, *FAILED, *SAID}
    assert {name: told[name] for name in PASSED if told[name][0] != "passed"} == {}
    for name, patterns in FAILED.items():
        kind, text, _ = told[name]
        assert kind in ("failure", "error"), name
        assert [pattern for pattern in patterns if not re.search(pattern, text)] == [], text
        for part in text.split("\f"):
            assert "pytest_fxbucket" not in part.partition("--- the ranks")[0]
    for name, (outcome, patterns) in SAID.items():
        assert told[name][0] == outcome, told[name]
        assert [pattern for pattern in patterns if not re.search(pattern, told[name][1])] == [], told[name]
    assert "SKIPPED [1] test_theirs.py:" in printed
    for rank in range(4):
        part = (
            printed.partition(" test_list _")[2]
            .partition(f"Captured stdout rank {rank} call")[2]
            .partition("Captured stdout")[0]
        )
        assert f"hello from {rank}" in part
        assert "to stderr" in part
        assert f"hello from {(rank + 1) % 4}" not in part
    assert told["test_passes_and_prints"][2].count("heard") == 2
    assert told["test_long_lists"][2].count("printed") == 2


@pytest.mark.usefixtures("warm")
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


ON_WORKERS = """
import os
import pytest
import torch
import torch.distributed as dist

@pytest.mark.parametrize("n", range(8))
@pytest.mark.fxbucket_ranks(4)
def test_sum(n, fxbucket_rank):
    tensor = torch.full((3,), float(fxbucket_rank + n))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0 + 4 * n] * 3

@pytest.mark.fxbucket_ranks(4)
def test_threads():
    cores = len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == max(1, cores // 8)
"""


@pytest.mark.usefixtures("warm")
def test_two_workers_with_four_ranks_each_are_right(pytester):
    pytester.makepyfile(ON_WORKERS)
    pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider").assert_outcomes(passed=9)
