"""Steps are timed on real ranks: variants take turns, a sample is the slowest rank's, and what ran is what was checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_fxbucket.bench import measure as measured
from pytest_fxbucket.bench.job import RankTimes, TimingTask
from pytest_fxbucket.bench.measure import SETS, TRACED_STEPS, digests, measure, tasks_of
from pytest_fxbucket.bench.stats import Pacing
from pytest_fxbucket.bench.step_time import worlds_of
from pytest_fxbucket.bench.timeline.marks import IN_ONE_CALL
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_checks import Benchmark
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.failure import RankFailure
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.portable import decode, digest
from suites.bench.timing_jobs import Clocked
from suites.plans.llama import llama
from suites.simulate.allocations import small

PLAN = llama("layers = 2, dim = 16") + '[optimizer]\nfactory = "torch.optim:AdamW"\n'
ROOT = Path(__file__).parents[2]
JOB = "suites.bench.timing_jobs:timed"
CROSSING = """
[model]
factory = "suites.checks.bitwise_models:build_stack"
batch = "suites.checks.bitwise_models:batch"
loss = "suites.checks.bitwise_models:loss"
[parallel]
dp_shard = 2
[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.01, fused = true }
groups = "entry"
[bucket]
plan = ["a", "b", "c", "d"]
[overlap]
updates = "ready"
[run]
steps = 1
timeout_s = 60
[[transform]]
name = "next_iteration"
args = { entries = ["c", "d"] }
"""
"""A step whose work crosses iterations."""


def run_of(text: str, pools: Pools, folder: Path) -> PlanRun:
    (plan,) = parse_plans(text, ROOT / "plan.toml")
    return PlanRun(plan, RunSettings(ROOT, folder / "golden", folder / "artifacts"), pools)


@pytest.fixture(scope="module")
def plan_run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> PlanRun:
    return run_of(PLAN, pools, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def world(plan_run: PlanRun) -> PlanOnMesh:
    return plan_run.world


def run(
    pools: Pools, tasks: list[TimingTask], seconds: list[tuple[tuple[float, ...], ...]], **more: int
) -> list[tuple[RankTimes, list[str]]]:
    clocked = [Clocked(task, own, **more) for task, own in zip(tasks, seconds, strict=True)]
    return pools.get(len(tasks), "gloo:plain").run(JOB, clocked, timeout_s=60)  # type: ignore[return-value]  # jobs give objects


def test_variants_take_turns_and_a_sample_is_the_time_of_the_slowest_rank_the_same_on_all(
    world: PlanOnMesh, pools: Pools
) -> None:
    tasks = tasks_of(worlds_of(world, Benchmark()), Pacing(60, 0.5, least_rounds=8))
    # In turn one rank is the slower one: neither's mean is what a step took.
    seconds = [((1.0, 3.0), (2.0, 2.5)), ((2.0, 1.0), (0.5, 3.5))]
    for timed, ran in run(pools, tasks, seconds):
        assert "".join(name[0] for name in ran) == "ubbubuub" * 4, "step by step, and the first changes"
        assert timed.samples == {"unbucketed": [2.0, 3.0] * 4, "bucketed": [2.0, 3.5] * 4}
        assert (timed.warmup_rounds, timed.is_stable) == (8, True)


def test_warm_up_goes_on_while_steps_become_faster(world: PlanOnMesh, pools: Pools) -> None:
    tasks = tasks_of(worlds_of(world, Benchmark()), Pacing(60, 0.5, least_rounds=8))
    falling = (*(8.0 - 0.5 * number for number in range(12)), *[2.0] * 100)
    for timed, _ in run(pools, tasks, [((1.0,), falling)] * 2):
        assert timed.warmup_rounds == 18  # what of the fall is in the rounds before the last four is as small as their scatter
        assert set(timed.samples["bucketed"]) == {2.0}


def test_a_rank_that_fails_is_named_with_the_round_that_it_was_in(world: PlanOnMesh, pools: Pools) -> None:
    tasks = tasks_of(worlds_of(world, Benchmark()), Pacing(60, 0.5))
    with pytest.raises(RankFailure, match=r'rank [01] of 2 raised RuntimeError: this step fails, at "bucketed round 2"'):
        run(pools, tasks, [((1.0,), (1.0,))] * 2, fails_at=2)


def test_ranks_that_ran_another_graph_are_an_error(world: PlanOnMesh, pools: Pools) -> None:
    def swapped(tasks: list[TimingTask]) -> list[object]:
        others = []
        for task in tasks:
            (phase,) = task.phases
            variants = dict.fromkeys(phase.variants, phase.variants["unbucketed"])
            others.append(replace(task, phases=(replace(phase, variants=variants),)))
        return pools.get(2, "gloo:plain").run("pytest_fxbucket.bench.job:run", others, timeout_s=60)

    with pytest.raises(BenchmarkError, match="rank 0 timed another bucketed graph than the one that it was sent"):
        measure(worlds_of(world, Benchmark()), Benchmark(budget_s=0.01), swapped)


def test_ranks_meet_before_the_clock_starts(world: PlanOnMesh, pools: Pools) -> None:
    tasks = tasks_of({"bucketed": world}, Pacing(60, 0.5, least_rounds=8))
    found = pools.get(2, "gloo:plain").run("suites.bench.timing_jobs:met", tasks, timeout_s=60)
    assert found == [["barrier", "clock"] * 16] * 2


def test_what_is_asked_of_all_sets_together_is_asked_less_of_each(world: PlanOnMesh) -> None:
    asked: list[Pacing] = []

    def refuse(tasks: list[TimingTask]) -> list[object]:
        asked.append(tasks[0].pacing)
        raise BenchmarkError("no ranks here")

    with pytest.raises(BenchmarkError, match="no ranks here"):
        measure(worlds_of(world, Benchmark()), Benchmark(budget_s=20, precision=0.01), refuse)
    assert asked == [Pacing(20 / SETS, 0.01 * SETS**0.5)]


def test_a_plan_is_timed_once_each_set_in_new_processes_and_the_last_one_with_a_timeline_of_every_rank(
    plan_run: PlanRun, pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    pool = pools.get(2, "gloo:plain")
    close = pool.close
    monkeypatch.setattr(pool, "close", lambda: (pids.extend(pool.pids), close()))
    monkeypatch.setattr(measured, "SETS", 2)
    found = plan_run.step_time(Benchmark(budget_s=0.01))
    assert plan_run.step_time(Benchmark(budget_s=0.01)) is found
    assert len(set(pids)) == 2 * 2
    record = found.record
    assert [len(rounds) for rounds in record.samples["bucketed"]] == [8] * 2
    assert all(sample > 0 for name in record.samples for sample in found.samples(name))
    for name, launches in (("unbucketed", 60), ("bucketed", 10)):
        facts = record.graphs[name]
        assert facts["launches"] == len(facts["buckets"]) == launches
        assert {span.rank for span in found.spans[name]} == {0, 1}
        assert all(peak > 1 << 20 for peak in facts["peak_bytes"])
    assert TRACED_STEPS > 1


def test_peak_memory_is_that_of_the_step_and_not_of_what_came_before(pools: Pools) -> None:
    (peaks,) = pools.get(1, "gloo:plain").run("suites.bench.timing_jobs:peaks", [None], timeout_s=60)
    large, small = peaks  # type: ignore[misc]  # jobs give objects
    assert large - small > 200 << 20


def test_state_goes_on_from_step_to_step_and_apart_for_each_variant(world: PlanOnMesh, pools: Pools) -> None:
    tasks = tasks_of({"bucketed": world}, Pacing(0.01, 0.5))
    (before, after), (other_before, other_after) = pools.get(2, "gloo:plain").run(
        "suites.bench.timing_jobs:states", tasks, timeout_s=60
    )  # type: ignore[misc]  # jobs give objects
    assert not torch.equal(before, after)
    assert not torch.equal(other_before, other_after)


@pytest.fixture(scope="module")
def crossing_run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> PlanRun:
    return run_of(CROSSING, pools, tmp_path_factory.mktemp("crossing"))


@pytest.fixture(scope="module")
def crossing(crossing_run: PlanRun) -> PlanOnMesh:
    return crossing_run.world


def test_of_a_step_that_crosses_iterations_the_steady_graph_is_timed_beside_the_step_without_that(
    crossing: PlanOnMesh,
) -> None:
    worlds = worlds_of(crossing, Benchmark())
    assert list(worlds) == ["unbucketed", "bucketed", IN_ONE_CALL]
    (phase,) = tasks_of(worlds, Pacing(1, 0.5), traced_steps=1)[0].phases
    graphs = {name: [one.phase for one in variant.graphs] for name, variant in phase.variants.items()}
    assert graphs == {"unbucketed": ["joint"], "bucketed": ["setup", "steady", "cleanup"], IN_ONE_CALL: ["joint"]}
    assert digests("bucketed", crossing, 0) == tuple(digest(one.graph) for one in phase.variants["bucketed"].graphs)
    assert digest(phase.variants[IN_ONE_CALL].graphs[0].graph) == crossing.passed(0)["joint"].digest
    nodes = {node.name for node in decode(phase.variants["bucketed"].graphs[1].graph).graph.nodes}
    assert {mark.node for mark in phase.marks["bucketed"]} <= nodes
    assert item_names(crossing.plan)[-1:] != [f"benchmark:{IN_ONE_CALL}"]
    timed = replace(crossing.plan, checks=replace(crossing.plan.checks, benchmark=Benchmark()))
    assert item_names(timed)[-2:] == ["benchmark:unbucketed", f"benchmark:{IN_ONE_CALL}"]


def test_steps_that_cross_iterations_leave_what_as_many_steps_without_that_leave(crossing: PlanOnMesh, pools: Pools) -> None:
    """Set-up and clean-up included: the state of a timed step is that of training."""
    tasks = tasks_of(worlds_of(crossing, Benchmark()), Pacing(0.01, 0.5))
    for found in pools.get(2, "gloo:plain").run("suites.bench.timing_jobs:trained", tasks, timeout_s=60):
        crossed, alone = found  # type: ignore[misc]  # jobs give objects
        assert len(crossed) == len(alone) > 8
        assert all(torch.equal(one, other) for one, other in zip(crossed, alone, strict=True))


def test_a_plan_that_crosses_iterations_is_timed_with_launches_of_the_steady_graph(
    crossing_run: PlanRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "SETS", 1)
    found = crossing_run.step_time(Benchmark(budget_s=0.01))
    record = found.record
    assert {name: len(rounds) for name, rounds in record.samples.items()} == dict.fromkeys(
        ("unbucketed", "bucketed", IN_ONE_CALL), 1
    )
    labels = {name: [(row["direction"], row["label"]) for row in record.graphs[name]["buckets"]] for name in record.samples}
    late = [label for _, label in labels["bucketed"][:6] if label.startswith("reduce_scatter")]
    assert sorted(late) == ["reduce_scatter c", "reduce_scatter d"]
    assert sorted(labels["bucketed"]) == sorted(labels[IN_ONE_CALL])
    assert f"; against {IN_ONE_CALL} " in found.summary()
    assert {span.rank for span in found.spans["bucketed"]} == {0, 1}


def test_a_step_with_state_that_a_transformation_added_is_timed(pools: Pools) -> None:
    plan = small("averaged")
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")
    tasks = tasks_of(worlds_of(world, Benchmark()), Pacing(0.01, 0.5))
    for found in pools.get(2, "gloo:plain").run("suites.bench.timing_jobs:trained", tasks, timeout_s=60):
        averaged, alone = found  # type: ignore[misc]  # jobs give objects
        assert len(averaged) > len(alone) > 8
        parameters = len(world.step(0).parameters)
        assert all(torch.equal(one, other) for one, other in zip(averaged[:parameters], alone, strict=False))
