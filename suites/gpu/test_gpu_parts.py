"""``make gpu`` without a GPU: parts rehearsed over gloo, but for CUDA graphs and inductor (suites/compiled runs its job)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.ranks.failure import RankState, failure_of
from pytest_fxbucket.ranks.flight_recorder import RankPosition
from pytest_fxbucket.ranks.pools import Pools
from suites.gpu import parts
from suites.gpu import run as command
from suites.gpu.parts import PARTS, ROOT, Found, Rig, at_world
from suites.gpu.rows import Results, Row, read, table
from suites.gpu.step_jobs import differing

SMALL = ROOT / "suites/soak/small.toml"
REHEARSAL = Rig("gloo", "local", (2,), (SMALL,), SMALL, ("by size",), repeats=2, hang_s=3.0)


def found(part: str, pools: Pools | None = None) -> dict[str, Found]:
    """By what was tried, what came of it."""
    return {one[0]: one for one in PARTS[part](replace(REHEARSAL, pools=pools))}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_each_part_is_one_skip_that_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert command.main(["--to", str(path)]) == 0
    rows = [rows for rows in json.loads(path.read_text())["parts"].values()]
    assert [len(of_part) for of_part in rows] == [1] * len(PARTS)
    ((outcome, said),) = {(of_part[0]["outcome"], of_part[0]["said"]) for of_part in rows}
    assert (outcome, said.partition(";")[0]) == ("skipped", "nccl needs 2 GPUs, this machine has 0")
    assert capsys.readouterr().out.count("SKIPPED") == len(PARTS)


def test_parts_that_ran_are_kept_and_one_that_is_named_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(command, "run_part", lambda name, *_: ran.append(name) or [Row(name, "it", "failed", "", 0.0)])
    path = tmp_path / "gpu.json"
    assert command.main(["--to", str(path)]) == 1
    command.main(["--to", str(path)])
    command.main(["--to", str(path), "faults"])
    assert ran == [*PARTS, "faults"]
    monkeypatch.setattr(command, "described", lambda: {"GPU": "another"})
    command.main(["--to", str(path)])
    assert ran == [*PARTS, "faults", *PARTS]  # results of another machine say nothing of this one


def test_parts_that_were_skipped_for_want_of_a_gpu_run_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "nccl needs 2 GPUs, this machine has 0"
    monkeypatch.setattr(command, "lacking", lambda: said)
    arguments = ["--to", str(tmp_path / "gpu.json")]
    assert command.main(arguments) == 0
    said = ""
    for name in PARTS:
        monkeypatch.setitem(PARTS, name, lambda rig: [("it", "failed", "")])  # type: ignore[arg-type]
    assert command.main(arguments) == 1


def test_the_table_says_what_was_never_run_and_what_failed() -> None:
    results = Results({"GPU": "H200"}, {"faults": (Row("faults", "kill", "failed", "nothing was noticed", 1.0),)})
    lines = table(results, ["faults", "rings"]).splitlines()
    assert "| faults | 0 | 1 | 0 | 1 |  |" in lines
    assert "| rings | never run | | | | |" in lines
    assert lines[-1] == "FAILED faults: kill: nothing was noticed"


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = Results({"GPU": "H200"}, {"rings": (Row("rings", "sums", "passed", "", 1.5),)})
    results.write(tmp_path / "gpu.json")
    assert read(tmp_path / "gpu.json", {"GPU": "H200"}) == results


def test_what_a_part_raises_is_a_row_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: Rig) -> object:
        yield "first", "passed", ""
        raise ValueError("broken")

    monkeypatch.setitem(PARTS, "faults", breaks)  # type: ignore[arg-type]
    rows = list(command.run_part("faults", REHEARSAL))
    assert [(row.what, row.outcome, row.said) for row in rows] == [
        ("first", "passed", ""),
        ("what came next", "failed", "ValueError: broken"),
    ]


def test_rows_of_a_part_that_is_cut_off_are_kept_and_it_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(name: str, *_: object) -> Iterator[Row]:
        yield Row(name, "first", "passed", "", 0.0)
        raise KeyboardInterrupt

    path = tmp_path / "gpu.json"
    monkeypatch.setattr(command, "run_part", cut_off)
    with pytest.raises(KeyboardInterrupt):
        command.main(["--to", str(path), "faults"])
    kept = command.read(path, command.described())
    assert [(row.what, row.outcome) for row in kept.parts["faults"]] == [("first", "passed"), ("all of it", "failed")]
    assert not kept.has_run("faults")


def test_a_plan_is_run_at_each_number_of_ranks_that_its_mesh_has() -> None:
    def worlds(name: str, row: str | None = None) -> list[dict[str, int] | None]:
        plan = next(plan for plan in load_plans(ROOT / f"fixtures/plans/{name}.toml") if row in (None, plan.matrix_id))
        smaller = [at_world(plan, ranks) for ranks in (1, 2, 4, 8)]
        return [one and dict(one.run.world) for one in smaller]

    assert worlds("llama") == [None, {"dp_shard": 2}, None, {"dp_shard": 8}]  # 4 is what it is run at anyway
    assert worlds("llama32") == [None, {"dp_shard": 2}, None, {"dp_shard": 8}]
    assert worlds("tp") == [None, None, None, {"dp_shard": 4, "tp": 2}]
    assert worlds("whole") == [None, None, None, None]
    assert worlds("pipeline") == [None, None, None, {"pp": 2, "dp_shard": 4}]
    assert worlds("pipeline", "four") == [None, None, None, None]  # its stages are cut for four ranks


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("CUDA error: operation not permitted when stream is capturing", "skipped"),
        ("operation failed due to a previous error during capture", "skipped"),
        ("CUDA error: an illegal memory access was encountered", "failed"),
    ],
)
def test_only_a_step_that_cannot_be_captured_is_skipped(monkeypatch: pytest.MonkeyPatch, error: str, outcome: str) -> None:
    def fails(*_: object) -> object:
        state = RankState(0, "raised", error=error, where=RankPosition("capturing"))
        raise failure_of([state], task="job suites.gpu.gpu_only_jobs:graphed", timed_out_s=None)

    monkeypatch.setattr(parts, "asked", fails)
    assert {one for _, one, _ in found("graphs").values()} == {outcome}


def test_elements_with_other_bits_differ() -> None:
    zeros = torch.tensor([0.0, 0.0, 1.0, torch.nan])
    assert differing(zeros, torch.tensor([0.0, -0.0, 1.0, torch.nan])) == 1
    assert differing(zeros.bfloat16(), torch.tensor([0.0, 0.0, 2.0, torch.nan]).bfloat16()) == 1
    assert differing(zeros, zeros.clone()) == 0


class TestRehearsed:
    def test_a_test_of_a_users_own(self) -> None:
        assert [outcome for _, outcome, _ in found("marker").values()] == ["passed"]

    def test_faults_name_their_rank_and_the_next_job_is_well(self, pools: Pools) -> None:
        outcomes = {what: outcome for what, outcome, _ in found("faults", pools).values()}
        assert set(outcomes.values()) == {"passed"}
        assert "hang on rank 2 of 4" in outcomes

    @pytest.mark.parametrize("part", ["repeats", "time", "worlds"])
    def test_repeats_are_the_same_timelines_show_flights_and_other_worlds_are_green(self, pools: Pools, part: str) -> None:
        assert {outcome for _, outcome, _ in found(part, pools).values()} == {"passed"}

    def test_sums_that_are_no_rings_are_told_from_it(self, pools: Pools) -> None:
        """gloo adds in rank order, which is a ring's on two ranks alone, and rounds each share of an average."""
        outcomes = found("rings", pools).values()
        assert {(what.split()[0], outcome) for what, outcome, _ in outcomes} == {("summed", "failed"), ("moved", "passed")}
        for what, _, said in outcomes:
            if what.startswith("summed"):
                counts = dict(re.findall(r"(\w+): (\d+) elements differ", said))
                assert [kind for kind, count in counts.items() if count == "0"] == (
                    ["all_reduce", "reduce_scatter"] if what.endswith("on 2 ranks") else []
                )

    @pytest.mark.parametrize("part", ["plans", "staged"])
    def test_each_check_of_a_plan_is_a_row(self, pools: Pools, part: str) -> None:
        outcomes = found(part, pools)
        assert {outcome for _, outcome, _ in outcomes.values()} == {"passed"}
        checks = [what.partition("@")[0] for what in outcomes]
        assert checks == ["audit", "collectives", "same", "bitwise", "eager"]
