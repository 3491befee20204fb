"""What a step launches again on purpose is left alone unless it is asked for; of real plans, as they are captured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.checks.promises.expectations import promise_of
from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.graph.collectives import is_all_gather
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema_bucket import Transform
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.step.roles import Transformed
from suites.graph.handmade import Handmade, aten
from suites.plans.llama import llama
from suites.transforms.duplicates import Changed

PARAMETERS, BOTH = 12, 23
"""Gathers of a microbatch, in forward and in both: what is embedded is not needed in backward."""
SIDE = 'backward launches its own instead of keeping it, as reshard_after_forward = true has it; again = "backward" merges it'
ROUND = 'each round (microbatch) launches its own instead of keeping it; again = "microbatches" merges it'


@cache
def captured(step: str) -> PlanOnMesh:
    """Without the transformation, for all that have it."""
    text = llama("layers = 1, dim = 16, heads = 2, kv_heads = 1", reshard_after_forward=True)
    (plan,) = parse_plans(f"{text}[step]\n{step}", Path("plan.toml"))
    return PlanOnMesh(CapturedPlan(plan, mesh_of(plan)), "manual")


def world_of(step: str, again: Any) -> PlanOnMesh:
    made = captured(step)
    plan = replace(made.plan, transform=(Transform("merge_duplicates", {"again": again}),))
    return made.under(plan)


def gathers(world: PlanOnMesh) -> tuple[int, int]:
    """All-gathers before and after the transformation."""
    steps = (world.step(0), world.versions(0).step)
    before, after = (sum(map(is_all_gather, step.graphs["joint"].graph.nodes)) for step in steps)
    return before, after


def told(world: PlanOnMesh) -> Transformed:
    (found,) = world.versions(0).step.transformed
    return found


def audited(world: PlanOnMesh) -> list[str]:
    promise = promise_of(world.plan, world.step(0).parameters, world.resolution, world.members)
    return audit(promise, world.reading(0)["joint"], world.passed(0)["joint"].reading)


TWO = "microbatches = 2"


@pytest.mark.parametrize(
    ("step", "again", "counts", "whys"),
    [
        ("", False, (BOTH, BOTH), [SIDE]),
        ('checkpoint = ["layers.0"]', False, (BOTH, BOTH), [SIDE]),
        ("", "backward", (BOTH, PARAMETERS), []),
        (TWO, False, (2 * BOTH, 2 * BOTH), [SIDE, ROUND]),
        (TWO, "microbatches", (2 * BOTH, BOTH), [SIDE]),
        (TWO, "backward", (2 * BOTH, 2 * PARAMETERS), [ROUND]),
        (TWO, True, (2 * BOTH, PARAMETERS), []),
    ],
)
def test_what_backward_and_microbatches_gather_again_stays_unless_asked(
    step: str, again: Any, counts: tuple[int, int], whys: list[str]
) -> None:
    world = world_of(step, again)
    assert gathers(world) == counts
    assert {why for _, why in told(world).left} == set(whys)
    assert bool(told(world).done) == (counts[1] < counts[0])
    if step != TWO:
        assert len(told(world).done) == counts[0] - counts[1]
        assert [what[:14] + what[-16:] for what, _ in told(world).left] == ["all_gather of  more (backward)"] * len(whys)
    if again in (False, "microbatches"):
        assert audited(world) == []
    elif step != TWO:  # it undoes resharding, and the audit names that
        problems = [text for text in audited(world) if text.startswith("reshard_after_forward")]
        said = "reshard_after_forward = true, but backward reads forward's gather of "
        assert [text.startswith(said) for text in problems] == [True]


@pytest.mark.parametrize("again", [False, True])
def test_by_marks_alone_without_a_loss(again: bool) -> None:
    made = Handmade()
    shard = made.given("value", "0", 2, 3)
    first = made.call(aten.neg.default, made.gathered(shard))
    second = made.call(aten.exp.default, made.gathered(shard))
    second.meta["autograd_backward"] = True
    made.returns(first, "value", "0")
    made.returns(second, "value", "1")
    found = Changed(fx.GraphModule(torch.nn.Module(), made.finish()), made.inputs, made.outputs, again=again)
    assert len(found.launches) == 2 - again
    assert found.whys == ([] if again else [SIDE])


def test_updates_go_with_backward_and_what_forward_does_besides_the_loss_with_forward() -> None:
    made = Handmade()
    x, y = made.param("x", 2, 3), made.param("y", 2, 3)
    made.loss(made.gathered(x))
    made.returns(made.call(aten.sum.default, made.gathered(x)), "value", "seen")
    backward = made.call(aten.neg.default, made.gathered(y))
    backward.meta["autograd_backward"] = True
    made.returns(backward, "grad", "z")
    made.returns(made.call(aten.exp.default, made.gathered(y)), "param", "w")
    found = Changed(fx.GraphModule(torch.nn.Module(), made.finish()), made.inputs, made.outputs)
    assert len(found.launches) == 2
    assert found.transformed.left == ()


def test_it_is_taken_where_no_parameter_is_gathered() -> None:
    text = llama("layers = 1, dim = 16", 1, mode="replicate", dp_replicate=2)
    (plan,) = parse_plans(f'{text}[[transform]]\nname = "merge_duplicates"\nargs = {{ again = "backward" }}\n', Path("p.toml"))
    assert plan.transform[0].args == {"again": "backward"}
