"""Gradients sharded over a mesh are clipped by the same norm, to the bit, that torch finds for DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import PLANS, step_of

from pytest_fxbucket.capture.parallel.parts import Parts
from pytest_fxbucket.plan_on_mesh import mesh_of
from suites.capture.functional_graphs import same

ROOT = Path(__file__).resolve().parents[2]


SIZES = {"dp": 2, "tp": 2}
PLACED = {"norm.weight": ((9,), {"dp": 0}), "wq": ((5, 7), {"dp": 0, "tp": 0}), "wo": ((4, 6), {"dp": 0, "tp": 1})}


def test_what_is_not_sharded_counts_once_and_each_bit_is_torchs(pools):
    """On two meshes, of which no plan may have torch's own step; test_beside_torch has the others."""
    payload = {"mesh": SIZES, "placed": PLACED, "max_norms": [0.7, 1e6]}
    pool = pools.get(4)
    try:
        results = pool.run("suites.capture.clip_jobs:clipped", [payload] * 4, timeout_s=60, paths=[str(ROOT)])
    finally:
        pool.close()  # DTensor keeps the process groups of meshes that were alike
    for result in (one for rank in results for one in rank):
        assert same(result["eager"], result["graph"])
        assert result["reductions"] == 2


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
