"""``fxbucket simulate --calibrate``: a trace of the plan's step gives a cluster figures; ``--save`` makes a preset of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.bench.calibrated import calibrated_by
from pytest_fxbucket.bench.measure import digests
from pytest_fxbucket.bench.timeline.marks import UNBUCKETED, Span, marks_of
from pytest_fxbucket.bench.timeline.spans import chrome_trace, to_json
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost.cluster import preset_text
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.joined_step import as_run
from pytest_fxbucket.plan.folders import folders_of
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate import cluster_named
from pytest_fxbucket.step.roles import Phase
from pytest_fxbucket.user_code import user_code
from suites.cli.test_simulate import MODEL, document, said
from suites.plans.llama import ROOT, llama
from suites.plans.traced import TRACED

LAUNCH_NS, OTHER_NS = 200_000, 50_000
Capsys = pytest.CaptureFixture[str]
Refused = Callable[[list[str], int, str], str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> PlanOnMesh:
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(f'{llama("layers = 1, dim = 16", 4)}\n[cluster]\npreset = "cpu-gloo"\n')
    (plan,) = load_plans(path)
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


def clocked(world: PlanOnMesh, variant: str, phase: Phase = "joint") -> list[Span]:
    """A step of rank 0 in which each launch took 0.2 ms, and all else between two marks 0.05 ms."""
    spans, now = [], 0
    for mark in marks_of(world, 0, phase, variant):
        end = now + (LAUNCH_NS if mark.kind == "launch" else OTHER_NS)
        spans.append(mark.span(0, "compute", now, end))
        now = end
    return spans


def written(path: Path, spans: Iterable[Span], **about: str) -> Path:
    alike = [replace(span, rank=rank) for span in spans for rank in range(4)]  # all ranks run these graphs
    path.write_text(to_json(chrome_trace(alike, about)))
    return path


@pytest.mark.parametrize("variant", ["bucketed", UNBUCKETED])
def test_a_trace_of_a_report_calibrates_and_what_it_finds_is_a_preset(
    world: PlanOnMesh, variant: str, tmp_path: Path, capsys: Capsys
) -> None:
    spans, plan, saved = clocked(world, variant), str(world.plan.path), tmp_path / "ours.toml"
    trace = written(tmp_path / "step.trace.json", spans, variant=variant)
    found = document(capsys, "simulate", plan, "--calibrate", str(trace), "--save", str(saved))
    assert found["cluster"] == "cpu-gloo as in step.trace.json"
    errors = found["calibrated"]["errors"]
    assert errors["launches"]["count"] == sum(span.kind == "launch" for span in spans)
    assert errors["launches"]["median"] < 0.01
    assert found["calibrated"]["unmatched"] == []
    side = found["classes"][0]["bucketed" if variant == "bucketed" else "unbucketed"]
    assert side["seconds"] == pytest.approx(
        max(span.end_ns for span in spans) / 1e9, rel=0.05
    )  # estimated: what a model leaves
    text = said(capsys, "simulate", plan, "--cluster", str(saved))
    assert f"{1000 * side['seconds']:,.3f} ms" in text
    assert "# Calibrated; error left: compute " in saved.read_text()


def test_another_world_is_simulated_by_what_the_plans_own_taught(world: PlanOnMesh, tmp_path: Path, capsys: Capsys) -> None:
    """The trace names the plan's own graphs: by those of another world it would be refused."""
    graphs = " ".join(digests("bucketed", world, 0))
    trace = written(tmp_path / "step.trace.json", clocked(world, "bucketed"), variant="bucketed", graphs=graphs)
    lines = said(capsys, "simulate", str(world.plan.path), "--calibrate", str(trace), "--world", "dp_shard=8").splitlines()
    assert lines[0].endswith("plan.toml: 8 ranks on cpu-gloo as in step.trace.json, pass manual")
    assert lines[1].startswith("error left: compute ")


def test_a_trace_of_a_report_is_of_the_mesh_that_ranks_run_and_of_its_sizes(
    tmp_path: Path, capsys: Capsys, refused: Refused
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f'{MODEL}\n[run]\nworld = {{ dp_shard = 2 }}\n[cluster]\npreset = "cpu-gloo"\n')
    (plan,) = load_plans(path)
    ran = PlanOnMesh(CapturedPlan(plan, mesh_of(plan, run=True)), "manual")
    graphs = " ".join(digests("bucketed", ran, 0))
    trace = written(tmp_path / "step.trace.json", clocked(ran, "bucketed"), variant="bucketed", graphs=graphs)
    asked = ["simulate", str(path), "--calibrate", str(trace)]
    assert document(capsys, *asked)["calibrated"]["errors"]
    path.write_text(path.read_text().replace("dim = 16", "dim = 256").replace("ringed:batch", "ringed:wide_batch"))
    refused(asked, 1, "the trace is of another graph: its launches are the same, but sizes or operators are not")


@pytest.mark.parametrize(("name", "phase"), [("iterations", "steady"), ("split", "joint")])
def test_a_step_of_several_graphs_is_calibrated_by_the_one_that_ranks_are_timed_on(
    name: str, phase: Phase, tmp_path: Path
) -> None:
    plan = load_plans(ROOT / f"fixtures/plans/{name}.toml")[0]
    with user_code(folders_of(plan.path)):
        world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")
        ran = as_run(PlanOnMesh(CapturedPlan(plan, mesh_of(plan, run=True)), "manual"))
        for variant, of in (("bucketed", phase), (UNBUCKETED, "joint")):
            graphs = " ".join(digests(variant, ran, 0))
            trace = written(tmp_path / "step.trace.json", clocked(ran, variant, of), variant=variant, graphs=graphs)
            found = calibrated_by(trace, world, cluster_named("cpu-gloo", tmp_path))
            assert found.errors["launches"] is not None


def without_last(spans: list[Span]) -> list[Span]:
    return spans[:-1]


def turned(spans: list[Span]) -> list[Span]:
    first = next(number for number, span in enumerate(spans) if span.kind == "launch")
    return [replace(span, label="all_gather elsewhere") if number == first else span for number, span in enumerate(spans)]


def on_a_gpu(spans: list[Span]) -> list[Span]:
    return [replace(span, stream="stream 7") for span in spans]


@pytest.mark.parametrize(
    ("change", "variant", "cluster", "words"),
    [
        (
            None,
            "simulated on b200",
            "cpu-gloo",
            'is of "simulated on b200"; take the trace of bucketed or unbucketed beside it',
        ),
        (without_last, "bucketed", "cpu-gloo", "the trace is of another graph: "),
        (
            turned,
            "bucketed",
            "cpu-gloo",
            "is launch all_gather elsewhere, and the graph has launch all_gather tok_embeddings there",
        ),
        (on_a_gpu, "bucketed", "cpu-gloo", "has no clocks of rank 0 between the nodes of its graph"),
        (None, "bucketed", "h100-sxm", "the trace is of ranks whose host computes, but h100-sxm computes on devices"),
    ],
    ids=["simulated", "shorter", "renamed", "gpu", "devices"],
)
def test_a_trace_of_something_else_is_refused(
    world: PlanOnMesh,
    change: Callable[[list[Span]], list[Span]] | None,
    variant: str,
    cluster: str,
    words: str,
    tmp_path: Path,
) -> None:
    spans = clocked(world, "bucketed")
    trace = written(tmp_path / "step.trace.json", change(spans) if change else spans, variant=variant)
    with pytest.raises(SimulationError, match=re.escape(words)) as raised:
        calibrated_by(trace, world, cluster_named(cluster, tmp_path))
    assert str(trace) in str(raised.value)


def test_a_preset_is_never_written_over_and_ends_in_toml(world: PlanOnMesh, tmp_path: Path, refused: Refused) -> None:
    plan, there = str(world.plan.path), tmp_path / "there.toml"
    there.write_text("# mine\n")
    refused(["simulate", plan, "--save", str(there)], 2, f"--save {there} is there already; remove it, or name another file")
    assert there.read_text() == "# mine\n"
    refused(["simulate", plan, "--save", str(tmp_path / "ours")], 2, "a preset file ends in .toml")
    refused(["simulate", plan, "--save", str(tmp_path / "no" / "ours.toml")], 2, "cannot be written: there is no folder ")


def test_a_preset_is_written_when_all_else_is_well_and_refused_before_work_begins(tmp_path: Path, refused: Refused) -> None:
    path, saved = tmp_path / "plan.toml", tmp_path / "ours.toml"
    path.write_text(f'{TRACED}\n[cluster]\npreset = "cpu-gloo"\ncost = "suites.simulate.own_costs:not_a_number"\n')
    refused(["simulate", str(path), "--save", str(saved)], 1, "not_a_number")
    assert not saved.exists()
    path.write_text("[model]\nfactory = 'nowhere:build'\nbatch = 'nowhere:batch'\n[bucket]\nunplanned = 'root'\n")
    refused(["simulate", str(path), "--save", str(saved.parent)], 2, "a preset file ends in .toml")


def test_a_preset_that_was_written_is_read_back_with_every_figure(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"launch": 1e-6, "view": 2e-6, "enqueue": 3e-6, "enqueue_per_byte": 4e-12, "waiting": 5e-6}
    odd |= {"least": 6e-6, "collective": 7e-6, "compute_efficiency": 0.25, "memory_efficiency": 0.5, "network_efficiency": 0.75}
    cluster = replace(cluster_named("b200", tmp_path), name="ours", **odd)
    (tmp_path / "ours.toml").write_text(preset_text(cluster, ["Two lines", "of comment."]))
    found = cluster_named("ours.toml", tmp_path)
    assert json.dumps(figures(found), sort_keys=True) == json.dumps(figures(cluster), sort_keys=True)


def figures(cluster: Any) -> dict[str, Any]:
    """All that a cluster has, with six digits."""
    found: dict[str, Any] = {}
    for name in cluster.__slots__:
        value = getattr(cluster, name)
        parts = {"": value} if isinstance(value, str | bool | int | float) else dict(value if isinstance(value, dict) else {})
        if not parts:
            parts = {"bandwidth": value.bandwidth, "latency": value.latency}
        found |= {f"{name}.{key}": f"{one:.6g}" if isinstance(one, float) else one for key, one in parts.items()}
    return found
