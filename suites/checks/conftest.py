"""The check bitwise of a small MLP on ranks, whose plan each test changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_checks import Run
from pytest_fxbucket.plan.schema_model import Model, Parallel
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings

MODEL = Model("bitwise_models:build", "bitwise_models:batch", {}, "bitwise_models:loss")
PLAN = Plan(
    Path(__file__).with_name("mlp.toml"),
    parallel=Parallel(dp_shard=2),
    bucket=Bucket(plan=parse_entries(["up", "down", "scale"], "test")),
    run=Run(steps=2, timeout_s=60),
)


@pytest.fixture(scope="module")
def last_step() -> LastStep:
    """Plans that trace the same, one after another, are captured once."""
    return LastStep()


@pytest.fixture
def bitwise(pools: Pools, tmp_path: Path, last_step: LastStep) -> Callable[..., Verdict]:
    """Run it, or another check; ``model`` has changes of [model], ``settings`` of RunSettings, other keywords of the plan.

    ``anew``: the step is captured by itself, as where a test changes capture.
    """

    def run(
        check: str = "bitwise",
        model: Mapping[str, Any] = {},
        settings: Mapping[str, Any] = {},
        anew: bool = False,
        **change: Any,
    ) -> Verdict:
        plan = replace(PLAN, model=replace(MODEL, **model), **change)
        given = RunSettings(Path(__file__).parent, tmp_path / "golden", tmp_path / "artifacts")
        return PlanRun(plan, replace(given, **settings), pools, last_step=LastStep() if anew else last_step).check(check)

    return run
