"""Rows of a plan file that trace the same share one captured step, and no other rows do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket import captured_plan
from pytest_fxbucket.capture.last_step import LastStep, as_traced
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.pytest_plugin.options import Options
from pytest_fxbucket.pytest_plugin.session import FxSession, key_of
from pytest_fxbucket.step.portable import digest, encode_module
from suites.mutate.small_plans import IN_STAGES
from suites.plans.llama import llama

PLAN = llama("layers = 1, dim = 16, heads = 2, kv_heads = 1")
UPDATED = """
[optimizer]
factory = "torch.optim:SGD"
args = { lr = 0.5 }
groups = "entry"
"""


def plans_of(folder: Path, row: str, more: str = "") -> list[Plan]:
    path = folder / "rows.toml"
    path.write_text(f'{PLAN}{more}\n[[matrix]]\nid = "row"\n{row}\n')
    return load_plans(path)


def is_same(plans: Sequence[Plan]) -> bool:
    first, second = plans
    return as_traced(first) == as_traced(second)


@pytest.mark.parametrize(
    "row",
    [
        "bucket.cap_mb = 0.01",
        "overlap.prefetch = 2",
        'transform = [{ name = "merge_duplicates" }, { name = "bucket" }]',
        'run.reduce = "ring"',
        "run.steps = 5",
        "checks.same = false",
        'cluster.preset = "b200"',
        'model.may_be_idle = ["layers.0"]',
    ],
)
def test_what_comes_behind_tracing_does_not_trace_again(tmp_path, row):
    assert is_same(plans_of(tmp_path, row))


@pytest.mark.parametrize(
    "row",
    [
        "model.args = { layers = 1, dim = 32, heads = 2, kv_heads = 1 }",
        "parallel.dp_shard = 4",
        'parallel.param_dtype = "bfloat16"',
        'parallel.reduce_dtype = "bfloat16"',
        "parallel.reshard_after_forward = false",
        "run.seed = 1",
        'bucket.plan = ["tok_embeddings+layers.0", "norm+output"]',
        'bucket.plan = ["tok_embeddings", "layers.[0-0]"]\nbucket.unplanned = "root"',
        "step.microbatches = 2",
        'step.checkpoint = ["layers.*"]',
        'optimizer = [{ factory = "torch.optim:SGD", args = { lr = 0.5 } }]',
        'override = [{ module = ["layers.0.feed_forward"] }]',
    ],
)
def test_what_is_traced_otherwise_is_traced_again(tmp_path, row):
    assert not is_same(plans_of(tmp_path, row))


@pytest.mark.parametrize("row", ["bucket.cap_mb = 0.01", 'overlap.updates = "ready"'])
def test_an_optimizer_whose_groups_are_entries_may_follow_all_of_the_bucket(tmp_path, row):
    assert not is_same(plans_of(tmp_path, row, UPDATED))


def test_a_transformation_does_not_trace_an_update_again(tmp_path):
    assert is_same(plans_of(tmp_path, 'transform = [{ name = "merge_duplicates" }, { name = "bucket" }]', UPDATED))


def test_the_next_row_has_the_last_step_as_it_was_traced(tmp_path):
    last, plans = LastStep(), plans_of(tmp_path, "bucket.cap_mb = 0.01")
    first, second, third = (
        PlanOnMesh(CapturedPlan(plan, mesh_of(plan), last=last), "manual")
        for plan in (*plans, replace(plans[0], run=Run(seed=1)))
    )
    before = digest(encode_module(first.step(0).graphs["joint"]))
    first.final_step(0)
    assert second.step(0) is first.step(0)
    assert digest(encode_module(second.step(0).graphs["joint"])) == before
    assert first.final(0)["joint"].digest != second.final(0)["joint"].digest
    given: list[Plan] = []
    last.get(plans[1], mesh_of(plans[1]), 1, lambda plan: given.append(plan) or first.step(0))
    assert given == [as_traced(plans[0])]
    assert third.step(0) is not first.step(0)


def test_plans_under_one_captured_plan_are_cut_into_stages_once(tmp_path, monkeypatch):
    path = tmp_path / "stages.toml"
    path.write_text(IN_STAGES + '\n[[matrix]]\nid = "row"\nbucket.cap_mb = 0.01\n')
    cut, capture = [], captured_plan.capture_stages
    monkeypatch.setattr(captured_plan, "capture_stages", lambda *args: cut.append(args) or capture(*args))
    first, second = load_plans(path)
    captured = CapturedPlan(first, mesh_of(first))
    stages, others = captured.staged, captured.under(second).staged
    assert len(cut) == 1
    graphs = [one.of_rank(captured.mesh, 1).graphs for one in (stages, others)]
    assert graphs[0].keys() == graphs[1].keys()
    assert all(digest(encode_module(graph)) == digest(encode_module(graphs[1][phase])) for phase, graph in graphs[0].items())


def test_a_pytest_session_hands_it_on_to_the_next_row(tmp_path):
    fx = FxSession(Options(tmp_path, tmp_path / "golden", tmp_path / "artifacts"))
    first, second = plans_of(tmp_path, "bucket.cap_mb = 0.01")
    step = fx.run_of(first).step
    fx.release(key_of(first))
    assert fx.run_of(second).step is step
    fx.close()
