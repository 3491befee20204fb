"""One way to run a check of a plan that a test writes down."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.eager.eager_net import ROOT, Run, plan_of


@pytest.fixture
def run(pools: Pools, tmp_path: Path) -> Run:
    """run(plan or its text, check="eager") -> its verdict; of one plan always the same capture."""
    known: dict[int, PlanRun] = {}

    def verdict(plan: Plan | str, check: str = "eager") -> Verdict:
        plan = plan_of(plan) if isinstance(plan, str) else plan
        one = known.setdefault(id(plan), PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path), pools))
        return one.check(check)

    return verdict
