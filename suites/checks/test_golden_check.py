"""The text of a plan's golden is the same on every rank and for every hash seed, and names no group that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.plan.factories import first_on_path
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, text_of
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.portable import digest
from suites.checks.small_llama import make_project

ROOT = Path(__file__).parents[2]


def told(folder: Path) -> str:
    world = PlanOnMesh(CapturedPlan(load_plans(folder / "small.toml")[0], shard_mesh(4)), "manual")
    captured = f"{digest(world.unbucketed(0, 'joint'))} {world.step(0).inputs} {world.step(0).modules}"
    return "=====\n".join([text_of(world, 0, "x"), text_of(world, 3, "x"), captured]) + world.passed(0)["joint"].digest


def test_text_and_captured_graph_are_the_same_on_every_rank_and_for_every_hash_seed(tmp_path: Path) -> None:
    path = make_project(tmp_path)
    tied = path.read_text().replace("kv_heads = 1", "kv_heads = 1, tied = true").replace("norm+output", "norm")
    path.write_text(tied.replace("tok_embeddings", "tok_embeddings+output"))
    code = "from pathlib import Path; from suites.checks.test_golden_check import told; print(told(Path('.')), end='')"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    env, asked = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}, [sys.executable, "-c", code]
    there = subprocess.run(asked, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    here = told(tmp_path)
    first, second, captured = here.split("=====\n")
    assert first == second != ""
    assert "Value" in captured
    assert here == there


GROUPS = """
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from pytest_fxbucket.capture.given_graphs import TracedStep

c10d = torch.ops._c10d_functional

def step():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[dist.get_rank() // 2].group_name
    def loss(shard, x):
        return [(x @ c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, group)).t()).sum()]
    inputs = (torch.randn(2, 4), torch.randn(3, 4))
    graph_module = make_fx(loss, tracing_mode="fake")(*inputs)
    (launch,) = graph_module.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    launch.update_arg(2, "of nobody here")
    roles = {"joint": {"inputs": ["param", "batch"], "outputs": ["loss"]}}
    return TracedStep({"joint": graph_module}, {"joint": inputs}, roles, {"joint": {"inputs": ["a.w", "x"], "outputs": [""]}})
"""


def test_a_group_whose_ranks_nobody_knows_has_no_golden(tmp_path: Path) -> None:
    """All such groups would read alike, and one could stand for another."""
    (tmp_path / "halves_of_a_mesh.py").write_text(GROUPS)
    (tmp_path / "p.toml").write_text(
        '[graph]\nfactory = "halves_of_a_mesh:step"\n[parallel]\ndp_shard = 4\n[bucket]\nplan = ["a"]\n'
    )
    world = PlanOnMesh(CapturedPlan(load_plans(tmp_path / "p.toml")[0], shard_mesh(4)), "manual")
    with (
        first_on_path([tmp_path]),
        pytest.raises(GoldenError, match=r"all_gather .* runs on process group"),
    ):
        text_of(world, 0, "p.toml")
