"""Reports of steps through a pipe that several ranks write into."""

from __future__ import annotations

import os
import select
from pathlib import Path
from threading import Event

import pytest
import torch

from pytest_fxbucket.eager.step_reports import StepReport, StepReporter, StepReports


def test_a_report_stays_whole_between_those_of_other_ranks_whatever_characters_names_have(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    reporter = StepReporter(str(path), 10**4)
    try:
        reporter.report(10**9, torch.tensor(-1e300, dtype=torch.float64), torch.tensor(-1e300), "\U0001f600" * 5_000)
        line = os.read(pipe, 1 << 16)
    finally:
        reporter.close()
        os.close(pipe)
    assert line.endswith(b"}\n")
    assert len(line) <= select.PIPE_BUF


def test_what_cannot_be_told_ends_the_run_and_no_rank_is_left_writing(tmp_path: Path) -> None:
    """As where the output is piped into ``head``."""

    def tell(reports: list[StepReport]) -> None:
        raise BrokenPipeError("nobody reads")

    def run(path: Path) -> None:
        with StepReports(path, 1, tell):
            reporter = StepReporter(str(path), 0)
            try:
                reporter.report(0, torch.tensor(1.0), torch.tensor(1.0), "")
                assert not Event().wait(60)
                raise AssertionError("the run went on")
            finally:
                for step in range(1, 2000):  # more than a pipe holds
                    reporter.report(step, torch.tensor(1.0), torch.tensor(1.0), "")
                reporter.close()

    with pytest.raises(BrokenPipeError, match="nobody reads"):
        run(tmp_path / "steps")
