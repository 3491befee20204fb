"""A simulated step has the labels of a measured one, and what was measured between marks is what calibration is given."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pytest_fxbucket.bench.calibrated import stretches_of
from pytest_fxbucket.bench.timeline.marks import UNBUCKETED, marks_of
from pytest_fxbucket.bench.timeline.simulated import simulated_step
from pytest_fxbucket.bench.timeline.spans import chrome_trace, idle_share
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import Cluster, Link, cluster_of
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.simulate.calibrate import calibrate
from pytest_fxbucket.simulate.simulator import simulate
from suites.plans.llama import llama

CLUSTER = Cluster(
    name="c",
    flops={"float32": 1e12},
    memory_bandwidth=1e11,
    memory=1e12,
    devices_per_node=8,
    within=Link(1e8, 1e-5),
    between=Link(1e8, 1e-5),
    launch=1e-6,
)
ARGS, BATCH = "layers = 2, dim = 16", "fixtures.models.llama:batch_of_eight"
PLAN = llama(ARGS, batch=BATCH)
STAGED = (
    llama(ARGS, 1, batch=BATCH, pp=2)
    + """
[pipeline]
cuts = ["layers.0"]
schedule = "GPipe"

[step]
microbatches = 4
"""
)


def world_of(text: str) -> PlanOnMesh:
    (plan,) = parse_plans(text, Path(__file__).parents[3] / "plan.toml")
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


@pytest.fixture(scope="module")
def world() -> PlanOnMesh:
    return world_of(PLAN)


def test_a_simulated_step_has_the_labels_of_a_measured_one(world: PlanOnMesh) -> None:
    ((name, spans),) = simulated_step(world, CLUSTER).items()
    marks = marks_of(world, 0, "joint", "bucketed")
    graphs = {phase: one.bucketed.graph_module for phase, one in world.final(0).items()}
    timeline = simulate(replace(world.final_step(0), graphs=graphs), CLUSTER)
    assert name == "simulated on c"
    labels = Counter((mark.label, mark.direction, mark.bucket) for mark in marks if mark.kind == "launch")
    for kind in ("launch", "flight"):
        assert Counter((span.label, span.direction, span.bucket) for span in spans if span.kind == kind) == labels
    assert {span.label for span in spans if span.kind == "compute"} <= {mark.label for mark in marks if mark.kind == "compute"}
    blocked = sum(span.end_ns - span.start_ns for span in spans if span.kind == "wait")
    assert timeline.exposed > 0
    assert blocked == pytest.approx(timeline.exposed * 1e9, abs=len(spans))
    computed = sum(span.end_ns - span.start_ns for span in spans if span.kind == "compute")
    assert computed > timeline.compute * 1e9 - len(spans)
    assert max(span.end_ns for span in spans) == pytest.approx(timeline.seconds * 1e9, abs=1)
    computes = sorted((s.start_ns, s.end_ns) for s in spans if s.stream == "compute" and s.kind in ("compute", "wait"))
    assert all(one[1] <= other[0] + 1 for one, other in pairwise(computes))
    assert len(chrome_trace(spans)["traceEvents"]) > len(spans)


def test_a_simulated_schedule_stands_by_stages() -> None:
    ((_, spans),) = simulated_step(world_of(STAGED), CLUSTER).items()
    assert {(span.rank, span.stream) for span in spans} == {(0, "stage 0"), (1, "stage 1")}
    assert Counter(span.label.partition(" ")[0] for span in spans) == {"forward": 8, "backward": 8}
    share = idle_share(spans, 2)
    assert share is not None
    assert 0 < share < 1


def test_what_was_measured_between_marks_calibrates(world: PlanOnMesh) -> None:
    step = world.reference(0)
    graph, marks = step.graphs["joint"].graph, marks_of(world, 0, "joint", UNBUCKETED)
    steps = [[1e-4 * (1 + number % 3) * scale for number in range(len(marks))] for scale in (1.0, 2.0, 9.0)]
    stretches = list(stretches_of("joint", graph, marks, steps))
    assert [one.nodes[0] for one in stretches] == [mark.node for mark in marks]
    nodes = [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]
    assert [name for one in stretches for name in one.nodes] == nodes[nodes.index(marks[0].node) :]
    assert [one.seconds for one in stretches] == pytest.approx(steps[1])
    uneven = [[seconds, *steps[0][1:]] for seconds in (1e-4, 2e-4, 9e-4)]
    assert next(stretches_of("joint", graph, marks, uneven)).seconds == pytest.approx(2e-4)
    shaken = [[*steps[1]] for _ in range(3)]
    for number, one in enumerate(shaken):
        one[number] += 1.0  # every step is held up, each elsewhere
    longer = sum(one.seconds for one in stretches_of("joint", graph, marks, shaken))
    assert longer == pytest.approx(sum(steps[1]) + 1.0)
    assert calibrate(step, stretches, CLUSTER).errors["launches"].count == sum(mark.kind == "launch" for mark in marks)


def test_the_report_has_the_simulated_step_of_a_plan_with_a_cluster_and_of_no_other(tmp_path: Path) -> None:
    settings, root = RunSettings(tmp_path, tmp_path, tmp_path), Path(__file__).parents[3]
    (plan,) = parse_plans(f'{PLAN}\n[cluster]\npreset = "h100-sxm"\n', root / "plan.toml")
    cluster = cluster_of(plan)
    assert cluster is not None
    run = PlanRun(plan, settings, Pools())
    spans = run.simulated_spans()
    assert spans == simulated_step(run.world, cluster)
    assert list(spans) == ["simulated on h100-sxm"]
    assert PlanRun(replace(plan, cluster=None), settings, Pools()).simulated_spans() == {}
