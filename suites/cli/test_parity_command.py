"""``fxbucket parity``: every step is told as it ends, the first that differs is said, and Ctrl-C loses nothing."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from suites.cli.small_repository import ROOT, command, environment

TRACED = str(ROOT / "fixtures/plans/traced.toml")
PLAN = """
[model]
factory = "{model}"
batch = "suites.eager.ringed:batch"
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
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(model="suites.eager.ringed:build", lr=0.01))
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    status = main(["parity", *words])
    return status, capsys.readouterr().out.splitlines()


def test_each_step_has_a_line_with_both_losses(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = told(capsys, str(plan), "--steps", "12")
    steps = [re.fullmatch(r"step (\d+): loss (\S+), eager (\S+), equal", line) for line in lines[:12]]
    assert [int(step[1]) for step in steps if step] == list(range(12))
    assert all(step and step[2] == step[3] for step in steps)
    assert len({step[2] for step in steps if step}) == 12, "each step has a batch and a loss of its own"
    assert lines[12].startswith("passed: 25 tensors a step")
    assert re.fullmatch(
        r"12 steps had equal bits on 4 ranks; the largest rank took \d+ MiB after 10 steps, \d+ MiB after 12", lines[13]
    )
    assert (status, len(lines)) == (0, 14)


def test_the_first_step_that_differs_is_said_with_its_place(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = told(capsys, str(plan), "--steps", "4", "--reduce", "ring")
    assert status == 1
    assert [line.rpartition(", ")[2] for line in lines[:4]] == ["other bits"] * 4
    assert any("its first member that moved is 1.last.bias" in line for line in lines)
    assert lines[-1].startswith("0 of 4 steps had equal bits on 4 ranks; first difference: step 0, rank 0: gradient ")


def test_losses_that_are_no_numbers_show_nothing(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(PLAN.format(model="suites.eager.ringed:build", lr=1e30))
    status, lines = told(capsys, str(plan), "--steps", "6")
    assert (status, lines[-2].partition(":")[0]) == (1, "passed")
    assert re.search(r"from step \d on the loss is no number, whose bits show nothing", lines[-1])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_what_was_compared_and_leaves_no_rank(plan: Path) -> None:
    words = command("parity", str(plan), "--steps", "100000")
    with subprocess.Popen(
        words, env=environment(), cwd=plan.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        next(line for line in process.stdout if line.startswith("step 12:"))
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()  # which ends once no rank has it open
    assert process.returncode == 130
    steps = re.search(r"fxbucket: stopped; (\d+) steps had equal bits on 4 ranks; the largest rank took ", said)
    assert steps is not None
    assert int(steps[1]) >= 13


def test_memory_does_not_grow_with_steps(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A graph of 2 MB a step that were kept of each would be 240 MB."""
    plan.write_text(
        PLAN.format(model="suites.eager.ringed:build", lr=0.0001)
        .replace('"\nbatch', '"\nargs = { dim = 256 }\nbatch', 1)
        .replace("ringed:batch", "ringed:wide_batch")
    )
    status, lines = told(capsys, str(plan), "--steps", "60")
    sizes = re.search(r"took (\d+) MiB after 10 steps, (\d+) MiB after 60", lines[-1])
    assert status == 0
    assert sizes is not None
    assert int(sizes[2]) - int(sizes[1]) < 100


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
