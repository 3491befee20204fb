"""Plans with overridden modules against FSDP2 of the same model, on real ranks, bit for bit; see test_parity too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from override_plans import CALLABLES, override, plan_of
from parity import PLANS, assert_same, differences, payload_of, run, step_of

from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools

ATTENDS = override(type="Attends", output="attended")
MIXED = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
CALLED: dict[str, Plan] = {
    "several inputs and results, by name": plan_of("around_attention", ATTENDS),
    "the same in bfloat16, 3 ranks": plan_of("around_attention", ATTENDS, dp_shard=3, **MIXED),
    "the same in microbatches": plan_of("around_attention", ATTENDS, microbatches=2, **MIXED),
    "gathered once": plan_of("deep", override(type="Chooses"), reshard_after_forward=False, **MIXED),
    "within what is computed again, microbatches": plan_of(
        "deep", override(module="layers.*.1"), checkpoint="layers.*", microbatches=2, **MIXED
    ),
    "itself computed again": plan_of("deep", override(module="layers.*.1"), checkpoint="layers.*.1"),
    "beside linears that tp parts": plan_of(
        "deep_pairs",
        override(type="Chooses"),
        tp=2,
        tp_plan={"layers.*.0": "colwise", "layers.*.1": "rowwise"},
    ),
    "with a parameter of two names": plan_of("holds Ties", override(module="held")),
    "called twice, with a parameter that is read elsewhere": plan_of("twice", override(type="Chooses"), **MIXED),
}
SUBGRAPHS: dict[str, tuple[Plan, str]] = {
    "routed": (PLANS["override.subgraph"], "fixtures.models.routed:build_dense"),
    "unread": (
        plan_of("holds Chooses", override("low_alone", module="held"), dp_shard=3, **MIXED),
        f"{CALLABLES}:holds_low_alone",
    ),
}


def payload(plan: Plan, **changes: Any) -> dict[str, Any]:
    return payload_of(plan, step_of(plan), **changes)


@pytest.mark.parametrize("plan", CALLED.values(), ids=CALLED.keys())
def test_a_step_that_calls_real_modules_is_the_step_that_fully_shard_takes(plan: Plan, pools: Pools) -> None:
    rowwise = [f"layers.{i}.1" for i in (0, 1)] if plan.parallel.tp > 1 else []
    assert_same(pools, payload(plan, biases_last=rowwise), "by_torch:fsdp2_steps")


@pytest.mark.parametrize(("plan", "eager"), SUBGRAPHS.values(), ids=SUBGRAPHS.keys())
def test_a_step_with_subgraphs_is_that_of_the_modules_that_compute_so(plan: Plan, eager: str, pools: Pools) -> None:
    own = payload(plan)
    ours = run(pools, "parity_jobs:graph_steps", own)
    theirs = run(pools, "fixtures.reference.by_torch:fsdp2_steps", own | {"factory": eager})
    assert list(differences(ours, theirs)) == []


def test_each_rank_counts_its_own_tokens_from_step_to_step(pools: Pools) -> None:
    """2 experts for each of 32 tokens in 3 steps, in each of 2 layers; checkpointing counts none twice."""
    plan = PLANS["override.subgraph"]
    again = replace(plan, step=PLANS["override.checkpoint"].step)
    counts = []
    for one in (plan, again):
        ranks = run(pools, "parity_jobs:graph_steps", payload(one))
        counts.append([rank["state"] for rank in ranks])
        for state in counts[-1]:
            assert list(state) == ["layers.0.moe.tokens", "layers.1.moe.tokens"]
            assert all(tokens.sum() == 2 * 32 * 3 for tokens in state.values())
        assert not torch.equal(*(state["layers.0.moe.tokens"] for state in counts[-1]))
