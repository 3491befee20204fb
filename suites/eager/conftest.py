"""One way to run a check of a plan that a test writes down."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.eager.eager_net import ROOT, Run, plan_of


@pytest.fixture(scope="module")
def last_step() -> LastStep:
    """Plans that trace the same, one after another, are captured once."""
    return LastStep()


@pytest.fixture
def run(pools: Pools, tmp_path: Path, last_step: LastStep) -> Run:
    """run(plan or its text, check="eager") -> its verdict; ``anew``: captured by itself, as where a test changes capture."""

    def verdict(plan: Plan | str, check: str = "eager", anew: bool = False) -> Verdict:
        plan = plan_of(plan) if isinstance(plan, str) else plan
        settings = RunSettings(ROOT, tmp_path / "golden", tmp_path)
        return PlanRun(plan, settings, pools, last_step=LastStep() if anew else last_step).check(check)

    return verdict
