"""Gradients sharded over a mesh are clipped by the same norm, to the bit, that torch finds for DTensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from parity import PLANS, step_of

from pytest_fxbucket.capture.parallel.parts import Parts
from pytest_fxbucket.plan_on_mesh import mesh_of
from suites.capture.functional_graphs import same

ROOT = Path(__file__).resolve().parents[2]


FSDP = {"w": ((5, 7), {"dp": 0}), "norm.weight": ((9,), {"dp": 0}), "out.bias": ((33,), {"dp": 0})}
WITH_TP = {"norm.weight": ((9,), {"dp": 0}), "wq": ((5, 7), {"dp": 0, "tp": 0}), "wo": ((4, 6), {"dp": 0, "tp": 1})}
REPLICATED = {"w": ((5, 7), {"dp_shard": 0}), "norm.weight": ((9,), {"dp_shard": 0})}
MESHES = {
    "fully_shard": ({"dp": 2}, FSDP, 1),
    "fully_shard with tensor parallelism": ({"dp": 2, "tp": 2}, WITH_TP, 2),
    "hybrid_shard": ({"dp_replicate": 2, "dp_shard": 2}, REPLICATED, 1),
    "replicate": ({"dp_replicate": 2}, {"w": ((5, 7), {}), "b": ((3,), {})}, 0),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_not_sharded_counts_once_and_each_bit_is_torchs(mesh, pools):
    sizes, placed, reductions = MESHES[mesh]
    world = math.prod(sizes.values())
    payload = {"mesh": sizes, "placed": placed, "max_norms": [0.7, 1e6]}
    pool = pools.get(world)
    try:
        results = pool.run("suites.capture.clip_jobs:clipped", [payload] * world, timeout_s=60, paths=[str(ROOT)])
    finally:
        pool.close()  # DTensor keeps the process groups of meshes that were alike
    for result in (one for rank in results for one in rank):
        assert same(result["eager"], result["graph"])
        assert result["reductions"] == reductions


SHARDED = {
    "tp": {
        "layers.0.attention.wq.weight": ("dp_shard", "tp"),
        "layers.0.attention.wo.weight": ("dp_shard", "tp"),
        "layers.0.attention_norm.weight": ("dp_shard",),
    },
    "moe": {"layers.0.experts.w1": ("dp_shard",), "layers.0.norm.bias": ("dp_shard",)},
}


@pytest.mark.parametrize("name", SHARDED)
def test_a_gradient_is_summed_over_the_dimensions_that_shard_it(name):
    """Where eager torch has no twin: its ``clip_grad_norm_`` raises over parameters of two meshes, and it parts no experts."""
    plan = PLANS[name]
    clip = Parts.of(plan.parallel, mesh_of(plan)).clip(0.5, step_of(plan).parameters)
    assert {fqn: clip.sharded[fqn] for fqn in SHARDED[name]} == SHARDED[name]
    assert [dim.name for dim in clip.dims] == (["dp_shard", "tp"] if name == "tp" else ["dp_shard"])
