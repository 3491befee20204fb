"""Reports of steps through a pipe that several ranks write into."""

from __future__ import annotations

import os
import select
from pathlib import Path

import torch

from pytest_fxbucket.eager.step_reports import StepReporter


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
