"""What a person reads in header, summary and failures, and when a wait is shown."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.golden.accept import WriteOutcome
from pytest_fxbucket.progress import Progress
from pytest_fxbucket.pytest_plugin.controller import GoldensOutcome, golden_lines
from pytest_fxbucket.pytest_plugin.options import Options
from pytest_fxbucket.pytest_plugin.session import PlanResult
from pytest_fxbucket.pytest_plugin.terminal import (
    error_text,
    failure_lines,
    header_lines,
    summary_lines,
    torch_text,
)
from pytest_fxbucket.words import human_bytes

OPTIONS = Options(Path("/r"), Path("/r/golden"), Path("/r/.fxbucket"))
SIZES = {"launches_before": 76, "launches_after": 12, "buckets": 12, "bytes": 1536 * 1024}


class TestSummary:
    def test_a_plan_is_one_line_with_sizes_verdicts_and_skips(self) -> None:
        outcomes = {"audit": "passed", "bitwise@4": "skipped (backend fake moves no data)"}
        lines = list(summary_lines({"plans/a.toml": PlanResult(SIZES, outcomes)}, verbosity=0))
        assert lines == [
            "plans/a.toml: 76 → 12 launches, 12 buckets, 1.5 MiB; audit passed, bitwise@4 skipped (backend fake moves no data)"
        ]

    def test_a_plan_whose_pass_never_ran_claims_no_launches(self) -> None:
        assert list(summary_lines({"a.toml": PlanResult(None, {"plan": "failed"})}, 0)) == ["a.toml: plan failed"]

    def test_verbose_adds_what_each_verdict_says(self) -> None:
        result = PlanResult(None, {"bitwise": "passed"}, {"bitwise": "4 ranks, 3 steps"})
        assert list(summary_lines({"a.toml": result}, 1))[1:] == ["    bitwise: 4 ranks, 3 steps"]

    def test_plans_come_in_the_same_order_however_workers_finish(self) -> None:
        results = {name: PlanResult(None, {"audit": "passed"}) for name in ("b.toml", "a.toml[x]", "a.toml")}
        assert [line.partition(":")[0] for line in summary_lines(results, 0)] == ["a.toml", "a.toml[x]", "b.toml"]

    @pytest.mark.parametrize(
        ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
    )
    def test_bytes_are_in_binary_units(self, count: int, text: str) -> None:
        assert human_bytes(count) == text

    def test_goldens_written_and_not_written_are_both_said(self) -> None:
        written = WriteOutcome((Path("/r/golden/a.txt"),), ("/r/golden/b.txt could not be written: read-only",))
        assert list(golden_lines(GoldensOutcome(written), OPTIONS)) == [
            "golden written: golden/a.txt",
            "golden NOT written: golden/b.txt could not be written: read-only",
        ]


class TestHeader:
    def test_without_a_plan_there_is_no_line(self) -> None:
        assert list(header_lines(OPTIONS, 0)) == []

    def test_an_untested_torch_is_said_once(self) -> None:
        assert torch_text("2.13.0+cpu") == "torch 2.13.0+cpu"
        assert torch_text("9.0.0") == "torch 9.0.0 (untested; tested: 2.13.0 on cpu)"


class TestFailure:
    def test_a_failed_verdict_says_its_lines_and_the_folder(self) -> None:
        verdict = SimpleNamespace(summary="2 entries wrong", lines=("a", "b"), folder=Path("/x"))
        told = list(failure_lines(verdict))
        assert told == ["2 entries wrong", "a", "b", "graphs, report and rank logs: /x"]

    def test_a_summary_that_is_the_first_line_is_not_said_twice(self) -> None:
        assert list(failure_lines(SimpleNamespace(summary="a", lines=("a", "b"), folder=None))) == ["a", "b"]

    def test_an_error_with_lines_of_its_own_shows_them(self) -> None:
        class Failure(FxbucketError):
            def lines(self) -> list[str]:
                return ["rank 1 raised", "  its traceback"]

        assert error_text(Failure("short")) == "rank 1 raised\n  its traceback"
        assert error_text(FxbucketError("short")) == "short"


class TestProgress:
    def test_a_long_wait_is_shown_with_what_it_waits_for(self) -> None:
        shown: queue.Queue[str] = queue.Queue()
        progress = Progress(shown.put, after_s=0.01)
        with progress.watching("a.toml::bitwise"):
            progress.say("waiting for 4 ranks")
            assert shown.get(timeout=30) == "a.toml::bitwise: waiting for 4 ranks"

    def test_a_short_wait_is_not_shown_and_leaves_no_thread(self) -> None:
        shown: list[str] = []
        progress, before = Progress(shown.append, after_s=3600), threading.active_count()
        with progress.watching("a.toml::audit"):
            progress.say("tracing")
        assert (shown, threading.active_count()) == ([], before)

    def test_where_nobody_watches_no_thread_is_started(self) -> None:
        progress, before = Progress(None), threading.active_count()
        with progress.watching("a.toml::audit"):
            assert threading.active_count() == before

    def test_an_error_in_the_work_ends_the_watch(self) -> None:
        progress, before = Progress(lambda line: None, after_s=3600), threading.active_count()
        with pytest.raises(ValueError, match="boom"), progress.watching("x"):
            raise ValueError("boom")
        assert threading.active_count() == before
