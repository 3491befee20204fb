"""A step whose work crosses iterations is no one graph that could be timed, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.bench.measure import timed_graph
from pytest_fxbucket.errors import BenchmarkError
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.step.portable import digest
from suites.checks.test_bitwise_iterations import ADAMW, PLAN


def test_a_step_that_crosses_iterations_is_refused_and_unbucketed_is_not(tmp_path: Path) -> None:
    text = PLAN.format(ranks=2, steps=1, optimizer=ADAMW[0], args=ADAMW[1], transform="next_iteration", more="")
    (plan,) = parse_plans(text, tmp_path / "plan.toml")
    world = PlanOnMesh(plan, mesh_of(plan), "manual", lambda _: None)
    with pytest.raises(BenchmarkError, match=r"plan.toml: the step runs as graphs setup, steady, cleanup, which"):
        timed_graph("bucketed", world, 0, "joint")
    assert digest(timed_graph("unbucketed", world, 0, "joint")) == digest(world.unbucketed(0, "joint"))
