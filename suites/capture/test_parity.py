"""The captured, unbucketed step against torch's own on the same ranks, in each mode: every check stands on this one."""

from __future__ import annotations

import pytest
import torch
from parity import PLANS, ROOT, apart, assert_same, by_hand, changed, differences, differing, payload_of, run, step_of

from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools

# Of the plans in fixtures/plans (whole.toml: microbatches, checkpoints and tp in one) their own item `eager` says it, but for
# modes of the user's own.
FSDP2 = apart(
    {
        "a mode of the user's own": PLANS["mode"],
        "uneven: bfloat16 inputs and parameters, kept": changed(
            "uneven", param_dtype="bfloat16", reduce_dtype="float32", reshard_after_forward=False
        ),
        "checkpoint: kept": changed("checkpoint", reshard_after_forward=False),
        "2 microbatches: bfloat16 reduction": changed("hybrid", microbatches=2, reduce_dtype=None),
        "2 microbatches: float32 parameters, bfloat16 reduction": changed(
            "hybrid", microbatches=2, param_dtype=None, reduce_dtype="bfloat16"
        ),
    }
)


@pytest.mark.parametrize("plan", FSDP2.values(), ids=FSDP2.keys())
def test_the_traced_step_is_the_step_that_fully_shard_takes(plan: Plan, pools: Pools) -> None:
    assert_same(pools, payload_of(plan, step_of(plan)), "by_torch:fsdp2_steps")


WITH_BIASES = changed(
    "gpt",
    args={"norm_dtype": "float32", "twice": None, "frozen": [], "counts": False},
    dp_shard=2,
    tp=2,
    tp_plan={
        **{f"layers.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
        **{"layers.*.attention.out": "rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"},
    },
)


def test_biases_of_rowwise_linears_are_added_once_the_ranks_parts_are_summed(pools: Pools) -> None:
    """As in Megatron-LM. RowwiseParallel adds them to a part, and so rounds otherwise: its bits part at the first gradients."""
    step = step_of(WITH_BIASES)
    rowwise = [f"layers.{layer}.{name}" for layer in range(3) for name in ("attention.out", "mlp.down")]
    assert_same(pools, payload_of(WITH_BIASES, step, biases_last=rowwise), "by_torch:fsdp2_steps")


def test_a_replicated_step_of_two_microbatches_is_the_step_that_ddp_takes(pools: Pools) -> None:
    plan = changed("replicate", microbatches=2)
    assert_same(pools, payload_of(plan, step_of(plan)), "by_torch:ddp_steps")


def test_a_replicated_step_with_tp_is_parallelize_module_and_averages(pools: Pools) -> None:
    plan = PLANS["tp.replicate"]
    payload = payload_of(plan, step_of(plan), **by_hand(plan, "dp_replicate", share=None))
    assert_same(pools, payload, "by_hand:by_hand_steps")


def test_gradients_averaged_over_copies_first_are_those_of_two_averages_by_hand(pools: Pools) -> None:
    """FSDP2 has only the other order: (0 + 1) + (2 + 3), where this is (0 + 2) + (1 + 3).

    In float32, where both round. Of bfloat16 gradients float32 holds sums of four without rounding: there no order can be seen.
    """
    plan = changed("hybrid.replicate_first", param_dtype=None)
    share = (0, 2, [rank % 2 for rank in range(4)])
    payload = payload_of(plan, step_of(plan), **by_hand(plan, "dp_replicate", "dp_shard", share=share))
    assert_same(pools, payload, "by_hand:by_hand_steps")
    ours, eager = run(pools, "parity_jobs:graph_steps", payload), run(pools, "fixtures.reference.by_torch:fsdp2_steps", payload)
    apart = list(differences(ours, eager))
    assert not [one for one in apart if one.startswith("step 0") and "gradient" not in one], "losses before the first reduction"
    assert [one for one in apart if one.startswith("step 0") and "gradient" in one], "the order can be seen"


def test_a_mode_that_shards_the_last_dimension_is_the_average_by_hand(pools: Pools) -> None:
    plan = changed("buckets", mode="capture_models:last_dimension", param_dtype=None, reduce_dtype=None)
    share = (-1, 4, range(4))
    payload = payload_of(plan, step_of(plan), **by_hand(plan, "dp_shard", share=share))
    assert_same(pools, payload, "by_hand:by_hand_steps")


GPT = {
    # FSDP2 asks for one dtype in a unit, so norms are units of their own.
    "norms of float64": (
        changed("gpt", args={"twice": None}),
        [
            *([f"layers.{i}.{norm}"] for i in range(3) for norm in ("attention_norm", "mlp_norm")),
            ["norm"],
            *([f"layers.{i}"] for i in range(3)),
        ],
    ),
    # A unit called twice is reduced twice, and the averages added; capture reads a parameter once, as FSDP2's root does.
    "a layer called twice": (changed("gpt", args={"norm_dtype": "float32"}), [["layers.0"], ["layers.2"]]),
}


@pytest.mark.parametrize(("plan", "units"), GPT.values(), ids=GPT.keys())
def test_what_real_models_have_is_as_fully_shard_has_it(plan: Plan, units: list[list[str]], pools: Pools) -> None:
    step = step_of(plan)
    assert any(parameter.local_shape[0] % 3 for parameter in step.parameters), "uneven shards"
    assert any(parameter.aliases for parameter in step.parameters), "tied"
    frozen = [parameter.fqn for parameter in step.parameters if not parameter.trainable]
    assert frozen
    assert not {value.fqn for value in step.outputs["joint"]}.intersection(frozen)
    payload = payload_of(plan, step, units=units)
    assert_same(pools, payload, "by_torch:fsdp2_steps")


MOE = {
    "moe": PLANS["moe"],
    "float32": changed("moe", param_dtype=None, reduce_dtype=None),
    "one rank for each expert": PLANS["moe.one_each"],
    "copies": changed("moe", mode="hybrid_shard", dp_replicate=2, dp_shard=2),
}


def experts_by_hand(plan: Plan) -> dict[str, object]:
    """Further keys of ``by_hand_steps`` for a mixture of experts on 4 ranks."""
    parallel = plan.parallel
    shards = parallel.dp_shard // parallel.ep  # of one expert, beside each other in the last but one dimension
    ranks = torch.arange(4).view(parallel.dp_replicate, shards, parallel.ep)
    averages = ["dp_shard", "dp_replicate"][: 1 + (parallel.dp_replicate > 1)]
    share = (0, parallel.dp_shard, [rank % parallel.dp_shard for rank in range(4)])
    return by_hand(plan, *averages, share=share) | {
        "experts": ["layers.0.experts", "layers.1.experts"],
        "expert_ranks": ranks.flatten(0, 1).tolist(),
        "expert_averages": [ranks.transpose(1, 2).flatten(0, 1).tolist(), ranks.flatten(1).T.tolist()],
        "expert_share": (0, shards, [rank // parallel.ep % shards for rank in range(4)]),
    }


@pytest.mark.parametrize("plan", MOE.values(), ids=MOE.keys())
def test_experts_that_tokens_travel_to_are_those_of_all_to_all_by_hand(plan: Plan, pools: Pools) -> None:
    payload = payload_of(plan, step_of(plan), **experts_by_hand(plan))
    assert_same(pools, payload, "by_hand:by_hand_steps")


def test_parting_experts_changes_in_the_first_step_the_rounding_of_their_gradients_and_nothing_else(pools: Pools) -> None:
    """With ep = 2 one product sums over the tokens of two ranks; without, each rank sums its own and the reduction adds them.

    So bits part at the experts' gradients of step 0, and everywhere from the first update on.
    """
    plan, whole = MOE["float32"], changed("moe", param_dtype=None, reduce_dtype=None, ep=1, ep_plan=())
    parted = run(pools, "parity_jobs:graph_steps", payload_of(plan, step_of(plan)))
    torchs = run(pools, "fixtures.reference.by_torch:fsdp2_steps", payload_of(whole, step_of(whole)))
    for rank, (mine, theirs) in enumerate(zip(parted, torchs, strict=True)):
        a, b = mine["steps"][0], theirs["steps"][0]
        assert differing({"loss": a["loss"]}, {"loss": b["loss"]}) == []
        expert = rank % 2 * 2 + rank // 2  # of which this rank has the row; without ep it is rank's
        experts = {name: torchs[expert]["steps"][0]["gradients"][name] for name in b["gradients"] if "experts" in name}
        assert differing(a["gradients"], b["gradients"] | experts) == list(experts)


def test_every_model_of_the_fixtures_is_compared() -> None:
    models = {f"fixtures.models.{path.stem}" for path in (ROOT / "fixtures" / "models").glob("*.py")}
    plans = [*FSDP2.values(), *(plan for plan, _ in GPT.values()), *MOE.values()]
    plans += [plan for plan in PLANS.values() if plan.checks.eager and plan.parallel.ep == 1]
    compared = {plan.model.factory.partition(":")[0] for plan in plans if plan.model is not None}
    assert models - {"fixtures.models.__init__", "fixtures.models.traced"} == compared
