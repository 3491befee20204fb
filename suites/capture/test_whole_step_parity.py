"""Whole steps, optimizer and all, against eager torch on real ranks: losses, gradients, parameters and state, bit for bit."""

from __future__ import annotations

import pytest
import torch
from parity import STEPS, differing, run, step_of
from whole_step_cases import CASES, Case, named_by, payloads_of

from pytest_fxbucket.ranks.pools import Pools

DECAY = 0.75  # of the learning rate after each step: one that is baked into the graph shows


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_captured_step_leaves_what_eager_torch_leaves(case: Case, pools: Pools) -> None:
    plan = case.plan
    step = step_of(plan)
    trainable = [parameter.fqn for parameter in step.parameters if parameter.trainable]
    rates = [value.dtype for value in step.inputs["joint"] if value.role == "hyper"]
    assert rates == [torch.float64] * sum(len(groups) for _, _, groups in case.optimizers)
    payload, told = payloads_of(plan, step, DECAY)
    told |= {
        "optimizers": named_by(case.optimizers, trainable),
        "wrapped": "ddp" if plan.parallel.mode == "replicate" else "fsdp2",
    }
    ours, eager = run(pools, "whole_step_jobs:graph_steps", payload), run(pools, "whole_step_jobs:eager_steps", told)
    seen = 0
    for rank, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        for number in range(STEPS):
            for what in ("loss", "gradient", "parameter", "state"):
                a, b = (dict(sorted(one[number][what].items())) for one in (mine, theirs))
                assert differing(a, b) == [], f"{what} of rank {rank} in step {number}"
                seen += len(a)
    assert seen >= len(ours) * STEPS * (1 + 2 * len(trainable))
    assert any(bool((mine[0]["parameter"][fqn] != mine[-1]["parameter"][fqn]).any()) for mine in ours for fqn in trainable[:1])
