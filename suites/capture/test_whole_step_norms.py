"""Clipping where eager torch has no twin: by the norm of whole gradients, each number in it once, whoever has copies.

``clip_grad_norm_`` raises over parameters of two meshes, as FSDP2 with tensor parallelism has them, and torch has no experts
that tokens travel to. So the norm is taken here of the whole gradients, in float64. Not bit for bit: whole gradients are summed
in another order than parts of them.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from parity import STEPS, run, step_of
from whole_step_cases import CLIPPED, LLAMA, MOE, TP, Case, payloads_of

from pytest_fxbucket.capture.parallel.parts import Parts
from pytest_fxbucket.plan_on_mesh import mesh_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.roles import StepGraph

SGD = '[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 1.0 }\n'
WITH_TP, EXPERTS = Case(LLAMA + TP + SGD + CLIPPED), Case(MOE + SGD + CLIPPED)

CASES = {"tensor parallelism": WITH_TP, "experts": EXPERTS}
SHARDED = {
    "tensor parallelism": {
        "layers.0.attention.wq.weight": ("dp_shard", "tp"),
        "layers.0.attention.wo.weight": ("dp_shard", "tp"),
        "layers.0.attention_norm.weight": ("dp_shard",),
    },
    "experts": {"layers.0.experts.w1": ("dp_shard",), "layers.0.norm.bias": ("dp_shard",)},
}


@cache
def captured(case: str) -> StepGraph:
    return step_of(CASES[case].plan)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_summed_over_the_dimensions_that_shard_it(case: str) -> None:
    plan = CASES[case].plan
    clip = Parts.of(plan.parallel, mesh_of(plan)).clip(0.5, captured(case).parameters)
    assert {fqn: clip.sharded[fqn] for fqn in SHARDED[case]} == SHARDED[case]
    assert [dim.name for dim in clip.dims] == (["dp_shard", "tp"] if plan.parallel.tp > 1 else ["dp_shard"])


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_clipped_by_the_norm_of_whole_gradients(case: str, pools: Pools) -> None:
    step = captured(case)
    results = run(pools, "whole_step_jobs:graph_steps", payloads_of(CASES[case].plan, step, decay=1.0)[0])
    for number in range(1, STEPS):
        squares = 0.0
        for parameter in step.parameters:
            parts = [result[number]["gradient"][parameter.fqn].double() for result in results]
            copies = sum(part.numel() for part in parts) / math.prod(parameter.shape)
            squares += sum(float(part.square().sum()) for part in parts) / copies
        norm = math.sqrt(squares)
        assert norm > 0.5, "nothing is clipped"
        for result in results:
            before, after, gradients = result[number - 1]["parameter"], result[number]["parameter"], result[number]["gradient"]
            for fqn, gradient in gradients.items():
                torch.testing.assert_close(before[fqn] - after[fqn], gradient * (0.5 / norm), rtol=1e-4, atol=1e-6, msg=fqn)
