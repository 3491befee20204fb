"""One check of one plan, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from suites.capture.parity import ROOT


@pytest.fixture
def checked(pools: Pools, tmp_path: Path) -> Callable[..., Verdict]:
    """What a check of a plan comes to, by the check's name; ``settings`` are further ones of the run."""

    def check(plan: Plan, name: str, **settings: Any) -> Verdict:
        return PlanRun(plan, RunSettings(ROOT, tmp_path / "golden", tmp_path / "artifacts", **settings), pools).check(name)

    return check
