"""``fxbucket explain`` on a whole step: what hides each reduction, which reduction feeds which entry, what cannot move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main

PLAN = """
[graph]
factory = "suites.cli.updated_steps:by_entry"

[parallel]
dp_shard = 2

[bucket]
plan = ["a", "b", "c"]

[overlap]
updates = "ready"

[checks]
bitwise = false
same = false
eager = false
"""
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "whole.toml"
    path.write_text(PLAN)
    return path


def explain(capsys: Capsys, *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def joint(capsys: Capsys, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explain(capsys, *arguments, "--json"))["graphs"]["joint"]
    return found


def test_people_see_what_hides_each_reduction_and_what_each_update_is_made_of(plan: Path, capsys: Capsys) -> None:
    told = explain(capsys, "whole.toml")
    assert "nodes of a; 1 update: c" in told
    assert (
        "updates, and the reductions that they are made of a: 2 parameters and 6 states of reduce_scatter a "
        "b: 2 parameters and 6 states of reduce_scatter b c: 2 parameters and 6 states of reduce_scatter c left alone: nothing"
    ) in told


def test_programs_get_the_same(plan: Path, capsys: Capsys) -> None:
    found = joint(capsys, "whole.toml")
    behind = {b["entry"]: b["updates"] for b in found["buckets"] if b["kind"] == "reduce_scatter"}
    assert behind == {"c": [], "b": ["c"], "a": ["b"]}
    assert found["updates"][0] == {
        "entry": "a",
        "parameters": ["a.w", "a.b"],
        "states": 6,
        "reductions": ["reduce_scatter a"],
    }


def test_of_a_foreign_pass_the_same_is_read_off_its_graph(plan: Path, capsys: Capsys) -> None:
    ours, theirs = joint(capsys, "whole.toml"), joint(capsys, "whole.toml", "--pass=suites.cli.updated_steps:early")
    for key in ("entry", "kind", "updates", "overlap_nodes"):
        assert [bucket[key] for bucket in theirs["buckets"]] == [bucket[key] for bucket in ours["buckets"]]
    assert theirs["updates"] == ours["updates"]


def test_with_clipping_each_update_is_made_of_all_reductions_and_why_none_moved_is_said(plan: Path, capsys: Capsys) -> None:
    plan.write_text(PLAN.replace("by_entry", "clipped"))
    told = explain(capsys, "whole.toml")
    assert "a: 2 parameters and 6 states of reduce_scatter c, reduce_scatter b, reduce_scatter a b: 2 parameters" in told
    assert "updates of a, b, c: they need the reductions of all of these, of which _foreach_norm_scalar makes one value" in told
    assert "1 update" not in told
