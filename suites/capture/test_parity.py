"""The captured, unbucketed step where torch has no step of its own: against sums by hand on the same ranks, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from suites.capture.override_plans import CALLABLES, override, plan_of
from suites.capture.parity import PLANS, assert_same, by_hand, differences, payload_of, run, small, step_of


def test_a_mode_of_the_users_own_that_divides_before_it_adds_is_the_step_that_fully_shard_takes(pools: Pools) -> None:
    plan = small("mode")
    assert_same(pools, payload_of(plan, step_of(plan)), "by_torch:fsdp2_steps")


LAST = small("buckets", mode="own_modes:LastDimension", param_dtype=None, reduce_dtype=None)
OVER_TP = small("tp.replicate")
BY_HAND = {
    "copies parted over tp": (OVER_TP, by_hand(OVER_TP, "dp_replicate", share=None)),
    "shards of the last dimension": (LAST, by_hand(LAST, "dp_shard", share=(-1, 4, range(4)))),
}


@pytest.mark.parametrize(("plan", "more"), BY_HAND.values(), ids=BY_HAND.keys())
def test_the_traced_step_is_whole_parameters_and_averages_by_hand(plan: Plan, more: dict[str, object], pools: Pools) -> None:
    assert_same(pools, payload_of(plan, step_of(plan), **more), "by_hand:by_hand_steps")


def test_gradients_averaged_over_copies_first_are_those_of_two_averages_by_hand(pools: Pools) -> None:
    """FSDP2 has only the other order: (0 + 1) + (2 + 3), where this is (0 + 2) + (1 + 3).

    In float32, where both round. Of bfloat16 gradients float32 holds sums of four without rounding: there no order can be seen.
    """
    plan = small("hybrid.replicate_first", param_dtype=None)
    share = (0, 2, [rank % 2 for rank in range(4)])
    payload = payload_of(plan, step_of(plan), **by_hand(plan, "dp_replicate", "dp_shard", share=share))
    ours = assert_same(pools, payload, "by_hand:by_hand_steps")
    found = list(differences(ours, run(pools, "fixtures.reference.by_torch:fsdp2_steps", payload)))
    assert not [one for one in found if one.startswith("step 0") and "gradient" not in one], "losses before the first reduction"
    assert [one for one in found if one.startswith("step 0") and "gradient" in one], "the order can be seen"


def test_a_parameter_that_a_subgraph_does_not_read_is_one_that_fully_shard_gives_no_gradient(pools: Pools) -> None:
    mixed = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    plan = plan_of("holds Chooses", override("low_alone", module="held"), dp_shard=3, **mixed)
    assert_same(pools, payload_of(plan, step_of(plan)), "by_torch:fsdp2_steps", factory=f"{CALLABLES}:holds_low_alone")


def test_subgraphs_are_the_step_of_modules_that_compute_so_and_count_each_ranks_own_tokens(pools: Pools) -> None:
    """2 experts for each of 32 tokens in 2 steps, in each of 2 layers; what is computed again is counted once."""
    plan = replace(PLANS["override.subgraph"], step=PLANS["override.checkpoint"].step)
    payload = payload_of(plan, step_of(plan))
    ranks = assert_same(pools, payload, "by_torch:fsdp2_steps", factory="fixtures.models.routed:build_dense")
    for state in (rank["state"] for rank in ranks):
        assert list(state) == ["layers.0.moe.tokens", "layers.1.moe.tokens"]
        assert all(tokens.sum() == 2 * 32 * 2 for tokens in state.values())
    assert not torch.equal(*(rank["state"]["layers.0.moe.tokens"] for rank in ranks))
