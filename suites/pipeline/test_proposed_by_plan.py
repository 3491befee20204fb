"""A plan that asks for stages is captured with the cuts that are proposed, or refused where they would not stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.pipeline.of_plan import planned_stages, with_cuts
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Pipeline
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of

PLAN = """
[model]
factory = "suites.cli.staged_nets:build"
batch = "suites.cli.staged_nets:batch"
args = { tied = false }
[parallel]
dp_shard = 2
pp = 3
[pipeline]
stages = 3
balance = "flops"
[step]
microbatches = 4
[bucket]
plan = ["embed", "layers.*", "head"]
"""


def plan_with(pipeline: Pipeline | None = None) -> Plan:
    (plan,) = parse_plans(PLAN, Path("p.toml"))
    return replace(plan, pipeline=pipeline) if pipeline else plan


def digests(plan: Plan) -> dict[str, str]:
    return {str(phase): one.digest for phase, one in PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual").final(0).items()}


def test_proposed_cuts_are_those_that_are_said_and_captured() -> None:
    plan = plan_with()
    written = with_cuts(plan)
    assert written.pipeline == Pipeline(("layers.1", "layers.3"), balance="flops")
    assert planned_stages(plan).cuts == ("layers.1", "layers.3")
    assert digests(plan) == digests(written) != digests(plan_with(Pipeline(("layers.0", "layers.2"))))


def test_written_cuts_and_plans_without_stages_stay() -> None:
    for plan in (plan_with(Pipeline(("layers.0",))), replace(plan_with(), pipeline=None)):
        assert with_cuts(plan) is plan


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (
            Pipeline(stages=3, balance="seconds"),
            '[pipeline] balance = "seconds" gives other cuts from run to run, which no check could hold; write the cuts that '
            "fxbucket stages proposes",
        ),
        (Pipeline(stages=9), "[pipeline]: the model has 6 modules to cut behind, too few for 9 stages; 7 is the most"),
    ],
)
def test_cuts_that_cannot_be_proposed_are_one_sentence(pipeline: Pipeline, says: str) -> None:
    with pytest.raises(FxbucketError) as caught:
        with_cuts(plan_with(pipeline))
    assert str(caught.value) == f"p.toml: {says}"
