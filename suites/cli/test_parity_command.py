"""``fxbucket parity``: every step is told as it ends, the first that differs is said, and Ctrl-C loses nothing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from suites.cli.small_repository import ROOT, environment
from suites.warm.runs import WarmRuns

Told = Callable[..., tuple[int, list[str]]]
TRACED = str(ROOT / "fixtures/plans/traced.toml")
PLAN = """
[model]
factory = "suites.eager.ringed:build"
args = {{ dim = 256 }}
batch = "suites.eager.ringed:wide_batch"
loss = "suites.eager.ringed:loss"
[parallel]
dp_shard = 4
[optimizer]
factory = "torch.optim:SGD"
args = {{ lr = {lr} }}
[bucket]
plan = ["0", "1"]
layout = "execution"
[run]
backend = "local"
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(lr=0.01))
    return path


@pytest.fixture
def told(plan: Path, warm_runs: WarmRuns) -> Told:
    """Compare steps of the plan, with its learning rate: the status, and what is printed."""

    def run(*words: str, lr: float = 0.01) -> tuple[int, list[str]]:
        plan.write_text(PLAN.format(lr=lr))
        done = warm_runs.run(["-m", "pytest_fxbucket.cli", "parity", str(plan), *words], plan.parent, environment())
        return done.returncode, done.stdout.splitlines()

    return run


def test_each_step_has_a_line_with_both_losses_and_memory_does_not_grow(told: Told) -> None:
    """A graph of 2 MB a step that were kept of each would be 120 MB behind the tenth."""
    status, lines = told("--steps", "40", lr=0.0001)
    steps = [re.fullmatch(r"step (\d+): loss (\S+), eager (\S+), equal", line) for line in lines[:40]]
    assert [int(step[1]) for step in steps if step] == list(range(40))
    assert all(step and step[2] == step[3] for step in steps)
    assert len({step[2] for step in steps if step}) == 40, "each step has a batch and a loss of its own"
    assert lines[40].startswith("passed: 25 tensors a step")
    sizes = re.fullmatch(
        r"40 steps had equal bits on 4 ranks; the largest rank took (\d+) MiB after 10 steps, (\d+) MiB after 40", lines[41]
    )
    assert (status, len(lines)) == (0, 42)
    assert sizes is not None
    assert int(sizes[2]) - int(sizes[1]) < 100


def test_the_first_step_that_differs_is_said_with_its_place(told: Told) -> None:
    status, lines = told("--steps", "4", "--reduce", "ring")
    assert status == 1
    assert [line.rpartition(", ")[2] for line in lines[:4]] == ["other bits"] * 4
    assert any("its first member that moved is 1.last.bias" in line for line in lines)
    assert lines[-1].startswith("0 of 4 steps had equal bits on 4 ranks; first difference: step 0, rank 0: gradient ")


def test_losses_that_are_no_numbers_show_nothing(told: Told) -> None:
    status, lines = told("--steps", "6", lr=1e30)
    assert (status, lines[-2].partition(":")[0]) == (1, "passed")
    assert re.search(r"from step \d on the loss is no number, whose bits show nothing", lines[-1])


def test_ctrl_c_says_what_was_compared_and_leaves_no_rank(plan: Path, warm_runs: WarmRuns) -> None:
    words = ["-m", "pytest_fxbucket.cli", "parity", str(plan), "--steps", "100000"]
    with ExitStack() as stack:
        pipes = [[os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)] for _ in range(2)]
        (out, out_end), (err, err_end) = [[stack.enter_context(end) for end in pipe] for pipe in pipes]
        process = warm_runs.start(words, plan.parent, environment(), out_end, err_end)
        out_end.close()
        err_end.close()
        next(line for line in out if line.startswith("step 2:"))
        os.kill(process.pid, signal.SIGINT)
        said = err.read()  # which ends once no rank has it open
        assert process.wait() == 130
    steps = re.search(r"fxbucket: stopped; (\d+) steps had equal bits on 4 ranks; the largest rank took ", said)
    assert steps is not None
    assert int(steps[1]) >= 3


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([TRACED], 1, "skipped: a [graph] comes without the model that it was traced from"),
        ([TRACED, "--steps", "0"], 2, "--steps 0: expected a whole number of at least 1"),
        ([TRACED, "--backend", "fake"], 1, "skipped: back end fake holds no values to compare"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(
    words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *words]) == status
    said = capsys.readouterr()
    assert says in said.out + said.err
