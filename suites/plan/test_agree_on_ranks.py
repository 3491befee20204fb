"""A mesh too large to run is told before anything is traced, with one that is not."""

from __future__ import annotations

import pytest

from pytest_fxbucket.backends import MAX_RANKS
from pytest_fxbucket.plan import Plan, PlanError
from pytest_fxbucket.plan.mesh_consistency import refuse_too_many_ranks
from pytest_fxbucket.plan.schema import rule_of
from suites.plan.plan_texts import BUCKET, MODEL
from suites.plan.plan_texts import plan_of as read


def plan_of(parallel: str, world: str = "") -> Plan:
    return read(f"{MODEL}{BUCKET}[parallel]\n{parallel}", f"[run]\nworld = {world}" if world else "")


def refusal(plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        refuse_too_many_ranks(plan, MAX_RANKS, "p.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "smaller"),
    [
        ("dp_shard = 256", "dp_shard = 4"),
        ('mode = "replicate"\ndp_replicate = 65', "dp_replicate = 2"),
        ('mode = "hybrid_shard"\ndp_replicate = 2\ndp_shard = 64', "dp_shard = 4"),
        ('mode = "hybrid_shard"\ndp_replicate = 8\ndp_shard = 256', "dp_replicate = 2, dp_shard = 4"),
        ('dp_shard = 64\ntp = 2\ntp_plan = { "a" = "colwise" }', "dp_shard = 4"),
        ('dp_shard = 8\ntp = 32\ntp_plan = { "a" = "colwise" }', "dp_shard = 4, tp = 2"),
        ('dp_shard = 96\nep = 3\nep_plan = ["a"]', "dp_shard = 3"),
        ('dp_shard = 96\nep = 8\nep_plan = ["a"]', "dp_shard = 8"),
    ],
)
def test_a_mesh_too_large_is_told_with_a_world_that_can_be_run(parallel: str, smaller: str) -> None:
    plan = plan_of(parallel)
    assert refusal(plan) == (
        f"p.toml: [parallel] has {plan.world_size} ranks, and at most 64 can be run here; set [run] world, "
        f"as in world = {{ {smaller} }}"
    )
    refuse_too_many_ranks(plan_of(parallel, f"{{ {smaller} }}"), MAX_RANKS, "p.toml")


def test_a_world_that_is_still_too_large_is_told_as_such() -> None:
    assert refusal(plan_of("dp_shard = 256", "{ dp_shard = 128 }")) == (
        "p.toml: [parallel] with [run] world has 128 ranks, and at most 64 can be run here; make [run] world smaller, "
        "as in world = { dp_shard = 4 }"
    )


def test_as_many_ranks_as_can_be_run_are_taken() -> None:
    refuse_too_many_ranks(plan_of(f"dp_shard = {MAX_RANKS}"), MAX_RANKS, "p.toml")


def test_the_plan_files_reference_says_how_many_ranks_can_be_run() -> None:
    assert f"at most {MAX_RANKS} ranks" in rule_of("run", "world").doc
