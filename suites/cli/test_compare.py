"""``fxbucket compare``: two commits really take turns on ranks, and what was seen is told."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from pytest_fxbucket.bench.side_by_side import Length
from pytest_fxbucket.cli import compare
from pytest_fxbucket.cli.__main__ import main
from suites.cli.small_repository import SmallRepository
from suites.soak.speeds_project import MODEL, PLAN

Capsys = pytest.CaptureFixture[str]
SHORT = ("--budget-s", "0.1")
MUCH = 1000
"""units of work that nobody can overlook: a step takes many times as long"""


@pytest.fixture(autouse=True)
def two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes: more show no more of what is asked here."""
    monkeypatch.setattr(compare, "Length", partial(Length, sets=2, least_sets=2))


@pytest.fixture
def timed(repository: SmallRepository) -> SmallRepository:
    """Two commits, of which HEAD does much more work on rank 1, and tag `same`, which is as HEAD~1."""
    repository.write("net.py", MODEL)
    for extra, tag in ((0, "same"), (0, "fast"), (MUCH, "slow")):
        repository.write("extra.txt", str(extra))
        repository.commit(plans__plan=PLAN)
        repository.git("tag", tag)
    return repository


def test_a_commit_that_does_much_more_is_slower_and_the_other_way_round_faster(
    timed: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    before = timed.state()
    words = ["--plan", "plans/plan.toml", *SHORT]
    timed.write("plans/conftest.py", "")  # the folder has other things than plans
    monkey = sys.path[:]
    assert main(["compare", "fast", "slow", *words, "--json"]) == 1
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["verdict"] == "slower"
    assert plan["log_ratio"] > plan["low"] > 0
    old, new = plan["sides"]
    assert (old["commit"], new["commit"]) == tuple(timed.git("rev-parse", "fast", "slow").split())
    assert old["digest"] == new["digest"], "the graph is the same, the operator is not"
    assert [len(one) for one in old["samples_s"]] == [len(one) for one in new["samples_s"]]
    assert len(old["samples_s"]) == 2
    assert len(new["peak_bytes"]) == 2
    assert timed.state() == before[:2] + timed.state()[2:]
    assert sys.path == monkey


def test_the_working_tree_is_the_second_side_and_its_changes_are_said(
    timed: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    timed.write("extra.txt", "0")
    assert main(["compare", "slow", "--plan", "plans/plan.toml", *SHORT]) == 0
    out = capsys.readouterr().out
    sha = timed.git("rev-parse", "HEAD")[:7]
    assert f"plans/plan.toml: the working tree at {sha}, with uncommitted changes is faster than slow ({sha}) (" in out
    assert "threshold 3 %)\n" in out
    assert "both sides run the same graph" in out


def test_one_commit_beside_itself_is_said_to_be_that(timed: SmallRepository, untouched: None, capsys: Capsys) -> None:
    """With a threshold that no noise comes to, since nothing here may hang on the clock."""
    assert main(["compare", "fast", "fast", "--plan", "plans", *SHORT, "--threshold", "0.99"]) == 0
    said = capsys.readouterr()
    assert "both sides are one commit: what is seen is noise\n" in said.err
    assert "no difference beyond the noise between fast (" in said.out


def test_a_plan_that_was_come_across_and_is_not_in_a_commit_is_passed_over(
    timed: SmallRepository, untouched: None, capsys: Capsys
) -> None:
    """The ini names the folder."""
    timed.git("mv", "plans/plan.toml", "plans/other.toml")
    timed.write("pytest.ini", "[pytest]\nfxbucket_plans = plans\n")
    assert main(["compare", "fast"]) == 2
    said = capsys.readouterr()
    assert (
        said.err
        == f"fxbucket: plans/other.toml is passed over, since it is not in fast ({timed.git('rev-parse', 'fast')[:7]})\n"
    )


def test_each_side_has_its_own_interpreter(timed: SmallRepository, untouched: None, capsys: Capsys, tmp_path: Path) -> None:
    lacking = tmp_path / "python"
    lacking.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    lacking.chmod(0o755)
    words = ["compare", "fast", "slow", "--plan", "plans/plan.toml", "--python", str(lacking), "--python", sys.executable]
    assert main(words) == 2
    sha = timed.git("rev-parse", "fast")[:7]
    assert (
        f"at fast ({sha}): {lacking} cannot be used: ModuleNotFoundError: No module named 'torch'\n" in capsys.readouterr().err
    )
