"""The captured, unbucketed step against torch's own on the same ranks, in each mode: every check stands on this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from parity import PLANS, ROOT, assert_same, by_hand, changed, payload_of, step_of

from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools


def of_two_layers(plan: Plan) -> Plan:
    """``plan`` with 2 layers: more of the same say nothing new."""
    assert plan.model is not None
    if "llama:" not in plan.model.factory:
        return plan
    entries = tuple(entry for entry in plan.bucket.plan if not re.fullmatch(r"layers\.([2-9]|\d\d+)", entry.name))
    model = replace(plan.model, args={**plan.model.args, "layers": 2})
    return replace(plan, model=model, bucket=replace(plan.bucket, plan=entries))


def is_fsdp2(plan: Plan) -> bool:
    """Whether torch's FSDP2, on the plan's mesh, is what the plan says; gpt.toml is compared below, in parts that FSDP2 takes."""
    sharded = plan.parallel.mode in ("fully_shard", "hybrid_shard", "fixtures.modes:predivided")
    return sharded and plan.parallel.reduce_order == "scatter_first" and plan.parallel.ep == 1 and plan.path.stem != "gpt"


FSDP2 = {
    name: of_two_layers(plan)
    for name, plan in {
        **{name: plan for name, plan in PLANS.items() if is_fsdp2(plan)},
        "llama: bfloat16 reduction": changed("llama", reduce_dtype=None),
        "llama: float32 parameters, bfloat16 reduction": changed("llama", param_dtype=None, reduce_dtype="bfloat16"),
        "llama_tied: kept": changed("llama_tied", reshard_after_forward=False),
        "uneven: bfloat16 inputs and parameters": changed("uneven", param_dtype="bfloat16", reduce_dtype="float32"),
        "uneven: kept": changed("uneven", reshard_after_forward=False),
        "hf_llama: float32, kept": changed("hf_llama", param_dtype=None, reduce_dtype=None, reshard_after_forward=False),
        "checkpoint: kept": changed("checkpoint", reshard_after_forward=False),
        "hybrid: bfloat16 reduction": changed("hybrid", reduce_dtype=None),
        "2 microbatches": changed("checkpoint", microbatches=2),
        "2 microbatches: bfloat16 reduction": changed("hybrid", microbatches=2, reduce_dtype=None),
        "2 microbatches: float32 parameters, bfloat16 reduction": changed(
            "hybrid", microbatches=2, param_dtype=None, reduce_dtype="bfloat16"
        ),
        "2 microbatches: tp": changed("tp", microbatches=2),
    }.items()
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    pools.start()
    yield pools
    pools.close()


@pytest.mark.parametrize("plan", FSDP2.values(), ids=FSDP2.keys())
def test_the_traced_step_is_the_step_that_fully_shard_takes(plan: Plan, pools: Pools) -> None:
    assert_same(pools, payload_of(plan, step_of(plan)), "by_torch:fsdp2_steps")


REPLICATED = {"replicate": PLANS["replicate"], "2 microbatches": changed("replicate", microbatches=2)}


@pytest.mark.parametrize("plan", REPLICATED.values(), ids=REPLICATED.keys())
def test_a_replicated_step_is_the_step_that_ddp_takes(plan: Plan, pools: Pools) -> None:
    assert_same(pools, payload_of(plan, step_of(plan)), "by_torch:ddp_steps")


def test_a_replicated_step_with_tp_is_parallelize_module_and_averages(pools: Pools) -> None:
    plan = PLANS["tp.replicate"]
    payload = payload_of(plan, step_of(plan), **by_hand(plan, "dp_replicate", share=None))
    assert_same(pools, payload, "by_hand:by_hand_steps")


def test_every_model_of_the_fixtures_is_compared() -> None:
    models = {f"fixtures.models.{path.stem}" for path in (ROOT / "fixtures" / "models").glob("*.py")}
    compared = {plan.model.factory.partition(":")[0] for plan in FSDP2.values() if plan.model is not None}
    assert models - {"fixtures.models.__init__", "fixtures.models.traced"} == compared
