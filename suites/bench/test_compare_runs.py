"""A stored run beside a new one: whether they may be compared, regression or none, with the numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.bench.compare import judge, verdict_entry, verdict_of
from pytest_fxbucket.bench.record import Record
from pytest_fxbucket.bench.store import comparable, find
from pytest_fxbucket.checks.verdict import Verdict, skipped
from suites.bench.records import MACHINE, WORKLOAD, bucket, graph, record, steps
from suites.bench.storage import KIND, Project

THRESHOLD = 0.03
FUSED = {**graph(), "digest": "cd34"}


def verdict(project: Project, now: Record, what: str = "latest") -> Verdict:
    return verdict_of(what, now, THRESHOLD, project.storage, project.top)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    project.store(1)
    return project


class TestVerdict:
    def test_noise_that_would_hide_a_loss_is_said(self) -> None:
        calm, wild = (
            {"samples": {name: steps(0.01, at, spread=spread) for at, name in enumerate(("bucketed", "unbucketed"))}}
            for spread in (0.01, 0.3)
        )
        assert "too noisy" not in judge(record(**calm), record(**calm), THRESHOLD).summary
        said = judge(record(**calm), record(**wild), THRESHOLD).summary
        assert said.endswith("; too noisy for a threshold of 3.0%: measure longer (budget_s), or use a quieter machine")

    def test_a_slower_bucketed_step_fails_with_numbers(self, project: Project) -> None:
        said = verdict(project, record(bucketed_s=0.011, seed=7, dirty=True, **{"pass": "torch"}))
        assert said.outcome == "failed"
        assert said.summary.startswith("slower against unbucketed than before, outside the noise: +")
        text = "\n".join(said.lines)
        for part in (
            "then",
            "now",
            project.first[:7],
            "1111111 with changes",
            "bucketed/unbucketed  0.66",
            "0.73",
            "bucketed, median",
            "unbucketed, median",
            "ms",
            "60 + 60 + 60",
            "99% interval",
            "threshold +3.0%",
            "2.13.0+cpu",
            "pass differs: manual then, torch now",
            "now the work tree was dirty: files differ from commit 1111111",
            f"stored run: .benchmarks/{KIND}/0001_run.json",
            f"fxbucket compare {project.first[:7]}",
        ):
            assert part in text
        assert "--benchmark-autosave" in said.lines[-1]

    def test_a_faster_step_passes_and_says_so(self, project: Project) -> None:
        said = verdict(project, record(bucketed_s=0.008, seed=7))
        assert said.outcome == "passed"
        assert said.summary.startswith("faster against unbucketed than before, outside the noise: -")

    def test_a_pass_says_what_it_was_measured_against_and_what_differs(self, project: Project) -> None:
        project.store(2, dirty=True)
        now = {"torch": "2.14.0", "python": "3.12.1", "is_stable": False, "dirty": True}
        said = verdict(project, record(seed=7, **now))
        assert said.outcome == "passed"
        summary, *notes = said.summary.split("; ")
        assert summary.startswith("no difference beyond the noise: ")
        assert f"against {project.first[:7]} of 2026-11-21" in summary
        assert notes == [
            f"stored run: .benchmarks/{KIND}/0001_run.json",
            f"newer, but passed over: .benchmarks/{KIND}/0002_run.json (of a dirty work tree)",
            "torch differs: 2.13.0+cpu then, 2.14.0 now",
            "Python differs: 3.11.7 then, 3.12.1 now",
            "now the work tree was dirty: files differ from commit 1111111",
            "now step time had not settled when sampling began",
        ]

    def test_a_small_sure_change_is_within_the_threshold(self) -> None:
        steady = {"samples": {"bucketed": [[0.010] * 50] * 5, "unbucketed": [[0.015] * 50] * 5}}
        slower = {"samples": {"bucketed": [[0.0102] * 50] * 5, "unbucketed": [[0.015] * 50] * 5}}
        assert judge(record(**steady), record(**slower), 0.03).summary.startswith(
            "within the threshold of 3.0% of the step: +2.0%"
        )
        assert judge(record(**steady), record(**slower), 0.01).outcome == "slower"

    def test_a_machine_that_became_slower_is_no_regression(self, project: Project) -> None:
        assert verdict(project, record(bucketed_s=0.014, unbucketed_s=0.021, seed=7)).outcome == "passed"

    @pytest.mark.parametrize("another", [{"torch": "2.14.0"}, {"python": "3.12.1"}, {"graphs": {"unbucketed": FUSED}}])
    def test_an_unbucketed_step_that_became_faster_is_told_from_a_bucketed_one_that_became_slower(
        self, project: Project, another: dict[str, Any]
    ) -> None:
        said = verdict(project, record(bucketed_s=0.0099, unbucketed_s=0.0130, seed=7, **another))
        assert said.outcome == "passed"
        assert re.match(
            r"bucketing gains less: bucketed 10\.\d+ ms then and 9\.\d+ ms now, "
            r"unbucketed 1[45]\.\d+ ms then and 1[23]\.\d+ ms now; the ratio changed by \+1\d\.\d% \(",
            said.summary,
        )
        slower = verdict(project, record(bucketed_s=0.0103, unbucketed_s=0.0130, seed=7, **another))
        assert slower.outcome == "failed"

    def test_a_machine_that_became_faster_hides_no_regression(self, project: Project) -> None:
        said = verdict(project, record(bucketed_s=0.0088, unbucketed_s=0.0120, seed=7))
        assert said.outcome == "failed"
        assert any("the same: so the machine became faster, and the bucketed step should have" in line for line in said.lines)

    def test_a_loss_that_noise_hides_is_a_skip_and_no_pass(self, project: Project) -> None:
        now = {"bucketed": steps(0.0115, 7, spread=0.4), "unbucketed": steps(0.015, 8, spread=0.4)}
        told = judge(record(seed=1), record(samples=now), THRESHOLD)
        assert told.change.low < 0 < math.log1p(THRESHOLD) < told.change.log_ratio
        said = verdict(project, record(samples=now))
        assert said.outcome == "skipped"
        assert said.summary.startswith(
            f"cannot be told: {told.change} against {project.first[:7]} of 2026-11-21 is more than the "
        )
        assert "measure longer (budget_s)" in said.summary
        assert f"stored run: .benchmarks/{KIND}/0001_run.json" in said.summary
        assert judge(record(samples=now), record(), THRESHOLD).outcome == "same"  # a gain that noise hides is no loss

    def test_runs_that_were_slower_or_never_judged_or_slower_perhaps_are_no_measure(self, project: Project) -> None:
        slower, same = (verdict(project, record(bucketed_s=each, seed=7)) for each in (0.02, 0.01))
        untold = skipped("benchmark", "cannot be told: +5.0% ...")
        marks = [verdict_entry("latest"), verdict_entry("latest", slower), verdict_entry("latest", untold)]
        for number, mark in enumerate(marks, 2):
            project.store(number, compared=mark["fxbucket_compared"]["outcome"])
            found = find("latest", record(), project.storage, project.top)
            assert found.run is not None
            assert found.run.file.name == "0001_run.json"
            assert "(a regression itself, or never judged)" in found.note
        assert verdict_entry("main") == {
            "fxbucket_compared": {"with": "main", "outcome": "error", "summary": "it was not judged"}
        }
        for number, said in enumerate((same, skipped("benchmark", "there is no stored run")), 10):
            project.store(number, compared=verdict_entry("latest", said)["fxbucket_compared"]["outcome"])
            found = find("latest", record(), project.storage, project.top)
            assert found.run is not None
            assert found.run.file.name == f"{number:04}_run.json"

    def test_the_same_two_runs_are_judged_alike_each_time(self) -> None:
        runs = record(), record(bucketed_s=0.0105, seed=3)
        assert judge(*runs, THRESHOLD).lines() == judge(*runs, THRESHOLD).lines()

    def test_nothing_comparable_is_a_skip_with_the_reason(self, project: Project) -> None:
        said = verdict(project, record(backend="gloo:cuda", seed=7))
        assert said.outcome == "skipped"
        assert said.summary == (
            f"not comparable with .benchmarks/{KIND}/0001_run.json: backend was gloo and is gloo:cuda; store a run of this "
            "kind to compare with"
        )

    def test_nothing_stored_is_a_skip(self, project: Project) -> None:
        said = verdict(project, record(plan="plans/other.toml"))
        assert said.outcome == "skipped"
        assert said.summary.startswith("there is no stored run of plans/other.toml in .benchmarks")


class TestExposed:
    def lines(self, then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
        sides = [record(graphs={"bucketed": graph(*buckets)}) for buckets in (then, now)]
        lines = judge(*sides, THRESHOLD).lines()
        at = lines.index("exposed time that grew most:") if "exposed time that grew most:" in lines else len(lines)
        return lines[at + 1 :]

    def test_the_three_that_grew_most_come_first(self) -> None:
        then = [bucket(f"all_gather layers.{at}", 0.001) for at in range(5)]
        now = [bucket(f"all_gather layers.{at}", 0.001 * (1 + at)) for at in range(5)]
        told = self.lines(then, now)
        assert told == [
            "  all_gather layers.4 (forward): 1.000 ms then, 5.000 ms now",
            "  all_gather layers.3 (forward): 1.000 ms then, 4.000 ms now",
            "  all_gather layers.2 (forward): 1.000 ms then, 3.000 ms now",
        ]

    def test_buckets_of_one_name_are_told_apart_and_new_ones_are_said(self) -> None:
        then = [bucket("all_gather a", 0.001), bucket("all_gather a", 0.001, "backward"), bucket("all_gather a", 0.001)]
        now = [bucket("all_gather a", 0.001), bucket("all_gather a", 0.003, "backward"), bucket("all_gather a", 0.002)]
        told = self.lines(then, [*now, bucket("all_gather b", 0.004)])
        assert told == [
            "  all_gather b (forward): no such bucket then, 4.000 ms now",
            "  all_gather a (backward): 1.000 ms then, 3.000 ms now",
            "  all_gather a (forward, 2): 1.000 ms then, 2.000 ms now",
        ]

    def test_without_growth_and_without_figures_there_is_nothing_to_say(self) -> None:
        assert self.lines([bucket("a", 0.002)], [bucket("a", 0.001)]) == []
        assert self.lines([bucket("a", None)], [bucket("a", None)]) == []


def test_commit_pass_torch_and_python_may_differ() -> None:
    other = {
        "commit": None,
        "pass": "torch",
        "torch": "2.14.0",
        "python": "3.12.1",
        "graphs": {},
        "time": "2027-01-01T00:00:00+00:00",
    }
    assert comparable(record(), record(**other)) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"plan": "b.toml"}, "another plan: plans/tiny.toml, not b.toml"),
        ({"row": "x"}, "another plan: plans/tiny.toml, not plans/tiny.toml[x]"),
        ({"backend": "nccl"}, "backend was gloo and is nccl"),
        ({"ranks": 4}, "ranks was 2 and is 4"),
        (
            {"machine": {**MACHINE, "cpu": "Xeon", "cores": 8}},
            "another machine: cores was 2 and is 8, cpu was AMD EPYC 9B14 and is Xeon",
        ),
        ({"machine": {**MACHINE, "gpus": ["NVIDIA H200"]}}, "another machine: gpus was none and is NVIDIA H200"),
        (
            {"workload": {**WORKLOAD, "parallel": {"dp_shard": 4, "mode": "simple_fsdp"}}},
            "[parallel] dp_shard was 2 and is 4",
        ),
        ({"workload": {**WORKLOAD, "graph": {"factory": "a:b"}}}, "[graph] was not there and is a table of 1"),
        (
            {"workload": {**WORKLOAD, "model": {"factory": "tiny:build", "args": {"layers": 3}}}},
            "[model] args.layers was 2 and is 3",
        ),
        (
            {"workload": {**WORKLOAD, "step": {name: 1 for name in "abcde"}}},
            "[step] a was not there and is 1, [step] b was not there and is 1, [step] c was not there and is 1 and 3 more",
        ),
    ],
)
def test_what_differs_is_named_with_both_values(changed: dict[str, Any], reason: str) -> None:
    assert comparable(record(), record(**changed)) == [reason]


def test_tables_of_a_list_are_compared_one_by_one() -> None:
    then, now = ([{"factory": "torch.optim:SGD", "args": {"lr": lr}}] for lr in (0.1, 0.2))
    reasons = comparable(*(record(workload={**WORKLOAD, "optimizer": each}) for each in (then, now)))
    assert reasons == ["[optimizer] args.lr was 0.1 and is 0.2"]


def test_not_a_number_is_itself_and_true_is_not_1() -> None:
    def with_args(text: str) -> Record:
        return record(workload={**WORKLOAD, "model": {"factory": "tiny:build", "args": json.loads(text)}})

    assert comparable(with_args('{"a": NaN}'), with_args('{"a": NaN}')) == []
    for then, now in (("true", "1"), ("[1]", "[true]"), ('"1"', "1"), ("0", "false"), ('{"b": [1, 2]}', '{"b": [1, true]}')):
        (reason,) = comparable(with_args(f'{{"a": {then}}}'), with_args(f'{{"a": {now}}}'))
        assert reason.startswith("[model] args.a")
        was, _, is_now = reason.partition(" was ")[2].partition(" and is ")
        assert was != is_now
