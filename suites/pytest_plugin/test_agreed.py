"""One outcome from several: a failure anywhere is everybody's, and who failed first of all is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fxbucket.pytest_plugin.torchrun import Agreed, AgreedOutcome, Torchrun, agree

PASSED, SKIPPED = AgreedOutcome("passed"), AgreedOutcome("skipped", "no disk")


def who(rank: int) -> str:
    return f"rank {rank}"


def test_what_a_test_accepted_here_is_not_written_if_it_failed_elsewhere() -> None:
    report = pytest.TestReport("test_a.py::test_a", ("test_a.py", 1, "test_a"), {}, "passed", None, "call")
    report.fxbucket = {"goldens": ["a"], "edits": ["b"], "sizes": 1}  # type: ignore[attr-defined]  # as the plugin adds it
    here: Any = SimpleNamespace(_member=SimpleNamespace(rank=0))
    Torchrun._apply(here, agree({0: PASSED, 1: AgreedOutcome("failed", "no data")}, [], who), report)
    assert (report.outcome, report.fxbucket) == ("failed", {"sizes": 1})  # type: ignore[attr-defined]  # the same


def test_all_alike_is_no_failure() -> None:
    assert agree({0: PASSED, 1: PASSED}, [], who) == Agreed(False)
    assert agree({0: SKIPPED, 1: AgreedOutcome("skipped", "another disk")}, [], who) == Agreed(False)


def test_a_failure_of_one_is_everybodys() -> None:
    agreed = agree({0: PASSED, 1: PASSED, 2: AgreedOutcome("failed", "def f():\nE   assert 1 == 2")}, [], who)
    assert agreed == Agreed(True, 2, ("on rank 2:", "def f():", "E   assert 1 == 2"))


def test_who_failed_on_its_own_comes_before_who_was_left_alone() -> None:
    left = AgreedOutcome("failed", "rank 2 did not come", is_effect=True)
    agreed = agree({0: left, 1: left, 2: AgreedOutcome("failed", "no data")}, [], who)
    assert agreed.rank == 2
    assert agreed.others == ("rank 0: rank 2 did not come", "rank 1: rank 2 did not come")


def test_failures_with_one_reason_are_shown_once() -> None:
    texts = [f"ranks = <object at {address}>\nE   rank 2 was killed" for address in (1, 2)]
    assert agree({rank: AgreedOutcome("failed", text) for rank, text in enumerate(texts)}, [], who).others == ()


def test_who_is_absent_fails_a_phase_that_all_others_pass() -> None:
    assert agree({0: PASSED}, ["rank 1 is gone"], who) == Agreed(True, None, ("rank 1 is gone",))


def test_a_skip_on_one_rank_only_is_a_failure() -> None:
    agreed = agree({0: PASSED, 1: SKIPPED}, [], who)
    assert agreed == Agreed(True, None, ("the processes disagree: rank 0 passed, rank 1 skipped (no disk)",))


def test_a_long_text_keeps_its_beginning_and_its_end_and_says_so() -> None:
    text = AgreedOutcome("failed", "begin " + "x" * 1_000_000 + " end").cut().text
    assert text.startswith("begin x")
    assert text.endswith("x end")
    assert "(934,474 characters left out)" in text
