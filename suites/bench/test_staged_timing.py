"""Steps in pipeline stages are timed on real ranks; stages are lanes, and what ranks idle is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.bench import measure
from pytest_fxbucket.bench.measure import digests
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.report.page import ReportInput, plan_page
from pytest_fxbucket.bench.staged_tasks import pipeline_facts
from pytest_fxbucket.bench.step_time import StepTime
from pytest_fxbucket.bench.timeline.marks import Kind, Span
from pytest_fxbucket.bench.timeline.spans import chrome_trace, idle_share, lane_of, measured_bubble, rows_of
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.bench.records import fields

ROOT = Path(__file__).parents[2]
PLAN = """
[model]
factory = "suites.cli.staged_nets:build"
batch = "suites.cli.staged_nets:batch"
[parallel]
pp = 2
[pipeline]
cuts = ["layers.1"]
schedule = "1F1B"
[step]
microbatches = 4
[optimizer]
factory = "torch.optim:AdamW"
[bucket]
plan = ["embed+head", "layers.[0-3]"]
[[matrix]]
id = "zbv"
pipeline.cuts = ["layers.0", "layers.1", "layers.2"]
pipeline.schedule = "ZBVZeroBubble"
"""
ONE_EACH, TWO_EACH = parse_plans(PLAN, ROOT / "plan.toml")
"""Stages of a rank."""


@pytest.fixture(scope="module")
def timed(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlanRun, StepTime]:
    """In one set of processes: more show no more of stages."""
    folder = tmp_path_factory.mktemp("run")
    run = PlanRun(TWO_EACH, RunSettings(ROOT, folder / "golden", folder / "artifacts"), pools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SETS", 1)
        return run, run.step_time(Benchmark(budget_s=0.01))


def test_each_stage_is_a_lane_with_every_work_of_every_microbatch(timed: tuple[PlanRun, StepTime]) -> None:
    run, found = timed
    how = run.world.final_step(0).pipelined
    assert how is not None
    for variant in ("bucketed", "unbucketed"):
        spans = found.spans[variant]
        for stage, rank in enumerate(how.pp_places):
            own = [span for span in spans if span.stream == lane_of(stage)]
            assert {span.rank for span in own} == {rank}
            ran = sorted(span.label for span in own if span.kind == "compute")
            graphs = run.world.final(rank)
            works = [f"{work} {number}" for work in ("forward", "input", "weight") for number in range(4)]
            works = [one for one in works if f"stage {stage} {one.split()[0]}" in graphs]
            assert ran == sorted([*works, *(once for once in ("unshard", "reduce") if f"stage {stage} {once}" in graphs)])
        assert {span.rank for span in spans if (span.stream, span.label) == ("all stages", "update")} == {0, 1}


def test_waits_for_transfers_stand_in_the_lane_of_the_stage_that_receives(timed: tuple[PlanRun, StepTime]) -> None:
    run, found = timed
    how = run.world.final_step(0).pipelined
    assert how is not None
    waits = [span for span in found.spans["bucketed"] if span.kind == "wait" and span.stream.startswith("stage ")]
    received = {(span.stream, word) for span in waits for word in span.label.split(" and ") if word.startswith("receive")}
    crossed = [stage for stage in range(1, how.stages) if how.pp_places[stage] != how.pp_places[stage - 1]]
    assert received == {
        one
        for stage in crossed
        for number in range(4)
        for one in ((lane_of(stage), f"receive forward {number}"), (lane_of(stage - 1), f"receive backward {number}"))
    }


def test_the_record_says_how_stages_ran_and_the_summary_what_was_idled(timed: tuple[PlanRun, StepTime]) -> None:
    run, found = timed
    record = found.record
    how = run.world.final_step(0).pipelined
    assert how is not None
    assert record.pipeline is not None
    facts = record.pipeline
    assert (facts["schedule"], facts["stages"], facts["ranks"]) == (how.schedule, how.stages, 2)
    assert facts["microbatches"] == 4
    assert set(facts["bubble"]) == set(record.samples) == {"bucketed", "unbucketed"}
    assert all(share is not None and 0 < share < 1 for share in facts["bubble"].values())
    assert not record.has_priority, "its ranks send from their main threads"
    assert record.graphs["bucketed"]["digest"].split() == [
        one for rank in (0, 1) for one in digests("bucketed", run.world, rank)
    ]
    assert f" by the table of {how.schedule}" in found.summary()
    assert " by (p - 1) / (m + p - 1)" not in found.summary(), "it idles less"
    assert Record.from_dict(record.to_dict(), "here") == record


def test_of_a_schedule_by_the_book_its_formula_is_on_record() -> None:
    facts = pipeline_facts(PlanOnMesh(CapturedPlan(ONE_EACH, mesh_of(ONE_EACH)), "manual"), {})
    assert facts is not None
    assert (facts["schedule"], facts["bubble_by_book"]) == ("1F1B", 0.2)


def span(rank: int, stage: int, label: str, start: int, end: int, kind: Kind = "compute") -> Span:
    return Span(rank, lane_of(stage), kind, label, "forward", start, end)


STEP = [
    span(0, 0, "unshard", 0, 10),
    span(0, 0, "forward 0", 10, 20),
    span(0, 0, "backward 0", 40, 50),
    span(0, 0, "reduce", 50, 90),
    span(1, 1, "receive forward 0", 0, 20, "wait"),
    span(1, 1, "forward 0", 20, 30),
    span(1, 1, "backward 0", 30, 40),
    span(1, 1, "reduce", 40, 44),
]
"""From 10 to 50 the schedule runs: rank 0 for 20, rank 1 for 24 of 40."""


def test_idle_is_what_no_stage_of_a_rank_computes_while_the_schedule_runs() -> None:
    assert idle_share(STEP, 2) == pytest.approx(1 - 44 / 80)
    assert idle_share(STEP, 4) == pytest.approx(1 - 44 / 160), "ranks of which nothing is known idle"
    assert idle_share([one for one in STEP if one.label in ("unshard", "reduce")], 2) is None


def test_the_bubble_is_the_median_of_steps() -> None:
    longer = [span(0, 0, "forward 0", 0, 100), span(1, 1, "forward 0", 0, 0)]
    ranks = [[[one for one in step if one.rank == rank] for step in (STEP, STEP, longer)] for rank in (0, 1)]
    assert measured_bubble(ranks) == idle_share(STEP, 2)
    assert measured_bubble([[], []]) is None


def test_lanes_of_stages_come_first_in_their_order() -> None:
    streams = ["stage 10", "compute", "stage 2", "communication", "all stages", "stream 7"]
    rows = rows_of(Span(0, stream, "compute", "", "forward", 0, 1) for stream in streams)
    assert [stream for _, stream, _ in rows] == [
        "all stages",
        "stage 2",
        "stage 10",
        "compute",
        "communication",
        "stream 7",
    ]
    names = [one["args"]["name"] for one in chrome_trace(STEP)["traceEvents"] if one["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1"]


PIPELINE: dict[str, Any] = {
    "schedule": "GPipe",
    "stages": 2,
    "ranks": 2,
    "microbatches": 4,
    "bubble": {"bucketed": 0.312, "unbucketed": None},
    "bubble_of_table": 0.2,
    "bubble_by_book": 0.2,
}


def test_the_report_sets_what_was_measured_beside_the_table_and_the_book() -> None:
    record = Record.from_dict(fields(pipeline=PIPELINE), "here")
    page = " ".join(plan_page(ReportInput(record, spans={"bucketed": tuple(STEP)}), {}).split())
    assert "2 stages on 2 ranks of pp by GPipe, 4 microbatches." in page
    book = "20.0% by the table of GPipe, 20.0% by (p - 1) / (m + p - 1)"
    assert f"bucketed: bubble 31.2%, {book}; unbucketed: bubble not measured, {book}." in page
    without = " ".join(plan_page(ReportInput(Record.from_dict(fields(), "here")), {}).split())
    assert "by (p - 1)" not in without
