"""Gradients sharded over a mesh are clipped by the same norm, to the bit, that torch finds for DTensors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_fxbucket.capture.parallel.parts import ParameterShards
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_model import Optimizer
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import encode_module
from pytest_fxbucket.step_runner import StepTask, fields_of
from suites.capture.functional_graphs import same
from suites.capture.parity import small, step_of
from suites.capture.steps import plan_of

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"dp": 2, "tp": 2}
PLACED = {"norm.weight": ((9,), {"dp": 0}), "wq": ((5, 7), {"dp": 0, "tp": 0}), "wo": ((4, 6), {"dp": 0, "tp": 1})}


def test_what_is_not_sharded_counts_once_and_each_bit_is_torchs(pools: Pools) -> None:
    """On two meshes, of which no plan may have torch's own step; test_steps_beside_torch has the others."""
    payload = {"mesh": SIZES, "placed": PLACED, "max_norms": [0.7, 1e6]}
    pool = pools.get(4, "local")
    try:
        results = pool.run("suites.capture.clip_jobs:clipped", [payload] * 4, timeout_s=60, paths=[str(ROOT)])
    finally:
        pool.close()  # DTensor keeps the process groups of meshes that were alike
    for result in (one for rank in results for one in rank):
        assert same(result["eager"], result["graph"])
        assert result["reductions"] == 2


# Whole steps, where eager torch has no twin: its clip_grad_norm_ raises over parameters of two meshes.
NORM = 0.05


def clipped(plan: Plan) -> Plan:
    """``plan``, its gradients clipped to :data:`NORM`."""
    momentum = Optimizer("torch.optim:SGD", {"lr": 0.1, "momentum": 0.9})
    return replace(plan, step=replace(plan.step, clip_norm=NORM), optimizer=(momentum,))


SHARDED = {
    "tp": {
        "layers.0.attention.wq.weight": ("dp_shard", "tp"),
        "layers.0.attention.wo.weight": ("dp_shard", "tp"),
        "layers.0.attention_norm.weight": ("dp_shard",),
    },
    "moe": {"layers.0.experts.w1": ("dp_shard",), "layers.0.norm.bias": ("dp_shard",)},
}


@pytest.mark.parametrize("name", SHARDED)
def test_gradients_are_clipped_by_the_norm_of_whole_ones_each_number_in_it_once(name: str, pools: Pools) -> None:
    """Not bit for bit: whole gradients are summed in another order than parts of them."""
    plan = clipped(small(name, param_dtype=None, reduce_dtype=None))
    step = step_of(plan)
    clip = ParameterShards.of(plan.parallel, mesh_of(plan)).clip(NORM, step.parameters)
    assert {fqn: clip.sharded[fqn] for fqn in SHARDED[name]} == SHARDED[name]
    task = StepTask(**fields_of(plan, mesh_of(plan), step, "joint"))
    payload = (task, encode_module(step.graphs["joint"]))
    ranks = pools.get(4, "local").run("suites.capture.clip_jobs:clipped_step", [payload] * 4, timeout_s=60, paths=[str(ROOT)])
    squares = 0.0
    for parameter in step.parameters:
        parts = [rank[parameter.fqn][0].double() for rank in ranks]
        copies = sum(part.numel() for part in parts) / math.prod(parameter.shape)
        squares += sum(float(part.square().sum()) for part in parts) / copies
    assert math.sqrt(squares) > 2 * NORM, "nothing is clipped"
    for rank in ranks:
        for fqn, (gradient, given) in rank.items():
            torch.testing.assert_close(given, gradient * (NORM / math.sqrt(squares)), rtol=1e-5, atol=0.0, msg=fqn)


@pytest.mark.parametrize(("mode", "shards", "reductions"), [("hybrid_shard", 2, 1), ("replicate", 1, 0)])
def test_the_norm_is_summed_over_what_shards_gradients_and_over_no_copies(mode: str, shards: int, reductions: int) -> None:
    """Gradients are averaged: what is summed by an all-reduce is the norm."""
    plan = replace(plan_of("residual", mode=mode, dp_replicate=2, dp_shard=shards), bucket=Bucket(unplanned="root"))
    calls = [node for node in step_of(clipped(plan)).graphs["joint"].graph.nodes if "all_reduce" in str(node.target)]
    assert [node.args[1] for node in calls].count("sum") == reductions
